"""Verification: any damage is found, laid to its tensor, and does not hide other damage."""

import random
from pathlib import Path

import numpy as np
import pytest
from format.forge import Forge
from format.samples import ENTRIES, F32, write_sample

from fpformat import (
    BytesSource,
    FormatError,
    ObjectEntry,
    TensorEntry,
    View,
    open_checkpoint,
    state_digest,
    verify_checkpoint,
    write_checkpoint,
)
from fpformat.records.layout import plan_checkpoint
from fpformat.records.nodes import TensorRef
from fpformat.records.tree import dump_tree


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    return write_sample(tmp_path_factory.mktemp("sample") / "c")


def flip(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


@pytest.mark.parametrize("name", ["manifest.json", "seg-000000.fps", "seg-000001.fps"])
def test_a_flipped_bit_in_any_byte_is_reported(sample, tmp_path, name):
    """A bit of every fifth byte, and two bits of every byte that is not zero."""
    path = Forge(sample).write(tmp_path / "c")
    raw = (path / name).read_bytes()
    chance = random.Random(0)
    spots = [(at, chance.randrange(8)) for at in range(0, len(raw), 5)]
    spots += [(at, bit) for at in range(len(raw)) if raw[at] for bit in (0, 7)]
    for at, bit in spots:
        flip(path / name, at, bit)
        report = verify_checkpoint(path)
        assert report.problems, f"byte {at}, bit {bit} of {name}"
        assert all(str(path) in problem.where for problem in report.problems)
        flip(path / name, at, bit)
    assert verify_checkpoint(path).problems == ()


def test_damage_is_laid_to_its_tensor_and_the_rest_still_reads(sample, tmp_path):
    path = Forge(sample).write(tmp_path / "c")
    flip(path / "seg-000001.fps", 4096 + 950 + 10, 3)
    report = verify_checkpoint(path)
    assert [problem.clause for problem in report.problems] == ["SUM-2", "SUM-4"]
    assert report.damaged == (("grid", None),)
    assert "grid" in report.problems[0].where
    with open_checkpoint(path) as checkpoint:
        with pytest.raises(FormatError, match=r"seg-000001.fps: tensor 'grid'"):
            checkpoint.read("grid")
        with pytest.raises(FormatError, match="SUM-2"):
            checkpoint.read("tied")
        assert len(checkpoint.read("long")) == 5000


def test_damage_in_several_places_is_all_reported(sample, tmp_path):
    path = Forge(sample).write(tmp_path / "c")
    flip(path / "seg-000000.fps", 0, 0)
    flip(path / "seg-000001.fps", 4096, 0)
    clauses = [problem.clause for problem in verify_checkpoint(path).problems]
    assert clauses == ["HDR-1", "SUM-4", "SUM-2", "SUM-4"]


def test_every_damaged_tensor_is_named(tmp_path):
    entries = [e for e in ENTRIES if e.dtype == F32 and e.alias is None]
    values = {entry.key: np.ones(entry.shape, dtype="f4") for entry in entries}
    sources = {(key, None): BytesSource(value) for key, value in values.items()}
    write_checkpoint(tmp_path / "c", plan_checkpoint(entries), sources)
    for at in (4096, 4096 + 64):
        flip(tmp_path / "c" / "seg-000000.fps", at, 5)
    assert set(verify_checkpoint(tmp_path / "c").damaged) == set(values)


def test_a_path_that_is_no_checkpoint(tmp_path):
    report = verify_checkpoint(tmp_path)
    assert [problem.clause for problem in report.problems] == ["DIR-1"]
    assert report.checkpoint_id is None


def test_progress_counts_every_byte_of_the_segments(sample):
    seen: list[int] = []
    report = verify_checkpoint(sample, progress=seen.append)
    manifest = (sample / "manifest.json").stat().st_size
    assert (
        sum(seen)
        == report.nbytes - manifest
        == sum(path.stat().st_size for path in sample.glob("*.fps"))
    )


@pytest.mark.clause("ERR-8")
def test_a_broken_segment_hides_nothing_in_another(sample, tmp_path):
    """Segment 0 has a fault of its header; segment 1 two damaged pieces and two of padding."""
    path = Forge(sample).write(tmp_path / "c")
    flip(path / "seg-000000.fps", 70, 0)
    second = path / "seg-000001.fps"
    with open_checkpoint(sample) as checkpoint:
        extents = checkpoint.segments[1].index.tables.extents
        starts = [int(record["offset"]) for record in extents]
        stops = [int(record["offset"] + record["stored_nbytes"]) for record in extents]
    for at in (starts[0], starts[2], stops[0], stops[-1]):
        flip(second, at, 2)
    report = verify_checkpoint(path)
    found = [(Path(problem.where).name[:10], problem.clause) for problem in report.problems]
    assert found[:2] == [("seg-000000", "HDR-2"), ("seg-000000", "SUM-4")]
    assert sorted(found[2:]) == [
        ("seg-000001", "SEG-5"),
        ("seg-000001", "SEG-5"),
        ("seg-000001", "SUM-2"),
        ("seg-000001", "SUM-2"),
        ("seg-000001", "SUM-4"),
    ]


@pytest.mark.clause("ERR-8")
def test_a_broken_manifest_ends_the_report(sample, tmp_path):
    path = Forge(sample).write(tmp_path / "c")
    flip(path / "manifest.json", 100, 1)
    flip(path / "seg-000000.fps", 0, 0)
    assert [problem.clause for problem in verify_checkpoint(path).problems] == ["MAN-3"]


@pytest.mark.clause("ERR-8")
@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_tree_is_judged_beside_damaged_pieces(tmp_path, is_damaged):
    """No tree reaches ``b``; a damaged piece of ``a`` does not hide that."""
    entries = [TensorEntry(name=name, dtype=F32, shape=(2000,)) for name in ("a", "b")]
    sources = {(entry.key, None): BytesSource(bytes(8000)) for entry in entries}
    tree = ObjectEntry(name="tree", kind=1, payload=dump_tree({"a": TensorRef(0)}))
    write_checkpoint(tmp_path / "c", plan_checkpoint(entries, [tree]), sources)
    if is_damaged:
        flip(tmp_path / "c" / "seg-000000.fps", 4096, 5)
    clauses = [problem.clause for problem in verify_checkpoint(tmp_path / "c").problems]
    assert clauses == (["SUM-2", "SUM-4"] if is_damaged else []) + ["TRE-8"]


@pytest.mark.clause("LIM-3", "ALI-3", "ALI-8")
def test_only_the_value_that_is_compared_has_the_limit(tmp_path):
    """Stride times element size is above 2^53 - 1, the last element is not."""
    entries = [
        TensorEntry(name="a", dtype=F32, shape=(6,)),
        TensorEntry(
            name="b",
            dtype=F32,
            shape=(1, 3),
            alias=View(target=("a", None), strides=(2**53 - 1, 2), offset=1),
        ),
    ]
    values = np.arange(6, dtype="<f4")
    sources = {(("a", None), None): BytesSource(values)}
    write_checkpoint(tmp_path / "c", plan_checkpoint(entries), sources)
    assert verify_checkpoint(tmp_path / "c").problems == ()
    with open_checkpoint(tmp_path / "c") as checkpoint:
        assert checkpoint.read_array("b").tolist() == [[1, 3, 5]]
        assert state_digest(checkpoint).tensors
