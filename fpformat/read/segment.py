"""One open segment: checked when opened, then read piece by piece, each verified before use."""

import os
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Final

import numpy as np

from fpformat.dtypes import DTYPES
from fpformat.errors import TruncatedError, fault
from fpformat.limits import FOOTER_NBYTES, HEADER_NBYTES, NONE
from fpformat.names import segment_name
from fpformat.read.source import CheckpointDirectory, read_exact
from fpformat.records.checksum import crc32c
from fpformat.records.index import (
    FLAG_HIDDEN,
    FLAG_VIEW,
    OWNER_OBJECT,
    Array,
    SegmentIndex,
    parse_index,
)
from fpformat.records.layout import Runs
from fpformat.records.manifest import feature_words
from fpformat.records.model import Manifest, SegmentRecord, TensorEntry, TensorKey, View
from fpformat.records.wire import (
    FOOTER_RESERVED,
    RAW,
    Footer,
    Header,
    decode_piece,
    is_zero,
    parse_footer,
    parse_header,
)
from fpformat.rules.index import check_index

_WINDOW_PIECES: Final = 32


class SegmentPlace:
    """Where a segment is found: opened once and kept, or again for each use when there are many.

    Either way it is opened below the directory that was opened first, never by its path.
    """

    def __init__(
        self, directory: CheckpointDirectory, ordinal: int, *, save_id: bytes, keep_open: bool
    ) -> None:
        self.where = os.path.join(directory.path, segment_name(ordinal))
        self.ordinal = ordinal
        self._directory = directory
        self._save_id = save_id
        self._kept: tuple[int, int] | None = self._open() if keep_open else None

    def _open(self) -> tuple[int, int]:
        return self._directory.open_segment(self.ordinal, self._save_id)

    @contextmanager
    def open(self) -> Iterator[tuple[int, int]]:
        """Yield a descriptor and the size of the file in bytes."""
        if self._kept is not None:
            yield self._kept
            return
        opened = self._open()
        try:
            yield opened
        finally:
            os.close(opened[0])

    def close(self) -> None:
        """Close what was kept open; a later use opens the segment again."""
        if self._kept is not None:
            os.close(self._kept[0])
            self._kept = None


