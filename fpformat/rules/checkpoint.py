"""Rules across the segments of one checkpoint: declarations that agree, bytes that cover.

A tensor's boxes tile its shape exactly once if and only if the signed counts of all their corners
cancel everywhere but at the corners of the whole: the counts are the mixed derivative of the
number of boxes over each element. That is linear in the number of boxes, where comparing pairs is
quadratic. Dimensions that no box cuts are left out, and the format limits the others to eight.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from fpformat.errors import fault
from fpformat.limits import MAX_CUT_DIMS, NONE
from fpformat.names import segment_name
from fpformat.records.index import OBJECT_TREE, OWNER_TENSOR, Array, SegmentIndex
from fpformat.records.model import Box
from fpformat.rules.bulk import first_true


@dataclass(frozen=True, slots=True, kw_only=True)
class _Merged:
    """Tensors of all segments by number: where declared first, and their own bytes."""

    numbers: list[Array]
    homes: list[tuple[int, int]]
    nbytes: Array
    owns: Array


def check_segments(indexes: Sequence[SegmentIndex], *, world_size: int, where: str) -> None:
    """Check the indexes of all segments of a checkpoint against each other.

    Args:
        indexes: In order of their ordinals, each checked by itself already.
        world_size: From the manifest.
        where: The checkpoint's path, for messages.

    Raises:
        FormatError: TEN-9, EXT-10, EXT-11, EXT-12, OBJ-6 or OBJ-7.
    """
    merged = _merge(indexes, where)
    _check_coverage(indexes, merged, where)
    _check_objects(indexes, world_size, where)


def _merge(indexes: Sequence[SegmentIndex], where: str) -> _Merged:
    if len(indexes) == 1:
        tensors = indexes[0].tables.tensors
        return _Merged(
            numbers=[np.arange(len(tensors))],
            homes=[],
            nbytes=tensors["nbytes"],
            owns=tensors["target"] == NONE,
        )
    known: dict[tuple[str, int], int] = {}
    homes: list[tuple[int, int]] = []
    numbers = []
    for ordinal, index in enumerate(indexes):
        own = []
        scopes = index.tables.tensors["scope"].tolist()
        for row, key in enumerate(zip(index.names, scopes, strict=True)):
            number = known.setdefault(key, len(homes))
            if number == len(homes):
                homes.append((ordinal, row))
            else:
                _check_declaration(indexes, homes[number], (ordinal, row), where)
            own.append(number)
        numbers.append(np.array(own, dtype=np.int64))
    records = [indexes[ordinal].tables.tensors[row] for ordinal, row in homes]
    return _Merged(
        numbers=numbers,
        homes=homes,
        nbytes=np.array([record["nbytes"] for record in records], dtype=np.uint64),
        owns=np.array([record["target"] == NONE for record in records], dtype=bool),
    )


def declaration(index: SegmentIndex, row: int) -> tuple[object, ...]:
    """Return everything that a tensor record says, free of positions in its own tables."""
    record = index.tables.tensors[row]
    start, ndim = int(record["dims_index"]), int(record["ndim"])
    length = 2 * ndim + 1 if record["flags"] & 1 else ndim
    dims = index.tables.dims[start : start + length].tolist()
    target = int(record["target"])
    named = None
    if target != NONE:
        named = (index.names[target], int(index.tables.tensors["scope"][target]))
    return int(record["dtype"]), ndim, int(record["flags"]), dims, named


def _check_declaration(
    indexes: Sequence[SegmentIndex], first: tuple[int, int], second: tuple[int, int], where: str
) -> None:
    one, two = indexes[first[0]], indexes[second[0]]
    if declaration(one, first[1]) != declaration(two, second[1]):
        name = one.names[first[1]]
        places = f"{segment_name(first[0])} and {segment_name(second[0])}"
        raise fault("TEN-9", where, f"{places} declare {name!r} differently")


def _name(indexes: Sequence[SegmentIndex], merged: _Merged, number: int) -> str:
    ordinal, row = merged.homes[number] if merged.homes else (0, number)
    return indexes[ordinal].names[row]


def _check_coverage(indexes: Sequence[SegmentIndex], merged: _Merged, where: str) -> None:
    """Check that every byte of every tensor is stored exactly once."""
    numbers, offsets, sizes, boxed = [], [], [], []
    shards: dict[int, dict[Box, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for index, own in zip(indexes, merged.numbers, strict=True):
        extents = index.tables.extents
        rows = np.flatnonzero(extents["owner_kind"] == OWNER_TENSOR)
        owners = own[extents["owner"][rows]]
        has_box = extents["dims_index"][rows] != NONE
        for row, number in zip(rows[has_box].tolist(), owners[has_box].tolist(), strict=True):
            record = extents[row]
            span = (int(record["shard_offset"]), int(record["nbytes"]))
            shards[number][extent_box(index, row)].append(span)
        numbers.append(owners[~has_box])
        offsets.append(extents["shard_offset"][rows[~has_box]])
        sizes.append(extents["nbytes"][rows[~has_box]])
        boxed.append(owners[has_box])
    whole = np.concatenate(numbers)
    _check_whole(
        indexes, merged, whole, np.concatenate(offsets), np.concatenate(sizes), where=where
    )
    is_whole, is_boxed = np.zeros((2, len(merged.nbytes)), dtype=bool)
    is_whole[whole] = True
    is_boxed[np.concatenate(boxed)] = True
    if (bad := first_true(is_whole & is_boxed)) is not None:
        name = _name(indexes, merged, bad)
        raise fault("EXT-11", f"{where}: tensor {name!r}", "is stored whole and in boxes too")
    is_absent = merged.owns & (merged.nbytes > 0) & ~is_whole & ~is_boxed
    if (bad := first_true(is_absent)) is not None:
        name = _name(indexes, merged, bad)
        raise fault("EXT-11", f"{where}: tensor {name!r}", "is declared but no segment stores it")
    for number, boxes in shards.items():
        place = f"{where}: tensor {_name(indexes, merged, number)!r}"
        ordinal, row = merged.homes[number] if merged.homes else (0, number)
        _check_boxes(boxes, indexes[ordinal], row, place)


def _check_whole(
    indexes: Sequence[SegmentIndex],
    merged: _Merged,
    numbers: Array,
    offsets: Array,
    sizes: Array,
    *,
    where: str,
) -> None:
    """Check the extents of tensors that are one shard: end to end from 0 to the last byte."""
    order = np.lexsort((offsets, numbers))
    numbers, offsets, sizes = numbers[order], offsets[order], sizes[order]
    ends = offsets + sizes
    is_first = np.ones(len(numbers), dtype=bool)
    is_first[1:] = numbers[1:] != numbers[:-1]
    is_last = np.roll(is_first, -1)
    expected = np.where(is_first, 0, np.roll(ends, 1))
    wrong = (offsets != expected) | (is_last & (ends != merged.nbytes[numbers]))
    if wrong.any():
        at = int(np.argmax(wrong))
        name = _name(indexes, merged, int(numbers[at]))
        detail = f"bytes {offsets[at]} to {ends[at]} are stored where {expected[at]} was due"
        raise fault("EXT-10", f"{where}: tensor {name!r}", f"{detail}: a gap or an overlap")


def extent_box(index: SegmentIndex, row: int) -> Box:
    """Return the box of an extent that has one."""
    record = index.tables.extents[row]
    ndim = int(index.tables.tensors["ndim"][record["owner"]])
    start = int(record["dims_index"])
    values = tuple(index.tables.dims[start : start + 2 * ndim].tolist())
    return Box(start=values[:ndim], shape=values[ndim:])


def _check_boxes(
    boxes: dict[Box, list[tuple[int, int]]], index: SegmentIndex, row: int, where: str
) -> None:
    record = index.tables.tensors[row]
    start, ndim = int(record["dims_index"]), int(record["ndim"])
    shape = tuple(index.tables.dims[start : start + ndim].tolist())
    itemsize = int(record["nbytes"]) // int(np.prod(shape, dtype=object))
    for box, spans in boxes.items():
        ends = [0]
        for offset, nbytes in sorted(spans):
            if offset != ends[-1]:
                detail = f"box {box.start}+{box.shape} has a gap or an overlap at byte {ends[-1]}"
                raise fault("EXT-10", where, detail)
            ends.append(offset + nbytes)
        if ends[-1] != int(np.prod(box.shape, dtype=object)) * itemsize:
            detail = f"box {box.start}+{box.shape} ends at byte {ends[-1]}"
            raise fault("EXT-10", where, detail)
    _check_tiling(list(boxes), shape, where)


def _check_tiling(boxes: Sequence[Box], shape: tuple[int, ...], where: str) -> None:
    """Check by signed corner counts that the boxes cover every element once."""
    cut = [
        axis for axis, length in enumerate(shape) if any(box.shape[axis] != length for box in boxes)
    ]
    if len(cut) > MAX_CUT_DIMS:
        raise fault("EXT-12", where, f"is cut along {len(cut)} dimensions, at most {MAX_CUT_DIMS}")
    corners: Counter[tuple[int, ...]] = Counter()
    whole = Box(start=(0,) * len(shape), shape=shape)
    for box, weight in [*((box, 1) for box in boxes), (whole, -1)]:
        sides = [((box.start[axis], 1), (box.start[axis] + box.shape[axis], -1)) for axis in cut]
        for corner in product(*sides):
            sign = weight
            for _, side in corner:
                sign *= side
            corners[tuple(position for position, _ in corner)] += sign
    if any(corners.values()):
        at = min(position for position, count in corners.items() if count)
        detail = f"its {len(boxes)} boxes overlap or leave a gap near {at} in dimensions {cut}"
        raise fault("EXT-11", where, detail)


def _check_objects(indexes: Sequence[SegmentIndex], world_size: int, where: str) -> None:
    seen: set[tuple[str, int]] = set()
    ranges: list[tuple[int, int]] = []
    for index in indexes:
        ranks = index.tables.object_ranks
        for row, record in enumerate(index.tables.objects):
            key = (index.object_names[row], int(record["scope"]))
            if key in seen:
                raise fault("OBJ-7", where, f"object {key[0]!r} stands in two segments")
            seen.add(key)
            if record["kind"] != OBJECT_TREE:
                continue
            if key[1] == NONE:
                ranges.append((0, world_size))
            own = ranks[ranks["object"] == row]
            ranges += zip(own["start"].tolist(), own["stop"].tolist(), strict=True)
    ranges.sort()
    if not ranges:
        return
    joined = all(first[1] == second[0] for first, second in pairwise(ranges))
    if not joined or ranges[0][0] != 0 or ranges[-1][1] != world_size:
        raise fault("OBJ-6", where, f"trees belong to ranks {ranges} of a world of {world_size}")
