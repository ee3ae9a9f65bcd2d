"""The index of a segment: a directory of binary tables, to and from bytes.

This module owns the framing (directory, digests, positions, padding) and the record layouts. It
does not judge what the records mean; `fpformat.rules.index` does. Tables are numpy views of the
bytes read, so that a million tensors cost no object each.
"""

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fpformat.errors import fault
from fpformat.limits import (
    DIRECTORY_ENTRY_NBYTES,
    DIRECTORY_HEADER_NBYTES,
    FEATURE_ZSTD,
    INDEX_MAGIC,
    TABLE_ALIGN,
    round_up,
)
from fpformat.records.wire import Footer, Header, is_zero

TENSOR: Final = np.dtype(
    [
        ("nbytes", "<u8"),
        ("name_offset", "<u4"),
        ("scope", "<u4"),
        ("dims_index", "<u4"),
        ("target", "<u4"),
        ("name_nbytes", "<u2"),
        ("dtype", "<u2"),
        ("ndim", "u1"),
        ("flags", "u1"),
        ("zero", "<u2"),
    ]
)
EXTENT: Final = np.dtype(
    [
        ("offset", "<u8"),
        ("stored_nbytes", "<u8"),
        ("nbytes", "<u8"),
        ("shard_offset", "<u8"),
        ("owner", "<u4"),
        ("dims_index", "<u4"),
        ("piece_first", "<u4"),
        ("codec", "u1"),
        ("owner_kind", "u1"),
        ("zero", "<u2"),
    ]
)
OBJECT: Final = np.dtype(
    [
        ("name_offset", "<u4"),
        ("scope", "<u4"),
        ("extent", "<u4"),
        ("name_nbytes", "<u2"),
        ("kind", "<u2"),
    ]
)
OBJECT_RANKS: Final = np.dtype([("object", "<u4"), ("start", "<u4"), ("stop", "<u4")])

KIND_TENSOR, KIND_EXTENT, KIND_DIMS, KIND_NAMES = 1, 2, 3, 4
KIND_CRC32C, KIND_OBJECT, KIND_OBJECT_RANKS, KIND_PIECE_STORED = 5, 6, 7, 8
TABLES: Final[dict[int, np.dtype[Any]]] = {
    KIND_TENSOR: TENSOR,
    KIND_EXTENT: EXTENT,
    KIND_DIMS: np.dtype("<u8"),
    KIND_NAMES: np.dtype("u1"),
    KIND_CRC32C: np.dtype("<u4"),
    KIND_OBJECT: OBJECT,
    KIND_OBJECT_RANKS: OBJECT_RANKS,
    KIND_PIECE_STORED: np.dtype("<u4"),
}
TABLE_NAMES: Final = {
    KIND_TENSOR: "tensor",
    KIND_EXTENT: "extent",
    KIND_DIMS: "dims",
    KIND_NAMES: "names",
    KIND_CRC32C: "crc32c",
    KIND_OBJECT: "object",
    KIND_OBJECT_RANKS: "object_ranks",
    KIND_PIECE_STORED: "piece_stored_nbytes",
}
MUST_UNDERSTAND: Final = 1
FLAG_VIEW: Final = 1
FLAG_HIDDEN: Final = 2
OWNER_TENSOR: Final = 0
OWNER_OBJECT: Final = 1
OBJECT_TREE: Final = 1
OBJECT_BYTES: Final = 2

