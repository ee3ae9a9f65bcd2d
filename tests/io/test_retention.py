"""Removing: only derived names, only what nobody writes, never half a checkpoint by its name."""

import fcntl
import logging
import os

import pytest

from fpformat.errors import PlanError
from fpformat.names import staging_name, trash_name
from fpformat.publish.leftovers import collect as collect_leftovers
from fpformat.read.reader import open_checkpoint
from fpformat_io.session.retention import Retention, move_aside, retire
from fpformat_io.torch import save

SAVE_ID = bytes(range(16))


def collect(root, **more):
    return collect_leftovers(root, warn=logging.getLogger().warning, **more)


def staging(root, save_id=SAVE_ID, *, extra=()):
    path = root / staging_name(save_id)
    path.mkdir()
    for name in ("seg-000000.fps", "seg-000001.fps", *extra):
        (path / name).write_text("x")
    return path


def test_what_a_dead_writer_left_is_removed(tmp_path):
    path = staging(tmp_path, extra=["manifest.json"])
    trash = tmp_path / trash_name(SAVE_ID)
    trash.mkdir()
    assert collect(tmp_path, min_age_s=0) == (path, trash)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.clause("COM-18")
def test_a_writer_that_lives_keeps_its_directory(tmp_path):
    path = staging(tmp_path)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        assert collect(tmp_path, min_age_s=0) == ()
        assert len(list(path.iterdir())) == 2
    finally:
        os.close(descriptor)
    assert collect(tmp_path, min_age_s=0) == (path,)


def test_a_directory_made_just_now_is_left(tmp_path):
    path = staging(tmp_path)
    assert collect(tmp_path) == ()
    os.utime(path, (0, 0))
    assert collect(tmp_path) == (path,)


def test_foreign_files_stay(tmp_path, caplog):
    path = staging(tmp_path, extra=["notes.txt"])
    assert collect(tmp_path, min_age_s=0) == ()
    assert [found.name for found in path.iterdir()] == ["notes.txt"]
    assert "cannot be removed" in caplog.text


def test_other_names_and_links_are_never_touched(tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "manifest.json").write_text("x")
    (tmp_path / staging_name(SAVE_ID)).symlink_to(victim)
    (tmp_path / ".fps-short").mkdir()
    (tmp_path / ".fps-cache").mkdir()
    assert collect(tmp_path, min_age_s=0) == ()
    assert len(list(tmp_path.iterdir())) == 4
    assert (victim / "manifest.json").exists()


def test_retiring_goes_through_the_trash(tmp_path, monkeypatch):
    save({"x": 1}, tmp_path / "c")
    with open_checkpoint(tmp_path / "c") as checkpoint:
        save_id = checkpoint.manifest.save_id
    (tmp_path / "c" / "notes.txt").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        retire(tmp_path / "c", save_id)
    trash = tmp_path / trash_name(save_id)
    assert [path.name for path in trash.iterdir()] == ["notes.txt"]


def test_moving_aside(tmp_path):
    (tmp_path / "step-0000000001").mkdir()
    aside = move_aside(tmp_path / "step-0000000001", SAVE_ID)
    assert aside.name == f"step-0000000001.bad-{SAVE_ID.hex()}"
    assert list(tmp_path.iterdir()) == [aside]


def test_one_that_cannot_be_removed_is_left_and_the_others_go(tmp_path, caplog, monkeypatch):
    for step in (1, 2, 3):
        save({}, tmp_path / f"step-{step:010d}", step=step)
    rename = os.rename

    def refuse(path, *args):
        if "step-0000000001" in str(path):
            raise PermissionError(13, "Permission denied")
        return rename(path, *args)

    monkeypatch.setattr(os, "rename", refuse)
    newest = tmp_path / "step-0000000003"
    assert [path.name for path in Retention(tmp_path, 1).prune(newest)] == ["step-0000000002"]
    assert "Permission denied" in caplog.text


def test_a_plan_error_is_no_reason_to_remove_anything(tmp_path):
    save({}, tmp_path / "c")
    with pytest.raises(PlanError):
        save({}, tmp_path / "c")
    assert len(list((tmp_path / "c").iterdir())) == 2


def test_what_another_writer_retired_first_is_no_warning(tmp_path, monkeypatch, caplog):
    for step in (1, 2):
        save({"x": 1}, tmp_path / f"step-{step:010}", step=step)
    keeper = Retention(tmp_path, keep=1)
    listdir = os.listdir

    def late(path):
        names = listdir(path)
        if path == tmp_path / "step-0000000001":
            (tmp_path / "step-0000000001").rename(tmp_path / "elsewhere")
        return names

    monkeypatch.setattr(os, "listdir", late)
    assert keeper.prune(tmp_path / "step-0000000002") == ()
    assert caplog.text == ""
