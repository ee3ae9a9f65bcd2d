"""Placement: alignment rules, little padding, even division over segments."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpformat import (
    BytesSource,
    Geometry,
    PlanError,
    TensorEntry,
    open_checkpoint,
    verify_checkpoint,
    write_checkpoint,
)
from fpformat.dtypes import by_name
from fpformat.records.layout import place_extents, plan_checkpoint

U8, F32 = by_name("U8"), by_name("F32")


@pytest.mark.clause("SEG-3", "SEG-4")
@given(
    st.lists(st.integers(1, 20_000), max_size=30),
    st.sampled_from([4096, 16384, 1 << 21]),
    st.sampled_from([64, 256, 4096]),
)
def test_extents_are_aligned_and_close(sizes, align, tensor_align):
    geometry = Geometry(align=align, tensor_align=tensor_align)
    offsets, index_offset = place_extents(sizes, geometry)
    end = align
    for offset, size in zip(offsets, sizes, strict=True):
        unit = align if size >= align else tensor_align
        assert offset % unit == 0
        assert 0 <= offset - end < unit
        end = offset + size
    assert index_offset % align == 0
    assert 0 <= index_offset - end < align


def write(path, entries, array, **options):
    plan = plan_checkpoint(entries, **options)
    sources = {(entry.key, None): BytesSource(array[: np.prod(entry.shape)]) for entry in entries}
    return plan, write_checkpoint(path, plan, sources)


def test_five_thousand_small_tensors_cost_little(tmp_path):
    """The whole directory is at most 1.30 times the data (1.20 in the design's prototype)."""
    entries = [
        TensorEntry(name=f"layers.{i}.attention.norm.weight", dtype=U8, shape=(1024,))
        for i in range(5000)
    ]
    _, report = write(tmp_path / "c", entries, np.ones(1024, dtype="u1"))
    on_disk = sum(path.stat().st_size for path in (tmp_path / "c").iterdir())
    assert report.nbytes == on_disk
    assert on_disk / (5000 * 1024) < 1.30


@given(
    st.lists(st.integers(0, 400_000), min_size=1, max_size=12),
    st.integers(1, 9),
)
def test_division_is_even_and_complete(tmp_path_factory, sizes, segment_count):
    path = tmp_path_factory.mktemp("division") / "c"
    array = np.random.default_rng(1).integers(0, 256, 400_000, dtype="u1")
    entries = [TensorEntry(name=f"t{i}", dtype=U8, shape=(n,)) for i, n in enumerate(sizes)]
    plan, _ = write(path, entries, array, segment_count=segment_count)
    shares = [sum(part.nbytes for part in segment.parts) for segment in plan.segments]
    assert sum(shares) == sum(sizes)
    smallest = max((n for n in sizes if n < 64 * 1024), default=0)
    assert max(shares) - sum(sizes) / segment_count <= smallest + 4096
    for segment in plan.segments:
        for part in segment.parts:
            assert part.shard_offset % 4096 == 0
    with open_checkpoint(path) as checkpoint:
        for entry, size in zip(entries, sizes, strict=True):
            assert checkpoint.read(entry.name).tobytes() == array[:size].tobytes()
    assert verify_checkpoint(path).problems == ()


@pytest.mark.parametrize(
    ("geometry", "clause"),
    [
        (Geometry(align=2048), "HDR-8"),
        (Geometry(align=1 << 22), "HDR-8"),
        (Geometry(tensor_align=32), "HDR-8"),
        (Geometry(piece_nbytes=1 << 13), "HDR-8"),
    ],
)
def test_a_geometry_outside_the_format_is_refused(tmp_path, geometry, clause):
    entries = [TensorEntry(name="t", dtype=U8, shape=(3,))]
    with pytest.raises(PlanError, match=clause):
        write(tmp_path / "c", entries, np.ones(3, dtype="u1"), geometry=geometry)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("align", [4096, 1 << 16, 1 << 21])
@pytest.mark.parametrize("piece_nbytes", [1 << 14, 1 << 20])
def test_every_geometry_reads_back(tmp_path, align, piece_nbytes):
    geometry = Geometry(align=align, piece_nbytes=piece_nbytes, tensor_align=4096)
    array = np.random.default_rng(2).integers(0, 256, 3_000_001, dtype="u1")
    entries = [
        TensorEntry(name="a", dtype=U8, shape=(3_000_001,)),
        TensorEntry(name="b", dtype=U8, shape=(5,)),
    ]
    write(tmp_path / "c", entries, array, geometry=geometry, segment_count=2)
    assert verify_checkpoint(tmp_path / "c").problems == ()
    with open_checkpoint(tmp_path / "c") as checkpoint:
        assert checkpoint.read("a").tobytes() == array.tobytes()


def test_requests_that_cannot_be_planned():
    entry = TensorEntry(name="t", dtype=F32, shape=(3,))
    with pytest.raises(PlanError, match="two tensors"):
        plan_checkpoint([entry, entry])
    alias = TensorEntry(name="u", dtype=F32, shape=(3,), alias=("absent", None))
    with pytest.raises(PlanError, match="ALI-1"):
        plan_checkpoint([entry, alias])


def test_a_source_that_is_missing_or_short(tmp_path):
    plan = plan_checkpoint([TensorEntry(name="t", dtype=F32, shape=(3,))])
    with pytest.raises(PlanError, match="no source"):
        write_checkpoint(tmp_path / "c", plan, {})
    with pytest.raises(PlanError, match="8 of 12"):
        write_checkpoint(tmp_path / "c", plan, {(("t", None), None): BytesSource(bytes(8))})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options",
    [
        {"step": -1},
        {"step": 1 << 53},
        {"user": {"a": "\ud800"}},
        {"user": {"a": "x" * (17 << 20)}},
        {"world_size": 0},
    ],
)
def test_manifest_values_are_checked_before_writing(tmp_path, options):
    entries = [TensorEntry(name="t", dtype=U8, shape=(3,))]
    with pytest.raises(PlanError):
        write(tmp_path / "c", entries, np.ones(3, dtype="u1"), **options)
    assert not list(tmp_path.iterdir())
