"""fpinspect gc removes what died, leaves what lives, and says which is which."""

import os
from pathlib import Path
from typing import Any

import pytest

from fpformat import SavePlan, SegmentPlan, write_checkpoint
from fpformat.names import staging_name, trash_name
from fpformat.publish.staging import Staging
from fpformat_tools.streams.leftovers import temporary_name


def dead_staging(root: Path, name: str) -> Path:
    path = root / name
    path.mkdir()
    (path / "seg-000000.fps").write_bytes(bytes(1000))
    os.utime(path, (1, 1))
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    plan = SavePlan(segments=(SegmentPlan(entries=(), parts=()),))
    write_checkpoint(tmp_path / "step-0000000001", plan, {})
    dead_staging(tmp_path, staging_name(bytes(16)))
    dead_staging(tmp_path, trash_name(bytes(16)))
    (tmp_path / temporary_name()).write_bytes(bytes(500))
    os.utime(next(tmp_path.glob(".fpconvert*")), (1, 1))
    return tmp_path


def test_a_dry_run_only_lists(run: Any, root: Path) -> None:
    before = sorted(root.rglob("*"))
    outcome = run("fpinspect", "gc", root, "--dry-run")
    assert outcome.code == 0
    assert outcome.out.count("would be removed") == 3
    assert staging_name(bytes(16)) in outcome.out
    assert sorted(root.rglob("*")) == before


def test_the_dead_go_and_the_living_stay(run: Any, root: Path) -> None:
    staging = Staging(root / "c", bytes(15) + b"1")
    os.utime(staging.path, (1, 1))
    # The new save removed what was dead beside it; here is something new.
    dead_staging(root, staging_name(bytes(16)))
    outcome = run("fpinspect", "gc", root)
    assert outcome.code == 0
    assert outcome.out.count("removed") == 2
    assert outcome.out.count("in use") == 1
    names = sorted(path.name for path in root.iterdir() if "fpconvert" not in path.name)
    assert names == [staging.path.name, "step-0000000001"]
    staging.abandon()
    outcome = run("fpinspect", "gc", root)
    assert (outcome.code, outcome.out) == (0, "nothing is left behind\n")


def test_as_json(run: Any, root: Path) -> None:
    rows = run("fpinspect", "gc", root, "--json").json
    assert {row["verdict"] for row in rows} == {"removed"}
    assert sorted(row["nbytes"] for row in rows) == [500, 1000, 1000]
    assert run("fpinspect", "gc", root, "--json").json == []


def test_what_cannot_be_removed(run: Any, root: Path) -> None:
    (root / staging_name(bytes(16)) / "mine.txt").touch()
    os.utime(root / staging_name(bytes(16)), (1, 1))
    outcome = run("fpinspect", "gc", root)
    assert outcome.code == 1
    assert "cannot be removed" in outcome.err
    assert outcome.out.count("stays") == 1


def test_no_directory(run: Any, tmp_path: Path) -> None:
    outcome = run("fpinspect", "gc", tmp_path / "none")
    assert outcome.code == 1
    assert "cannot be listed" in outcome.err
    assert run("fpinspect", "gc").code == 2