class Segment:
    """A segment whose header, footer and index passed every check."""

    def __init__(self, place: SegmentPlace, manifest: Manifest) -> None:
        """Read and check everything but the data region, in the order of clause RDR-4.

        Raises:
            FormatError: The first broken clause.
        """
        self.place = place
        self.where = place.where
        record = manifest.segments[place.ordinal]
        with place.open() as (descriptor, nbytes):
            _check_size(nbytes, record, self.where)
            self.header = _read_header(descriptor, place, manifest)
            self.footer = _read_footer(descriptor, place, manifest, self.header)
            region = np.empty(record.index_nbytes, dtype=np.uint8)
            read_exact(descriptor, region, offset=record.index_offset, where=self.where)
        tables = parse_index(
            region.data.toreadonly(), header=self.header, footer=self.footer, where=self.where
        )
        self.index: SegmentIndex = check_index(
            tables,
            header=self.header,
            footer=self.footer,
            world_size=manifest.world_size,
            where=self.where,
        )

    @cached_property
    def scopes(self) -> list[int]:
        """Scope of each tensor record, NONE for global ones."""
        scopes: list[int] = self.index.tables.tensors["scope"].tolist()
        return scopes

    @property
    def keys(self) -> list[TensorKey]:
        """Key of each tensor record, in table order."""
        return [
            (name, None if scope == NONE else scope)
            for name, scope in zip(self.index.names, self.scopes, strict=True)
        ]

    def find(self, key: TensorKey) -> int | None:
        """Return the record of a tensor, None when this segment does not declare it."""
        name, scope = key
        wanted = NONE if scope is None else scope
        row = bisect_left(self.index.names, name)
        while row < len(self.index.names) and self.index.names[row] == name:
            if self.scopes[row] == wanted:
                return row
            row += 1
        return None

    def _key(self, row: int) -> TensorKey:
        scope = self.scopes[row]
        return self.index.names[row], None if scope == NONE else scope

    def entry(self, row: int) -> TensorEntry:
        """Return the record as a `TensorEntry`."""
        record = self.index.tables.tensors[row]
        start, ndim = int(record["dims_index"]), int(record["ndim"])
        dims = self.index.tables.dims
        alias: TensorKey | View | None = None
        if record["target"] != NONE:
            alias = target = self._key(int(record["target"]))
            if record["flags"] & FLAG_VIEW:
                rest = dims[start + ndim : start + 2 * ndim + 1].tolist()
                alias = View(target=target, strides=tuple(rest[:-1]), offset=rest[-1])
        name, scope = self._key(row)
        return TensorEntry(
            name=name,
            dtype=DTYPES[int(record["dtype"])],
            shape=tuple(dims[start : start + ndim].tolist()),
            scope=scope,
            alias=alias,
            hidden=bool(record["flags"] & FLAG_HIDDEN),
        )

    @cached_property
    def _extents_by_owner(self) -> tuple[Array, Array]:
        extents = self.index.tables.extents
        owner = np.where(extents["owner_kind"] == OWNER_OBJECT, NONE, extents["owner"])
        order = np.argsort(owner, kind="stable")
        return order, owner[order]

    def extents_of(self, row: int) -> list[int]:
        """Return the extents that hold bytes of a tensor record, in file order."""
        order, owner = self._extents_by_owner
        first, last = np.searchsorted(owner, [row, row + 1])
        rows: list[int] = order[first:last].tolist()
        return rows

    def title(self, extent: int) -> str:
        """Return what an extent belongs to, for messages."""
        record = self.index.tables.extents[extent]
        owner = int(record["owner"])
        if record["owner_kind"] == OWNER_OBJECT:
            return f"{self.where}: object {self.index.object_names[owner]!r}"
        return f"{self.where}: tensor {self.index.names[owner]!r}"

    def read_extent(self, extent: int) -> bytearray:
        """Return all raw bytes of one extent, verified."""
        record = self.index.tables.extents[extent]
        nbytes = int(record["nbytes"])
        out = np.empty(nbytes, dtype=np.uint8)
        start = np.array([int(record["shard_offset"])], dtype=np.int64)
        runs = Runs(source=start, target=np.zeros(1, dtype=np.int64), nbytes=nbytes)
        self.copy_runs(extent, runs, out)
        return bytearray(out)

    def verify_extent(self, extent: int) -> None:
        """Read and verify every piece of an extent.

        Raises:
            FormatError: SUM-2 for the first piece that differs; ZST-1, ZST-3, SEG-1, DIR-7.
        """
        nbytes = int(self.index.tables.extents["nbytes"][extent])
        piece = self.header.geometry.piece_nbytes
        with self.place.open() as (descriptor, _):
            for first in range(0, -(-nbytes // piece), _WINDOW_PIECES):
                last = min(first + _WINDOW_PIECES, -(-nbytes // piece))
                out = np.empty(min(last * piece, nbytes) - first * piece, dtype=np.uint8)
                self._read_pieces(descriptor, extent, first, last, out)

    def copy_runs(self, extent: int, runs: Runs, out: Array) -> None:
        """Copy the part of `runs` that lies in one extent to `out`, reading only whole pieces.

        Args:
            extent: Record number.
            runs: Source positions count from the first byte of the extent's shard.
            out: One-dimensional uint8 array.

        Raises:
            FormatError: SUM-2 for a piece whose checksum differs; ZST-1, ZST-3, SEG-1, DIR-7.
        """
        record = self.index.tables.extents[extent]
        piece = self.header.geometry.piece_nbytes
        base, nbytes = int(record["shard_offset"]), int(record["nbytes"])
        low = int(np.searchsorted(runs.source, base - runs.nbytes, side="right"))
        high = int(np.searchsorted(runs.source, base + nbytes, side="left"))
        if low >= high:
            return
        local = Runs(
            source=runs.source[low:high] - base, target=runs.target[low:high], nbytes=runs.nbytes
        )
        with self.place.open() as (descriptor, _):
            for first, last in _windows(local, nbytes, piece):
                begin, end = first * piece, min(last * piece, nbytes)
                straight = _straight(local, out, begin, end)
                target = straight if straight is not None else np.empty(end - begin, np.uint8)
                self._read_pieces(descriptor, extent, first, last, target)
                if straight is None:
                    _scatter(local, target, begin, out)

    def _read_pieces(self, descriptor: int, extent: int, first: int, last: int, out: Array) -> None:
        """Read pieces `first` to `last` of an extent into `out`, verified."""
        record = self.index.tables.extents[extent]
        piece = self.header.geometry.piece_nbytes
        number = int(record["piece_first"])
        sums = self.index.tables.crc32c[number + first : number + last].tolist()
        if record["codec"] != RAW:
            self._read_encoded(descriptor, extent, first, sums, out)
            return
        offset = int(record["offset"]) + first * piece
        read_exact(descriptor, out, offset=offset, where=self.title(extent))
        view = out.data
        for at, expected in enumerate(sums):
            if crc32c(view[at * piece : (at + 1) * piece]) != expected:
                raise self._piece_fault(extent, offset + at * piece, first + at)

    def _piece_fault(self, extent: int, offset: int, number: int) -> Exception:
        detail = f"checksum of piece {number} at byte {offset} of the segment differs"
        return fault("SUM-2", self.title(extent), detail)

    def _read_encoded(
        self, descriptor: int, extent: int, first: int, sums: list[int], out: Array
    ) -> None:
        record = self.index.tables.extents[extent]
        piece, number = self.header.geometry.piece_nbytes, int(record["piece_first"])
        stored = self.index.tables.piece_stored
        offset = int(record["offset"]) + int(stored[number : number + first].sum(dtype=np.int64))
        itemsize = 1
        if record["owner_kind"] != OWNER_OBJECT:
            itemsize = DTYPES[int(self.index.tables.tensors["dtype"][record["owner"]])].nbytes
        for at, expected in enumerate(sums):
            frame = bytearray(int(stored[number + first + at]))
            read_exact(descriptor, frame, offset=offset, where=self.title(extent))
            if crc32c(frame) != expected:
                raise self._piece_fault(extent, offset, first + at)
            part = out[at * piece : (at + 1) * piece]
            raw = decode_piece(
                memoryview(frame),
                codec=int(record["codec"]),
                raw_nbytes=len(part),
                itemsize=itemsize,
                where=self.title(extent),
            )
            part[:] = np.frombuffer(raw, dtype=np.uint8)
            offset += len(frame)


def _check_size(nbytes: int, record: SegmentRecord, where: str) -> None:
    if nbytes != record.nbytes:
        detail = f"has {nbytes} bytes, the manifest says {record.nbytes}"
        if nbytes < record.nbytes:
            raise TruncatedError("SEG-1", where, detail)
        raise fault("SEG-1", where, detail)


def _read_header(descriptor: int, place: SegmentPlace, manifest: Manifest) -> Header:
    where = place.where
    nbytes = manifest.segments[place.ordinal].nbytes
    if nbytes < HEADER_NBYTES:
        raise fault("HDR-1", where, f"has {nbytes} bytes, too few for a header")
    record = bytearray(HEADER_NBYTES)
    read_exact(descriptor, record, offset=0, where=where)
    header = parse_header(bytes(record), where)
    if (header.save_id, header.ordinal) != (manifest.save_id, place.ordinal):
        detail = f"is segment {header.ordinal} of save {header.save_id.hex()}"
        expected = f"not segment {place.ordinal} of {manifest.save_id.hex()}"
        raise fault("HDR-10", where, f"{detail}, {expected}")
    if (header.incompat, header.ro_compat, header.compat) != feature_words(manifest.features):
        raise fault("HDR-11", where, "feature bits differ from the manifest's features")
    align = header.geometry.align
    if nbytes % align or nbytes < 3 * align:
        raise fault("SEG-2", where, f"{nbytes} bytes are not at least 3 blocks of {align}")
    rest = bytearray(align - HEADER_NBYTES)
    read_exact(descriptor, rest, offset=HEADER_NBYTES, where=where)
    if not is_zero(rest):
        raise fault("HDR-9", where, "the header block is not zero after the record")
    return header


def _read_footer(
    descriptor: int, place: SegmentPlace, manifest: Manifest, header: Header
) -> Footer:
    where, align = place.where, header.geometry.align
    record = manifest.segments[place.ordinal]
    block = bytearray(align)
    read_exact(descriptor, block, offset=record.nbytes - align, where=where)
    footer = parse_footer(bytes(block[-FOOTER_NBYTES:]), where)
    if (footer.save_id, footer.ordinal) != (header.save_id, header.ordinal):
        raise fault("FTR-3", where, "save id or ordinal of the footer differ from the header's")
    if footer.segment_nbytes != record.nbytes:
        detail = f"the footer speaks of {footer.segment_nbytes} bytes, the file has {record.nbytes}"
        raise fault("FTR-4", where, detail)
    stated = (footer.index_offset, footer.index_nbytes, footer.index_sha256)
    if stated != (record.index_offset, record.index_nbytes, record.index_sha256):
        raise fault("FTR-5", where, "index position or digest differ from the manifest's")
    if not is_zero(block[:-FOOTER_NBYTES]) or not is_zero(block[-FOOTER_NBYTES:][FOOTER_RESERVED]):
        raise fault("FTR-6", where, "the footer block is not zero outside the footer's fields")
    if footer.index_offset % align or footer.index_nbytes % align or not footer.index_nbytes:
        raise fault("FTR-7", where, f"the index is not at least one block of {align} bytes")
    inside = align <= footer.index_offset <= record.nbytes - align - footer.index_nbytes
    if not inside:
        raise fault("FTR-7", where, "the index does not lie between header block and footer block")
    if footer.index_offset + footer.index_nbytes + align != record.nbytes:
        raise fault("SEG-6", where, "the footer block does not follow the index region")
    return footer


def _windows(runs: Runs, nbytes: int, piece: int) -> Iterator[tuple[int, int]]:
    """Yield half-open ranges of pieces that together hold all runs, none larger than a window."""
    first = np.maximum(runs.source, 0) // piece
    last = (np.minimum(runs.source + runs.nbytes, nbytes) - 1) // piece + 1
    breaks = np.flatnonzero(first[1:] > last[:-1]) + 1
    for begin, end in zip(
        first[np.concatenate([[0], breaks])].tolist(),
        last[np.concatenate([breaks - 1, [-1]])].tolist(),
        strict=True,
    ):
        for at in range(begin, end, _WINDOW_PIECES):
            yield at, min(at + _WINDOW_PIECES, end)


def _straight(runs: Runs, out: Array, begin: int, end: int) -> Array | None:
    """Return the part of `out` that bytes `begin` to `end` of the extent go to, if they are one."""
    row = int(np.searchsorted(runs.source, begin, side="right")) - 1
    if row < 0 or runs.source[row] + runs.nbytes < end:
        return None
    at = int(runs.target[row] + begin - runs.source[row])
    part: Array = out[at : at + end - begin]
    return part


def _scatter(runs: Runs, window: Array, begin: int, out: Array) -> None:
    """Copy from a window, which starts at byte `begin` of the extent, what runs want of it."""
    end = begin + len(window)
    low = int(np.searchsorted(runs.source, begin - runs.nbytes, side="right"))
    high = int(np.searchsorted(runs.source, end, side="left"))
    whole = slice(
        int(np.searchsorted(runs.source, begin, side="left")),
        int(np.searchsorted(runs.source, end - runs.nbytes, side="right")),
    )
    if whole.stop - whole.start > 1:
        view = np.lib.stride_tricks.sliding_window_view
        target = view(out, runs.nbytes, writeable=True)
        target[runs.target[whole]] = view(window, runs.nbytes)[runs.source[whole] - begin]
        rows: list[int] = [*range(low, whole.start), *range(whole.stop, high)]
    else:
        rows = list(range(low, high))
    for row in rows:
        source, target_at = int(runs.source[row]), int(runs.target[row])
        first, last = max(source, begin), min(source + runs.nbytes, end)
        at = target_at + first - source
        out[at : at + last - first] = window[first - begin : last - begin]