_DIRECTORY_HEADER: Final = struct.Struct("<8sIIQQ")
_ENTRY: Final = struct.Struct("<IIIIQQ32s")
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The tables of one segment as arrays; absent optional tables are empty."""

    tensors: Array
    extents: Array
    dims: Array
    names: Array
    crc32c: Array
    objects: Array
    object_ranks: Array
    piece_stored: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentIndex:
    """The tables of one segment after every check, with their names.

    Attributes:
        tables: The tables as read.
        names: Tensor names, in table order.
        object_names: Object names, in table order.
    """

    tables: Tables
    names: list[str]
    object_names: list[str]


def table_sha256(table: "memoryview | bytes") -> bytes:
    """Return the digest that the directory keeps of a table."""
    return hashlib.sha256(table).digest()


def dump_index(tables: Mapping[int, Array], *, align: int) -> tuple[bytes, bytes]:
    """Return the index region and the SHA-256 of its directory.

    Args:
        tables: Arrays by kind; optional tables without records are left out by the caller.
        align: The block size A; the region is a multiple of it.
    """
    directory_nbytes = DIRECTORY_HEADER_NBYTES + DIRECTORY_ENTRY_NBYTES * len(tables)
    position = directory_nbytes
    entries, bodies = [], []
    for kind in sorted(tables):
        table = np.ascontiguousarray(tables[kind], dtype=TABLES[kind])
        body = table.tobytes()
        offset = round_up(position, to=TABLE_ALIGN)
        bodies.append(bytes(offset - position) + body)
        position = offset + len(body)
        entries.append(
            _ENTRY.pack(
                kind, MUST_UNDERSTAND, table.itemsize, 0, len(table), offset, table_sha256(body)
            )
        )
    index_nbytes = round_up(position, to=align)
    header = _DIRECTORY_HEADER.pack(
        INDEX_MAGIC, len(tables), DIRECTORY_ENTRY_NBYTES, index_nbytes, 0
    )
    directory = b"".join((header, *entries))
    region = b"".join((directory, *bodies)).ljust(index_nbytes, b"\0")
    return region, hashlib.sha256(directory).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    kind: int
    flags: int
    record_nbytes: int
    zero: int
    count: int
    offset: int
    sha256: bytes

    @property
    def end(self) -> int:
        return self.offset + self.count * self.record_nbytes

    @property
    def title(self) -> str:
        return f"{TABLE_NAMES.get(self.kind, 'unknown')} table (kind {self.kind})"


def parse_index(region: memoryview, *, header: Header, footer: Footer, where: str) -> Tables:
    """Parse the index region of a segment whose header and footer are sound.

    Raises:
        FormatError: IDX-1 to IDX-12.
    """
    where = f"{where}: index"
    entries = _parse_directory(region, footer, where)
    _check_entries(entries, header, where)
    _check_positions(region, entries, align=header.geometry.align, where=where)
    known = {}
    for entry in entries:
        if table_sha256(region[entry.offset : entry.end]) != entry.sha256:
            raise fault("IDX-11", where, f"SHA-256 of the {entry.title} differs")
        if entry.kind in TABLES:
            known[entry.kind] = np.frombuffer(
                region, dtype=TABLES[entry.kind], count=entry.count, offset=entry.offset
            )

    def table(kind: int) -> Array:
        return known.get(kind, np.empty(0, dtype=TABLES[kind]))

    return Tables(
        tensors=table(KIND_TENSOR),
        extents=table(KIND_EXTENT),
        dims=table(KIND_DIMS),
        names=table(KIND_NAMES),
        crc32c=table(KIND_CRC32C),
        objects=table(KIND_OBJECT),
        object_ranks=table(KIND_OBJECT_RANKS),
        piece_stored=table(KIND_PIECE_STORED),
    )


def _parse_directory(region: memoryview, footer: Footer, where: str) -> list[_Entry]:
    magic, count, entry_nbytes, index_nbytes, zero = _DIRECTORY_HEADER.unpack_from(region)
    directory_nbytes = DIRECTORY_HEADER_NBYTES + DIRECTORY_ENTRY_NBYTES * count
    fits = directory_nbytes <= len(region)
    covered = region[: directory_nbytes if fits else len(region)]
    if hashlib.sha256(covered).digest() != footer.index_sha256:
        raise fault("IDX-1", where, "SHA-256 of the directory differs from the footer's")
    if magic != INDEX_MAGIC or entry_nbytes != DIRECTORY_ENTRY_NBYTES or zero or not fits:
        raise fault("IDX-2", where, f"directory header is wrong ({count} tables)")
    if index_nbytes != footer.index_nbytes:
        detail = f"index_nbytes is {index_nbytes}, the footer says {footer.index_nbytes}"
        raise fault("IDX-3", where, detail)
    fields = ("kind", "flags", "record_nbytes", "zero", "count", "offset", "sha256")
    return [
        _Entry(**dict(zip(fields, values, strict=True)))
        for values in _ENTRY.iter_unpack(region[DIRECTORY_HEADER_NBYTES:directory_nbytes])
    ]


def _check_entries(entries: list[_Entry], header: Header, where: str) -> None:
    """Check what the directory says of each table, apart from where it lies."""
    previous = 0
    for entry in entries:
        if entry.kind <= previous:
            raise fault("IDX-4", where, f"kind {entry.kind} follows kind {previous}")
        previous = entry.kind
        if entry.flags & ~MUST_UNDERSTAND or entry.zero:
            raise fault("IDX-8", where, f"{entry.title} has unknown flags or a non-zero field")
        if entry.kind not in TABLES:
            if entry.flags & MUST_UNDERSTAND:
                raise fault("IDX-12", where, f"needs the unknown {entry.title}")
            if not entry.record_nbytes:
                raise fault("IDX-9", where, f"{entry.title} has records of 0 bytes")
            continue
        if not entry.flags & MUST_UNDERSTAND:
            raise fault("IDX-8", where, f"{entry.title} lacks the must-understand flag")
        if entry.record_nbytes != TABLES[entry.kind].itemsize:
            detail = f"{entry.title} has records of {entry.record_nbytes} bytes"
            raise fault("IDX-9", where, f"{detail}, not {TABLES[entry.kind].itemsize}")
    _check_presence({entry.kind: entry.count for entry in entries}, header, where)


def _check_presence(counts: dict[int, int], header: Header, where: str) -> None:
    needed = {KIND_TENSOR, KIND_EXTENT, KIND_DIMS, KIND_NAMES, KIND_CRC32C}
    if header.incompat & FEATURE_ZSTD:
        needed.add(KIND_PIECE_STORED)
    missing = needed - set(counts)
    empty = [kind for kind in (KIND_OBJECT, KIND_OBJECT_RANKS) if counts.get(kind) == 0]
    extra = {KIND_PIECE_STORED} & set(counts) - needed
    if missing or empty or extra:
        kinds = sorted((*missing, *empty, *extra))
        raise fault("IDX-10", where, f"tables {kinds} are missing, empty, or not allowed here")


def _check_positions(region: memoryview, entries: list[_Entry], *, align: int, where: str) -> None:
    """Check offsets, the end of the region and that all gaps are zero."""
    position = DIRECTORY_HEADER_NBYTES + DIRECTORY_ENTRY_NBYTES * len(entries)
    for entry in entries:
        offset = round_up(position, to=TABLE_ALIGN)
        if entry.offset != offset or entry.end > len(region):
            detail = f"{entry.title} lies at {entry.offset} to {entry.end}, expected from {offset}"
            raise fault("IDX-5", where, f"{detail} and within {len(region)}")
        if not is_zero(region[position:offset]):
            raise fault("IDX-7", where, f"padding before the {entry.title} is not zero")
        position = entry.end
    if round_up(position, to=align) != len(region):
        raise fault("IDX-6", where, f"tables end at {position}, the region at {len(region)}")
    if not is_zero(region[position:]):
        raise fault("IDX-7", where, "padding after the last table is not zero")
