"""Read plans: which bytes of a stored shard go where in a wanted box. Pure arithmetic.

Both are boxes of one tensor, in C order. Their intersection is a number of runs of equal length,
contiguous on both sides; the longer the common trailing dimensions, the fewer and longer they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fpformat.model import Box, Shape

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
