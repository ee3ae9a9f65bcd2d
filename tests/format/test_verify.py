"""Verification: any damage is found, laid to its tensor, and does not hide other damage."""

import random
from pathlib import Path

import numpy as np
import pytest
from format.forge import Forge
from format.samples import ENTRIES, F32, write_sample

from fpformat import BytesSource, FormatError, open_checkpoint, verify_checkpoint, write_checkpoint
from fpformat.layout import plan_checkpoint


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
