"""The constants of the specification: magics, versions, sizes, maxima. Nothing else."""

from typing import Final

MAGIC: Final = bytes.fromhex("89 46 50 53 0D 0A 1A 0A")
END_MAGIC: Final = bytes.fromhex("89 46 50 45 0D 0A 1A 0A")
INDEX_MAGIC: Final = b"FPSINDEX"

FORMAT_NAME: Final = "fpformat"
VERSION: Final = (1, 0)

HEADER_NBYTES: Final = 128
FOOTER_NBYTES: Final = 128
DIRECTORY_HEADER_NBYTES: Final = 32
DIRECTORY_ENTRY_NBYTES: Final = 64
TABLE_ALIGN: Final = 64

BYTE_ORDER: Final = 0x0102
CHECKSUM_CRC32C: Final = 1
NONE: Final = 0xFFFFFFFF

LOG2_ALIGN: Final = (12, 21)
LOG2_TENSOR_ALIGN: Final = (6, 12)
LOG2_PIECE: Final = (14, 20)
DEFAULT_ALIGN: Final = 4096
DEFAULT_TENSOR_ALIGN: Final = 64
DEFAULT_PIECE: Final = 256 * 1024

MAX_INT: Final = 2**53 - 1
MAX_NDIM: Final = 64
MAX_CUT_DIMS: Final = 8
MAX_NAME_NBYTES: Final = 65_535
MAX_TREE_DEPTH: Final = 128
KEY_INTS: Final = range(-(1 << 63), 1 << 63)
MAX_ENTRIES: Final = 2**24
MAX_SEGMENTS: Final = 65_536
MAX_WORLD_SIZE: Final = 2**32 - 1
MAX_MANIFEST_NBYTES: Final = 16 * 1024 * 1024
MAX_JSON_DEPTH: Final = 16
SAVE_ID_NBYTES: Final = 16

FEATURE_ZSTD: Final = 1 << 0
FEATURE_UNREGISTERED: Final = 1 << 63
INCOMPAT_BITS: Final = {"zstd": FEATURE_ZSTD}


def round_up(nbytes: int, *, to: int) -> int:
    """Return the first multiple of `to` that is not below `nbytes`."""
    return -(-nbytes // to) * to
