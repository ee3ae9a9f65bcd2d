"""Where things go: tensors into segments, extents into files, stored bytes into a wanted box.

Pure and deterministic. Extents of at least a block come first, each on a block boundary; the small
ones follow packed on the smaller alignment, so that padding stays far below one percent whatever
the mix of sizes. Of a stored and a wanted box, both in C order, the intersection is a number of
runs of equal length, contiguous on both sides; the longer the common trailing dimensions, the fewer
and longer they are.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fpformat.arguments import check_all, check_kind, checked_int
from fpformat.dtypes import tensor_nbytes
from fpformat.errors import PlanError
from fpformat.limits import round_up
from fpformat.records.model import (
    Box,
    Geometry,
    ObjectEntry,
    Part,
    SavePlan,
    SegmentPlan,
    Shape,
    TensorEntry,
    TensorKey,
)

SMALLEST_CUT_NBYTES = 64 * 1024


def place_extents(stored_nbytes: Iterable[int], geometry: Geometry) -> tuple[list[int], int]:
    """Return the offset of each extent, and the offset where the index region begins.

    spec: SEG-3, SEG-4
    """
    align, small = geometry.align, geometry.tensor_align
    end = align
    offsets = []
    for nbytes in stored_nbytes:
        offset = round_up(end, to=align if nbytes >= align else small)
        offsets.append(offset)
        end = offset + nbytes
    return offsets, round_up(end, to=align)


def order_parts(parts: Iterable[Part], geometry: Geometry) -> tuple[Part, ...]:
    """Return parts in file order: those of a block or more first, otherwise as given."""
    return tuple(sorted(parts, key=lambda part: part.nbytes < geometry.align))


def plan_checkpoint(
    entries: Sequence[TensorEntry],
    objects: Sequence[ObjectEntry] = (),
    *,
    segment_count: int = 1,
    step: int | None = None,
    user: dict[str, str] | None = None,
    world_size: int = 1,
    geometry: Geometry | None = None,
) -> SavePlan:
    """Plan a save in which one process has every tensor whole.

    Objects and the declarations that a tree refers to go into segment 0. With several segments the
    bytes are divided evenly; tensors of at least 64 KiB may be cut, at multiples of the block size.

    Args:
        entries: Tensors with bytes of their own, aliases and hidden bases, in any order.
        objects: Trees and byte objects.
        segment_count: Number of segments, at least 1.
        step: Training step for the manifest.
        user: Strings for the manifest.
        world_size: Number of ranks for the manifest.
        geometry: Block, alignment and piece sizes in bytes.

    Raises:
        PlanError: Two entries share a name and scope, an alias has no target, or an argument is of
            a wrong kind.
        FormatError: TEN-6 for a tensor above 2^53 - 1 bytes.
    """
    check_all("entries", entries, TensorEntry, "a TensorEntry")
    check_all("objects", objects, ObjectEntry, "an ObjectEntry")
    checked_int("segment_count", segment_count, least=1)
    checked_int("world_size", world_size, least=1)
    if step is not None:
        checked_int("step", step, least=0)
    check_kind("user", user, Mapping | None, "a mapping of str to str, or None")
    check_kind("geometry", geometry, Geometry | None, "a Geometry or None")
    geometry = geometry or Geometry()
    by_key = _index_entries(entries)
    owned = [
        (entry, nbytes)
        for entry in by_key.values()
        if entry.alias is None
        and (nbytes := tensor_nbytes(entry.dtype, entry.shape, where=repr(entry.name)))
    ]
    dealt = _deal(owned, segment_count, geometry)
    segments = []
    for ordinal, parts in enumerate(dealt):
        declared = by_key.values() if ordinal == 0 else [by_key[part.key] for part in parts]
        segments.append(
            SegmentPlan(
                entries=tuple(declared),
                parts=order_parts(parts, geometry),
                objects=tuple(objects) if ordinal == 0 else (),
            )
        )
    return SavePlan(
        segments=tuple(segments),
        step=step,
        user=dict(user or {}),
        world_size=world_size,
        geometry=geometry,
    )


def _index_entries(entries: Sequence[TensorEntry]) -> dict[TensorKey, TensorEntry]:
    by_key: dict[TensorKey, TensorEntry] = {}
    for entry in sorted(entries, key=sort_key):
        if entry.key in by_key:
            raise PlanError(f"two tensors are called {entry.name!r} (scope {entry.scope})")
        by_key[entry.key] = entry
    for entry in by_key.values():
        if entry.target is not None:
            target = by_key.get(entry.target)
            if target is None or target.alias is not None:
                raise PlanError(f"{entry.name!r}: its target {entry.target} has no bytes (ALI-1)")
    return by_key


def sort_key(entry: "TensorEntry | ObjectEntry") -> tuple[bytes, float]:
    """Return what orders a table: name bytes, then scope with the global one last.

    spec: TEN-1, OBJ-1
    """
    return entry.name.encode(), float("inf") if entry.scope is None else entry.scope


def _deal(
    owned: Sequence[tuple[TensorEntry, int]], segment_count: int, geometry: Geometry
) -> list[list[Part]]:
    """Deal the tensors' bytes over the segments in order, cutting large tensors at blocks."""
    total = sum(nbytes for _, nbytes in owned)
    dealt: list[list[Part]] = [[] for _ in range(segment_count)]
    given = ordinal = 0
    for entry, nbytes in owned:
        offset = 0
        while offset < nbytes:
            rest = nbytes - offset
            room = total * (ordinal + 1) // segment_count - given
            take = rest
            if ordinal + 1 < segment_count and nbytes >= SMALLEST_CUT_NBYTES and room < rest:
                take = max(room // geometry.align, 0) * geometry.align
            if take:
                part = Part(key=entry.key, box=None, shard_offset=offset, nbytes=take)
                dealt[ordinal].append(part)
            offset += take
            given += take
            if ordinal + 1 < segment_count and room - take < geometry.align:
                ordinal += 1
    return dealt


Array = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Equal runs of bytes: `nbytes` from each of `source` to each of `target`, both ascending."""

    source: Array
    target: Array
    nbytes: int


def intersect(one: Box, two: Box) -> Box | None:
    """Return the common part of two boxes, None when there is none."""
    start = tuple(map(max, one.start, two.start))
    stop = tuple(
        min(a + n, b + m)
        for a, n, b, m in zip(one.start, one.shape, two.start, two.shape, strict=True)
    )
    if any(low >= high for low, high in zip(start, stop, strict=True)):
        return None
    return Box(start=start, shape=tuple(high - low for low, high in zip(start, stop, strict=True)))


def c_strides(shape: Sequence[int]) -> Shape:
    """Return the strides of a tensor in C order, in elements."""
    strides: list[int] = []
    step = 1
    for dim in reversed(shape):
        strides.append(step)
        step *= max(dim, 1)
    return tuple(reversed(strides))


def plan_runs(shard: Box, wanted: Box, *, itemsize: int) -> Runs | None:
    """Return the runs that take the bytes of `shard` to those of `wanted`; None if disjoint."""
    common = intersect(shard, wanted)
    if common is None:
        return None
    axis = len(common.shape)
    length = itemsize
    while axis > 0:
        axis -= 1
        length *= common.shape[axis]
        if not common.shape[axis] == shard.shape[axis] == wanted.shape[axis]:
            break
    positions = []
    for box in (shard, wanted):
        strides = c_strides(box.shape)
        first = sum(
            (at - base) * stride
            for at, base, stride in zip(common.start, box.start, strides, strict=True)
        )
        offsets = np.array([first], dtype=np.int64)
        for outer in range(axis):
            steps = np.arange(common.shape[outer], dtype=np.int64) * strides[outer]
            offsets = (offsets[:, None] + steps).reshape(-1)
        positions.append(offsets * itemsize)
    return Runs(source=positions[0], target=positions[1], nbytes=length)
