"""fpverify: exit codes, and reports that name segment, tensor and clause."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tool_inputs import two_ranks

from fpformat.read.reader import open_checkpoint
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


def first_line(outcome: Any) -> str:
    return str(outcome.out).partition("\n")[0].rpartition("/")[2]


def copy_of(checkpoint: Path, name: str) -> Path:
    return Path(shutil.copytree(checkpoint, checkpoint.parent / name))


def test_the_headline_counts_tensors(checkpoint: Path, run: Any) -> None:
    """Damaged pieces of one tensor are one line, the checksum of the file their consequence."""
    flip(checkpoint / "seg-000000.fps", 300_000)
    flip(checkpoint / "seg-000000.fps", 700_000)
    outcome = run("fpverify", checkpoint)
    assert first_line(outcome) == "ckpt: DAMAGED: 1 damaged tensor of 3; the others are good"
    assert outcome.out.count("'a'") == 1
    assert outcome.out.count("SUM-2") == 1
    assert "             SUM-4   so the CRC-32C of the whole file differs as well\n" in outcome.out
    assert "/s)" not in outcome.out
    report = run("fpverify", checkpoint, "--json").json
    assert report["verdict"] == "DAMAGED: 1 damaged tensor of 3; the others are good"
    assert report["unverified"] == 0
    flip(checkpoint / "seg-000000.fps", 1_100_000)
    outcome = run("fpverify", checkpoint)
    assert first_line(outcome) == "ckpt: DAMAGED: 2 damaged tensors of 3; the other is good"


def test_damage_beside_tensors(checkpoint: Path, run: Any) -> None:
    with open_checkpoint(checkpoint) as opened:
        extents = opened.segments[0].index.tables.extents
        ends = (extents["offset"] + extents["stored_nbytes"]).tolist()
        tree = int(extents["offset"][extents["owner_kind"] == 1][0])
    padded = copy_of(checkpoint, "padded")
    flip(padded / "seg-000000.fps", max(ends) + 1)
    outcome = run("fpverify", padded)
    assert first_line(outcome) == "padded: DAMAGED: 1 problem; all 3 tensors are good"
    assert "SEG-5" in outcome.out
    felled = copy_of(checkpoint, "felled")
    flip(felled / "seg-000000.fps", tree + 3)
    outcome = run("fpverify", felled)
    assert first_line(outcome) == "felled: DAMAGED: 1 problem; all 3 tensors are good"
    assert "object 'tree'" in outcome.out


def test_what_could_not_be_checked_is_said(checkpoint: Path, run: Any) -> None:
    """Where the index survived it tells how many tensors are concerned."""
    for name, place, count in (
        ("magic", 0, 3),
        ("geometry", 70, 3),
        ("footer", -100, 3),
        ("index", -4096 - 3000, None),
    ):
        path = copy_of(checkpoint, name)
        flip(path / "seg-000000.fps", place)
        outcome = run("fpverify", path)
        text = "an unknown number of tensors" if count is None else "3 tensors"
        assert first_line(outcome) == f"{name}: DAMAGED: 1 problem; {text} could not be checked"
        text = "the number of its tensors is unknown" if count is None else "3 tensors unverified"
        assert f"unread   seg-000000.fps could not be read: {text}\n" in outcome.out
        assert "0 tensors" not in outcome.out
        assert "every index" not in outcome.out
        assert run("fpverify", path, "--json").json["unverified"] == count
    cut = copy_of(checkpoint, "cut")
    segment = cut / "seg-000000.fps"
    segment.write_bytes(segment.read_bytes()[:-1])
    assert "1 problem; 3 tensors could not be checked" in first_line(run("fpverify", cut))
    lost = copy_of(checkpoint, "lost")
    (lost / "seg-000000.fps").unlink()
    assert first_line(run("fpverify", lost)).startswith("lost: INCOMPLETE: 1 problem; an unknown")
    torn = copy_of(checkpoint, "torn")
    flip(torn / "manifest.json", 60)
    outcome = run("fpverify", torn)
    assert first_line(outcome) == "torn: DAMAGED: 1 problem; no tensor could be checked"
    assert run("fpverify", torn, "--json").json["unverified"] is None


def test_one_of_two_segments(tmp_path: Path, run: Any) -> None:
    path = two_ranks(tmp_path / "ckpt")
    assert "3 tensors in 2 segments" in run("fpverify", path).out
    both = copy_of(path, "both")
    flip(both / "seg-000001.fps", 70)
    outcome = run("fpverify", both)
    assert first_line(outcome) == "both: DAMAGED: 1 problem; 2 tensors could not be checked"
    assert "the manifest and 1 of 2 segments\n" in outcome.out
    flip(both / "seg-000000.fps", 4096)
    outcome = run("fpverify", both)
    text = "1 problem, 1 damaged tensor of 3; 1 tensor could not be checked"
    assert first_line(outcome) == f"both: DAMAGED: {text}"


def test_ties_are_damaged_too(tmp_path: Path, run: Any) -> None:
    weight = torch.arange(100_000.0)
    halves = torch.arange(100_000.0)
    state = {
        "emb": weight,
        "head": weight,
        "left": halves[:60_000],
        "right": halves[40_000:],
        "other": torch.ones(3),
    }
    save(state, tmp_path / "ckpt")
    with open_checkpoint(tmp_path / "ckpt") as opened:
        (segment,) = opened.segments
        places = {
            segment.title(row).rpartition(" ")[2]: int(record["offset"])
            for row, record in enumerate(segment.index.tables.extents)
        }
    tied, based = copy_of(tmp_path / "ckpt", "tied"), copy_of(tmp_path / "ckpt", "based")
    flip(tied / "seg-000000.fps", places["'emb'"])
    outcome = run("fpverify", tied)
    assert first_line(outcome) == "tied: DAMAGED: 2 damaged tensors of 5; the others are good"
    assert "differs; the same bytes are in 'head'\n" in outcome.out
    flip(based / "seg-000000.fps", places["'~h/left'"])
    outcome = run("fpverify", based)
    assert first_line(outcome) == "based: DAMAGED: 2 damaged tensors of 5; the others are good"
    assert "'left', 'right'\n" in outcome.out
    names = [item["name"] for item in run("fpverify", based, "--json").json["damaged"]]
    assert names == ["left", "right"]


def test_several_directories(checkpoint: Path, run: Any) -> None:
    bad = copy_of(checkpoint, "bad")
    flip(bad / "seg-000000.fps", 500_000)
    outcome = run("fpverify", checkpoint, bad, checkpoint)
    assert outcome.code == 1
    assert outcome.out.count(": sound\n") == 2
    assert f"{bad}: DAMAGED" in outcome.out
    report = run("fpverify", checkpoint, bad, "--json")
    assert report.code == 1
    assert [one["sound"] for one in report.json] == [True, False]
    assert run("fpverify", checkpoint, checkpoint, "--quiet").code == 0
    assert run("fpverify", bad, checkpoint, "--quiet").code == 1
