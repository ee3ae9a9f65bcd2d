"""fpverify: exit codes, and reports that name segment, tensor and clause."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fpformat_io.torch import save


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state = {"a": torch.arange(200_000.0), "b": {"c": torch.arange(100_000.0)}, "s": torch.ones(2)}
    save(state, tmp_path / "ckpt", step=5)
    return tmp_path / "ckpt"


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_sound_checkpoint(checkpoint: Path, run: Any) -> None:
    outcome = run("fpverify", checkpoint)
    assert outcome.code == 0
    assert f"{checkpoint}: sound" in outcome.out
    assert "3 tensors in 1 segment" in outcome.out
    assert "step 5" in outcome.out
    assert "MB in" in outcome.out
    assert run("fpverify", checkpoint, "--quiet").out == ""
    report = run("fpverify", checkpoint, "--json").json
    assert report["sound"] is True
    assert report["checkpoint_id"] in outcome.out
    assert report["tensors"] == 3
    total = sum(path.stat().st_size for path in checkpoint.iterdir())
    assert report["nbytes"] == total
    assert report["problems"] == report["damaged"] == []


def test_damage_is_laid_to_the_tensor(checkpoint: Path, run: Any) -> None:
    flip(checkpoint / "seg-000000.fps", 500_000)
    outcome = run("fpverify", checkpoint)
    assert outcome.code == 1
    assert "SUM-2" in outcome.out
    assert "corrupt" in outcome.out
    assert "'a'" in outcome.out
    assert "seg-000000.fps" in outcome.out
    report = run("fpverify", checkpoint, "--json")
    assert report.code == 1
    assert report.json["damaged"] == [{"name": "a", "rank": None}]
    assert {problem["clause"] for problem in report.json["problems"]} == {"SUM-2", "SUM-4"}
    quiet = run("fpverify", checkpoint, "--quiet")
    assert (quiet.code, quiet.out, quiet.err) == (1, "", "")


def test_what_is_no_sound_checkpoint(checkpoint: Path, tmp_path: Path, run: Any) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name in ("torn", "truncated", "newer", "html"):
        shutil.copytree(checkpoint, tmp_path / name)
    (tmp_path / "torn" / "seg-000000.fps").unlink()
    segment = tmp_path / "truncated" / "seg-000000.fps"
    segment.write_bytes(segment.read_bytes()[:-5000])
    (tmp_path / "html" / "manifest.json").write_text("<html></html>")
    flip(tmp_path / "newer" / "manifest.json", 40)
    for name, words in (
        ("file", "not_fpformat"),
        ("empty", "incomplete"),
        ("torn", "incomplete"),
        ("truncated", "SEG-1"),
        ("newer", "corrupt"),
        ("html", "not_fpformat"),
        ("nothing there", "io"),
    ):
        outcome = run("fpverify", tmp_path / name)
        assert outcome.code == 1, name
        assert words in outcome.out, outcome.out
        document = run("fpverify", tmp_path / name, "--json").json
        assert document["sound"] is False
        assert document["problems"]
        shown = run("fpinspect", tmp_path / name)
        assert shown.code == 1
        assert shown.out == ""
        assert shown.err.count("\n") == 1
        assert words in shown.err


def test_every_kind_of_place_is_noticed(checkpoint: Path, tmp_path: Path, run: Any) -> None:
    nbytes = (checkpoint / "seg-000000.fps").stat().st_size
    for number, place in enumerate(
        (0, 100, 4000, nbytes - 1, nbytes - 100, nbytes - 5000, 900_000)
    ):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(checkpoint, copy)
        flip(copy / "seg-000000.fps", place)
        assert run("fpverify", copy, "--quiet").code == 1, place


def test_usage(run: Any) -> None:
    assert run("fpverify").code == 2
    assert run("fpverify", "x", "--unknown").code == 2
    shown = run("fpverify", "--help")
    assert shown.code == 0
    assert "exit codes" in shown.out
    assert "examples" in shown.out
