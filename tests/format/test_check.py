"""Boxes that tile, and boxes that do not: against counting every element."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fpformat import (
    Box,
    BytesSource,
    Part,
    PlanError,
    SavePlan,
    SegmentPlan,
    TensorEntry,
    open_checkpoint,
    verify_checkpoint,
    write_checkpoint,
)
from fpformat.dtypes import by_name
from fpformat.write.layout import lay_out

U8 = by_name("U8")


@st.composite
def tilings(draw):
    """Draw a shape and boxes that tile it, by cutting boxes in two again and again."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=draw(st.integers(1, 4)))))
    boxes = [Box(start=(0,) * len(shape), shape=shape)]
    for _ in range(draw(st.integers(0, 8))):
        at = draw(st.integers(0, len(boxes) - 1))
        axis = draw(st.integers(0, len(shape) - 1))
        box = boxes.pop(at)
        if box.shape[axis] < 2:
            boxes.insert(at, box)
            continue
        cut = draw(st.integers(1, box.shape[axis] - 1))
        low, high = list(box.shape), list(box.shape)
        start = list(box.start)
        low[axis], high[axis] = cut, box.shape[axis] - cut
        start[axis] += cut
        boxes += [
            Box(start=box.start, shape=tuple(low)),
            Box(start=tuple(start), shape=tuple(high)),
        ]
    return shape, boxes


def plan_of(shape, boxes, segment_count=1):
    entry = TensorEntry(name="t", dtype=U8, shape=shape)
    whole = Box(start=(0,) * len(shape), shape=shape)
    segments = []
    for ordinal in range(segment_count):
        parts = tuple(
            Part(
                key=entry.key,
                box=None if box == whole else box,
                shard_offset=0,
                nbytes=int(np.prod(box.shape)),
            )
            for box in boxes[ordinal::segment_count]
        )
        segments.append(SegmentPlan(entries=(entry,), parts=parts))
    return SavePlan(segments=tuple(segments))


def sources_of(plan, array):
    sources = {}
    for segment in plan.segments:
        for part in segment.parts:
            box = part.box or Box(start=(0,) * array.ndim, shape=array.shape)
            index = tuple(slice(s, s + n) for s, n in zip(box.start, box.shape, strict=True))
            sources[part.key, part.box] = BytesSource(np.ascontiguousarray(array[index]))
    return sources


def slices(box):
    return tuple(slice(s, s + n) for s, n in zip(box.start, box.shape, strict=True))


@pytest.mark.clause("EXT-11")
@given(tilings(), st.data())
def test_the_check_agrees_with_counting(tiling, data):
    shape, boxes = tiling
    changed = data.draw(st.sampled_from(["none", "drop", "double", "move"]))
    at = data.draw(st.integers(0, len(boxes) - 1))
    if changed == "drop":
        assume(len(boxes) > 1)
        boxes = boxes[:at] + boxes[at + 1 :]
    elif changed == "double":
        boxes = [*boxes, boxes[at]]
    elif changed == "move":
        moved = data.draw(st.sampled_from(boxes))
        boxes = [*boxes[:at], moved, *boxes[at + 1 :]]
    count = np.zeros(shape, dtype=int)
    for box in boxes:
        count[slices(box)] += 1
    plan = plan_of(shape, boxes)
    sources = sources_of(plan, np.zeros(shape, dtype="u1"))
    if (count == 1).all():
        lay_out(plan, sources)
    else:
        with pytest.raises(PlanError, match="EXT-1[01]"):
            lay_out(plan, sources)


@given(tilings(), st.integers(1, 3), st.data())
def test_any_tiling_reads_back_by_any_box(tmp_path_factory, tiling, segment_count, data):
    shape, boxes = tiling
    array = np.random.default_rng(0).integers(0, 256, shape, dtype="u1")
    plan = plan_of(shape, boxes, segment_count)
    path = tmp_path_factory.mktemp("tiling") / "c"
    write_checkpoint(path, plan, sources_of(plan, array))
    wanted = data.draw(st.sampled_from(boxes))
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    other = Box(
        start=start,
        shape=tuple(data.draw(st.integers(0, n - s)) for n, s in zip(shape, start, strict=True)),
    )
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.read("t").tobytes() == array.tobytes()
        for box in (wanted, other):
            assert checkpoint.read("t", box=box).tobytes() == array[slices(box)].tobytes()
    assert verify_checkpoint(path).problems == ()


@pytest.mark.clause("EXT-12")
@pytest.mark.parametrize(("cut", "accepted"), [(8, True), (9, False)])
def test_at_most_eight_dimensions_are_cut(cut, accepted):
    shape = (2,) * cut
    boxes = []
    rest = list(shape)
    start = [0] * cut
    for axis in range(cut):
        half = [*rest]
        half[axis] = 1
        boxes.append(Box(start=tuple(start), shape=tuple(half)))
        start[axis], rest[axis] = 1, 1
    boxes.append(Box(start=tuple(start), shape=tuple(rest)))
    plan = plan_of(shape, boxes)
    sources = sources_of(plan, np.zeros(shape, dtype="u1"))
    if accepted:
        lay_out(plan, sources)
    else:
        with pytest.raises(PlanError, match="EXT-12"):
            lay_out(plan, sources)
