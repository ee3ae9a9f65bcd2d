"""How values stand in bytes: the fixed records of a segment, values one by one, and packed pieces.

Header and footer end in (or near) a masked CRC-32C of themselves. Parsing checks integrity before
meaning: magic and checksum first, then the version, then the fields. Reserved bytes are zero and
checked. A `Cursor` reads values off a document front to back, never past its end. A piece is packed
alone, so that random access stays; ``zstandard`` is imported on first use.
"""

import struct
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import numpy as np

from fpformat.dtypes import DTYPES, DType, numpy_dtype
from fpformat.errors import fault
from fpformat.limits import (
    BYTE_ORDER,
    CHECKSUM_CRC32C,
    END_MAGIC,
    FEATURE_UNREGISTERED,
    FEATURE_ZSTD,
    FOOTER_NBYTES,
    HEADER_NBYTES,
    LOG2_ALIGN,
    LOG2_PIECE,
    LOG2_TENSOR_ALIGN,
    MAGIC,
    VERSION,
)
from fpformat.records.checksum import crc32c, mask
from fpformat.records.model import Geometry

HEADER_FIELDS: Final = (
    ("magic", "8s"),
    ("major", "H"),
    ("minor", "H"),
    ("header_nbytes", "I"),
    ("incompat", "Q"),
    ("ro_compat", "Q"),
    ("compat", "Q"),
    ("byte_order", "H"),
    ("checksum_algorithm", "H"),
    ("ordinal", "I"),
    ("save_id", "16s"),
    ("log2_align", "B"),
    ("log2_tensor_align", "B"),
    ("log2_piece", "B"),
    ("zero", "57s"),
    ("crc", "I"),
)
FOOTER_FIELDS: Final = (
    ("index_offset", "Q"),
    ("index_nbytes", "Q"),
    ("index_sha256", "32s"),
    ("save_id", "16s"),
    ("segment_nbytes", "Q"),
    ("ordinal", "I"),
    ("zero", "40s"),
    ("crc", "I"),
    ("end_magic", "8s"),
)
_HEADER: Final = struct.Struct("<" + "".join(code for _, code in HEADER_FIELDS))
_FOOTER: Final = struct.Struct("<" + "".join(code for _, code in FOOTER_FIELDS))
_HEADER_CRC_OFFSET: Final = 124
_FOOTER_CRC_OFFSET: Final = 116
FOOTER_RESERVED: Final = slice(76, 116)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a segment says of itself at its start."""

    ordinal: int
    save_id: bytes
    geometry: Geometry
    incompat: int = 0
    ro_compat: int = 0
    compat: int = 0
    minor: int = VERSION[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """What a segment says of itself at its end."""

    index_offset: int
    index_nbytes: int
    index_sha256: bytes
    save_id: bytes
    segment_nbytes: int
    ordinal: int


def dump_header(header: Header) -> bytes:
    """Return the header block: the record and zeros up to the block size."""
    geometry = header.geometry
    record = _HEADER.pack(
        MAGIC,
        VERSION[0],
        header.minor,
        HEADER_NBYTES,
        header.incompat,
        header.ro_compat,
        header.compat,
        BYTE_ORDER,
        CHECKSUM_CRC32C,
        header.ordinal,
        header.save_id,
        geometry.align.bit_length() - 1,
        geometry.tensor_align.bit_length() - 1,
        geometry.piece_nbytes.bit_length() - 1,
        bytes(57),
        0,
    )
    record = record[:_HEADER_CRC_OFFSET] + _own_crc(record[:_HEADER_CRC_OFFSET])
    return record.ljust(geometry.align, b"\0")


def dump_footer(footer: Footer, *, align: int) -> bytes:
    """Return the footer block: zeros, then the record."""
    record = _FOOTER.pack(
        footer.index_offset,
        footer.index_nbytes,
        footer.index_sha256,
        footer.save_id,
        footer.segment_nbytes,
        footer.ordinal,
        bytes(40),
        0,
        END_MAGIC,
    )
    record = record[:_FOOTER_CRC_OFFSET] + _own_crc(record[:_FOOTER_CRC_OFFSET]) + END_MAGIC
    return record.rjust(align, b"\0")


def is_zero(padding: "memoryview | bytes | bytearray") -> bool:
    """Return whether a stretch of padding or reserved bytes is all zero."""
    return not np.frombuffer(padding, dtype=np.uint8).any()


def _own_crc(covered: bytes) -> bytes:
    return mask(crc32c(covered)).to_bytes(4, "little")


def parse_header(record: bytes, where: str) -> Header:
    """Parse the first 128 bytes of a segment.

    Raises:
        FormatError: HDR-1 to HDR-9, in the order of clause RDR-4.
    """
    if record[:8] != MAGIC:
        raise fault("HDR-1", where, f"starts with {record[:8].hex(' ')}, not the segment magic")
    if record[_HEADER_CRC_OFFSET:] != _own_crc(record[:_HEADER_CRC_OFFSET]):
        raise fault("HDR-2", where, "checksum of the header record differs")
    fields = dict(zip((name for name, _ in HEADER_FIELDS), _HEADER.unpack(record), strict=True))
    _check_header_versions(fields, where)
    _check_header_fields(fields, where)
    return Header(
        ordinal=fields["ordinal"],
        save_id=fields["save_id"],
        geometry=Geometry(
            align=1 << fields["log2_align"],
            tensor_align=1 << fields["log2_tensor_align"],
            piece_nbytes=1 << fields["log2_piece"],
        ),
        incompat=fields["incompat"],
        ro_compat=fields["ro_compat"],
        compat=fields["compat"],
        minor=fields["minor"],
    )


def _check_header_versions(fields: dict[str, int], where: str) -> None:
    if fields["major"] != VERSION[0]:
        detail = f"major version {fields['major']}; this reader knows {VERSION[0]}"
        raise fault("HDR-3", where, detail)
    if unknown := fields["incompat"] & ~(FEATURE_ZSTD | FEATURE_UNREGISTERED):
        raise fault("HDR-4", where, f"unknown incompat feature bits {unknown:#x}")


def _check_header_fields(fields: dict[str, Any], where: str) -> None:
    if fields["header_nbytes"] != HEADER_NBYTES:
        detail = f"header_nbytes is {fields['header_nbytes']}, not {HEADER_NBYTES}"
        raise fault("HDR-5", where, detail)
    if fields["byte_order"] != BYTE_ORDER:
        raise fault("HDR-6", where, f"byte order mark is {fields['byte_order']:#06x}, not 0x0102")
    if fields["checksum_algorithm"] != CHECKSUM_CRC32C:
        detail = f"checksum algorithm {fields['checksum_algorithm']}; this reader knows 1 (CRC-32C)"
        raise fault("HDR-7", where, detail)
    ranges = {
        "log2_align": LOG2_ALIGN,
        "log2_tensor_align": LOG2_TENSOR_ALIGN,
        "log2_piece": LOG2_PIECE,
    }
    for name, (low, high) in ranges.items():
        if not low <= fields[name] <= high:
            raise fault("HDR-8", where, f"{name} is {fields[name]}, not {low} to {high}")
    if fields["zero"] != bytes(57):
        raise fault("HDR-9", where, "reserved bytes 67 to 123 are not zero")


def parse_footer(record: bytes, where: str) -> Footer:
    """Parse the last 128 bytes of a segment.

    Raises:
        FormatError: FTR-1 or FTR-2. Reserved bytes are the caller's to check, after identity.
    """
    if record[-8:] != END_MAGIC:
        raise fault("FTR-1", where, f"ends with {record[-8:].hex(' ')}, not the end magic")
    if record[_FOOTER_CRC_OFFSET:-8] != _own_crc(record[:_FOOTER_CRC_OFFSET]):
        raise fault("FTR-2", where, "checksum of the footer record differs")
    fields = dict(zip((name for name, _ in FOOTER_FIELDS), _FOOTER.unpack(record), strict=True))
    return Footer(
        index_offset=fields["index_offset"],
        index_nbytes=fields["index_nbytes"],
        index_sha256=fields["index_sha256"],
        save_id=fields["save_id"],
        segment_nbytes=fields["segment_nbytes"],
        ordinal=fields["ordinal"],
    )


assert _HEADER.size == HEADER_NBYTES
assert _FOOTER.size == FOOTER_NBYTES


_U32: Final = struct.Struct("<I")


class Cursor:
    """Reads values off a document from front to back; knows the place for messages."""

    __slots__ = ("document", "position", "where")

    def __init__(self, document: bytes, where: str) -> None:
        self.document = document
        self.position = 0
        self.where = where

    def fail(self, clause: str, detail: str) -> NoReturn:
        """Raise the fault of `clause` at the present position."""
        raise fault(clause, f"{self.where}, before byte {self.position}", detail)

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes.

        spec: TRE-2
        """
        start = self.position
        left = len(self.document) - start
        if nbytes > left:
            self.fail("TRE-2", f"a value of {nbytes} bytes was expected, {left} bytes are left")
        self.position = start + nbytes
        return self.document[start : self.position]

    def u32(self) -> int:
        """Return the next four bytes as a number."""
        position = self.position
        if position + 4 > len(self.document):
            self.take(4)
        self.position = position + 4
        number: int = _U32.unpack_from(self.document, position)[0]
        return number

    def count(self, *, each: int) -> int:
        """Return a count of things that take at least `each` bytes."""
        count = self.u32()
        left = len(self.document) - self.position
        if count * each > left:
            self.fail("TRE-2", f"{count} entries cannot stand in the {left} bytes left")
        return count

    def text(self) -> str:
        """Return a string."""
        raw = self.take(self.u32())
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            self.fail("TRE-7", f"a string is not UTF-8: {error.reason} at its byte {error.start}")

    def dtype(self) -> DType:
        """Return a data type by its code."""
        code = int.from_bytes(self.take(2), "little")
        if code not in DTYPES:
            self.fail("TRE-9", f"data type code {code} is not registered")
        return DTYPES[code]

    def numpy_type(self) -> DType:
        """Return a data type that numpy has, by its code."""
        dtype = self.dtype()
        if numpy_dtype(dtype) is None:
            self.fail("TRE-9", f"numpy has no type {dtype.name}")
        return dtype


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
