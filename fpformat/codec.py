"""Optional codecs of pieces by number; ``zstandard`` is imported on first use.

A piece is compressed alone, so that random access stays. Codec 2 first gathers the first bytes of
all elements, then the second ones and so on: such byte planes compress better for floats.
"""

from typing import Final

import numpy as np

from fpformat.errors import fault

RAW: Final = 0
ZSTD: Final = 1
ZSTD_PLANES: Final = 2
MAX_WINDOW_NBYTES: Final = 1 << 23


def decode_piece(
    stored: memoryview, *, codec: int, raw_nbytes: int, itemsize: int, where: str
) -> bytes:
    """Return the raw bytes of one piece.

    Raises:
        FormatError: ZST-1 or ZST-3 for a frame that is damaged, has another length or needs too
            large a window; FEA-1 when the package ``zstandard`` is not installed.
    """
    try:
        import zstandard
    except ImportError as error:
        detail = "is compressed; the feature zstd needs the package zstandard"
        raise fault("FEA-1", where, detail) from error
    try:
        parameters = zstandard.get_frame_parameters(stored)
        if parameters.window_size > MAX_WINDOW_NBYTES:
            raise fault("ZST-3", where, f"needs a window of {parameters.window_size} bytes")
        if parameters.content_size != raw_nbytes:
            detail = f"states {parameters.content_size} bytes for a piece of {raw_nbytes}"
            raise fault("ZST-1", where, detail)
        if parameters.dict_id:
            raise fault("ZST-1", where, f"needs the dictionary {parameters.dict_id}")
        raw = zstandard.ZstdDecompressor().decompress(
            stored, max_output_size=raw_nbytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise fault("ZST-1", where, f"the zstd frame is damaged: {error}") from error
    if len(raw) != raw_nbytes:
        raise fault("ZST-1", where, f"decodes to {len(raw)} bytes, not {raw_nbytes}")
    if codec == ZSTD_PLANES:
        planes = np.frombuffer(raw, dtype=np.uint8).reshape(itemsize, -1)
        return planes.T.tobytes()
    return bytes(raw)
