"""From a segment's plan to its index tables: the writing counterpart of `fpformat.rules.index`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fpformat.dtypes import tensor_nbytes
from fpformat.errors import PlanError
from fpformat.limits import NONE
from fpformat.records.index import (
    EXTENT,
    FLAG_HIDDEN,
    FLAG_VIEW,
    KIND_CRC32C,
    KIND_DIMS,
    KIND_EXTENT,
    KIND_NAMES,
    KIND_OBJECT,
    KIND_OBJECT_RANKS,
    KIND_TENSOR,
    OBJECT,
    OBJECT_RANKS,
    OWNER_OBJECT,
    OWNER_TENSOR,
    TENSOR,
    Array,
    dump_index,
)
from fpformat.records.layout import sort_key
from fpformat.records.model import Geometry, Part, SegmentPlan, TensorEntry, View


class IndexAssembly:
    """The tables of one segment: fixed by its plan, but for offsets and checksums."""

    def __init__(self, plan: SegmentPlan, geometry: Geometry) -> None:
        """Sort entries and objects into table order and number names, dims and pieces.

        Raises:
            PlanError: A part or an alias names an entry that the segment does not declare.
        """
        self._geometry = geometry
        self._entries = sorted(plan.entries, key=sort_key)
        self._objects = sorted(plan.objects, key=sort_key)
        self._plan = plan
        self.rows = {entry.key: row for row, entry in enumerate(self._entries)}
        self._dims: list[int] = []
        self._names = bytearray()
        self._tensors = [self._tensor(entry) for entry in self._entries]
        self._parts = [self._part(part) for part in plan.parts]

    @property
    def extent_nbytes(self) -> list[int]:
        """Size of each extent in file order: the parts, then the objects that have bytes."""
        payloads = [len(entry.payload) for entry in self._plan.objects if entry.payload]
        return [part.nbytes for part in self._plan.parts] + payloads

    @property
    def piece_count(self) -> int:
        """Number of pieces of all extents."""
        return sum(-(-nbytes // self._geometry.piece_nbytes) for nbytes in self.extent_nbytes)

    def dump(self, offsets: Sequence[int], checksums: Sequence[int]) -> tuple[bytes, bytes]:
        """Return the index region and the SHA-256 of its directory."""
        return dump_index(self.tables(offsets, checksums), align=self._geometry.align)

    def tables(self, offsets: Sequence[int], checksums: Sequence[int]) -> dict[int, Array]:
        """Return the tables by kind; optional ones only when they have records."""
        objects = self._object_records()
        ranks = [
            (row, start, stop)
            for row, entry in enumerate(self._objects)
            for start, stop in entry.ranks
        ]
        names = bytes(self._names) + self._object_names()
        tables: dict[int, Array] = {
            KIND_TENSOR: np.array(self._tensors, dtype=TENSOR),
            KIND_EXTENT: self._extent_records(offsets),
            KIND_DIMS: np.array(self._dims, dtype="<u8"),
            KIND_NAMES: np.frombuffer(names, dtype=np.uint8),
            KIND_CRC32C: np.array(checksums, dtype="<u4"),
        }
        if objects:
            tables[KIND_OBJECT] = np.array(objects, dtype=OBJECT)
        if ranks:
            tables[KIND_OBJECT_RANKS] = np.array(ranks, dtype=OBJECT_RANKS)
        return tables

    def _add_name(self, name: str) -> tuple[int, int]:
        offset, encoded = len(self._names), name.encode()
        self._names += encoded + b"\0"
        return offset, len(encoded)

    def _tensor(self, entry: TensorEntry) -> tuple[int, ...]:
        dims_index = len(self._dims)
        self._dims += entry.shape
        flags = FLAG_HIDDEN if entry.hidden else 0
        if isinstance(entry.alias, View):
            flags |= FLAG_VIEW
            self._dims += (*entry.alias.strides, entry.alias.offset)
        name_offset, name_nbytes = self._add_name(entry.name)
        return (
            tensor_nbytes(entry.dtype, entry.shape, where=repr(entry.name)),
            name_offset,
            NONE if entry.scope is None else entry.scope,
            dims_index,
            NONE if entry.target is None else self._row(entry.target),
            name_nbytes,
            entry.dtype.code,
            len(entry.shape),
            flags,
            0,
        )

    def _row(self, key: tuple[str, int | None]) -> int:
        if key not in self.rows:
            raise PlanError(f"{key[0]!r} (scope {key[1]}) is not declared in its segment")
        return self.rows[key]

    def _part(self, part: Part) -> tuple[int, int]:
        """Return owner and dims_index of a part, its box added to the dims."""
        if part.box is None:
            return self._row(part.key), NONE
        dims_index = len(self._dims)
        self._dims += part.box.start + part.box.shape
        return self._row(part.key), dims_index

    def _extent_records(self, offsets: Sequence[int]) -> Array:
        rows: dict[int, int] = {id(entry): row for row, entry in enumerate(self._objects)}
        owners = [
            (owner, dims_index, part.shard_offset, OWNER_TENSOR)
            for (owner, dims_index), part in zip(self._parts, self._plan.parts, strict=True)
        ]
        owners += [
            (rows[id(entry)], NONE, 0, OWNER_OBJECT)
            for entry in self._plan.objects
            if entry.payload
        ]
        records: list[Any] = []
        piece_first = 0
        for offset, nbytes, owned in zip(offsets, self.extent_nbytes, owners, strict=True):
            owner, dims_index, shard_offset, kind = owned
            records.append(
                (offset, nbytes, nbytes, shard_offset, owner, dims_index, piece_first, 0, kind, 0)
            )
            piece_first += -(-nbytes // self._geometry.piece_nbytes)
        return np.array(records, dtype=EXTENT)

    def _object_names(self) -> bytes:
        return b"".join(entry.name.encode() + b"\0" for entry in self._objects)

    def _object_records(self) -> list[tuple[int, ...]]:
        extents: dict[int, int] = {}
        for entry in self._plan.objects:
            if entry.payload:
                extents[id(entry)] = len(self._plan.parts) + len(extents)
        records: list[tuple[int, ...]] = []
        name_offset = len(self._names)
        for entry in self._objects:
            name_nbytes = len(entry.name.encode())
            scope = NONE if entry.scope is None else entry.scope
            extent = extents.get(id(entry), NONE)
            records.append((name_offset, scope, extent, name_nbytes, entry.kind))
            name_offset += name_nbytes + 1
        return records
