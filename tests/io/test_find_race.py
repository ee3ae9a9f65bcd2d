"""`latest` and loading while a writer retires checkpoints: what was listed may be gone."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fpformat import (
    BytesSource,
    FormatError,
    PlanError,
    StorageError,
    TensorEntry,
    UncommittedError,
    open_checkpoint,
    plan_checkpoint,
    verify_checkpoint,
    write_checkpoint,
)
from fpformat.dtypes import by_name
from fpformat.names import step_name
from fpformat.read import reader
from fpformat.read.segment import Segment
from fpformat_io.session import latest as find
from fpformat_io.session.latest import latest
from fpformat_io.session.retention import retire

ROOT = Path(__file__).resolve().parents[2]
CALLS = 300

WRITER = """
import itertools, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_find_race import save_step
from fpformat_io.session.retention import Retention

root = Path(sys.argv[1])
retention = Retention(root, 1)
for step in itertools.count(1):
    report = save_step(root, step)
    retention.add(report.path, report.save_id)
    retention.prune(report.path)
    if step == 1:
        print("ready", flush=True)
"""


def save_step(root, step, *, name=None, segment_count=1):
    """Save a tensor that is full of the step, in a directory named after it."""
    values = np.full(8 * segment_count * 4096, step, dtype="<i8")
    entry = TensorEntry(name="w", dtype=by_name("I64"), shape=values.shape)
    plan = plan_checkpoint([entry], segment_count=segment_count, step=step)
    sources = {(entry.key, None): BytesSource(values)}
    return write_checkpoint(root / (name or step_name(step)), plan, sources)


@pytest.fixture
def writer(tmp_path):
    """A process that saves step after step and keeps one; it must live to the end."""
    code = WRITER.format(tests=str(Path(__file__).parent))
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        yield tmp_path
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("verify", ["structure", "full"])
def test_latest_never_fails_while_a_writer_keeps_one(writer, verify, caplog):
    steps = []
    for _ in range(CALLS):
        found = latest(writer, verify=verify)
        assert found.skipped == ()
        assert found.path.name == step_name(found.step)
        steps.append(found.step)
    assert steps == sorted(steps)
    assert len(set(steps)) > 3
    assert not caplog.records


def newest_values(root):
    """Return step and values of the newest checkpoint, as the guide on resuming has it."""
    while (found := latest(root)) is not None:
        try:
            with open_checkpoint(found) as checkpoint:
                return found.step, checkpoint.read_array("w")
        except FormatError:
            if os.path.lexists(found):
                raise
    return None


def test_loading_the_newest_while_a_writer_keeps_one(writer):
    for _ in range(CALLS):
        step, values = newest_values(writer)
        assert (values == step).all()


def test_verifying_by_name_while_a_writer_keeps_one(writer):
    seen = set()
    for _ in range(CALLS):
        report = verify_checkpoint(latest(writer))
        seen.update(problem.error_class for problem in report.problems)
        for problem in report.problems:
            gone = "No such file" in problem.detail or "was removed or replaced" in problem.detail
            assert gone, str(problem)
    assert seen <= {"io", "incomplete"}


class Interposed:
    """Calls `action` once, right before or after an operating system call that `when` chooses."""

    def __init__(self, monkeypatch, function, when, action, *, before=True):
        real = getattr(os, function)
        self.done = False

        def call(path, *args, **more):
            is_now = not self.done and when(os.fspath(path) if path is not None else "")
            self.done = self.done or is_now
            if is_now and before:
                action()
            result = real(path, *args, **more)
            if is_now and not before:
                action()
            return result

        monkeypatch.setattr(os, function, call)


def replace_by(root, old, new):
    """Return what a writer does that keeps one: save the next, retire the one before."""

    def act():
        save_id = b"\x07" * 16
        save_step(root, new)
        retire(root / step_name(old), save_id)

    return act


MANIFEST = "manifest.json"
SEGMENT = "seg-000000.fps"
# Each call of `os` in which a checkpoint may turn out to be gone: which one, and of which path.
MOMENTS = {
    "listed": ("scandir", lambda path: True, False),
    "peeked": ("open", lambda path: path.endswith(step_name(1)), True),
    "peeked_manifest": ("open", lambda path: path == MANIFEST, True),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("verify", ["structure", "full"])
def test_latest_lists_again_when_what_it_listed_is_gone(tmp_path, monkeypatch, moment, verify):
    save_step(tmp_path, 1)
    function, when, before = MOMENTS[moment]
    hook = Interposed(monkeypatch, function, when, replace_by(tmp_path, 1, 2), before=before)
    found = latest(tmp_path, verify=verify)
    assert hook.done
    assert (found.step, found.skipped) == (2, ())


@pytest.mark.parametrize("name", [MANIFEST, SEGMENT, step_name(1)])
def test_latest_lists_again_when_it_is_retired_while_opened(tmp_path, monkeypatch, name):
    save_step(tmp_path, 1)
    real = find.open_checkpoint
    acted = []

    def late(path):
        if not acted:
            act = replace_by(tmp_path, 1, 2)
            Interposed(monkeypatch, "open", lambda opened: opened.endswith(name), act)
            acted.append(path)
        return real(path)

    monkeypatch.setattr(find, "open_checkpoint", late)
    found = latest(tmp_path)
    assert acted
    assert (found.step, found.skipped) == (2, ())


def test_what_was_opened_is_verified_although_it_was_retired(tmp_path, monkeypatch):
    save_step(tmp_path, 1)
    real = Segment.verify_extent

    def late(self, extent):
        if (tmp_path / step_name(1)).exists():
            replace_by(tmp_path, 1, 2)()
        real(self, extent)

    monkeypatch.setattr(Segment, "verify_extent", late)
    assert latest(tmp_path, verify="full").step == 1


def test_an_older_one_is_not_returned_for_a_newest_that_is_gone(tmp_path, monkeypatch):
    for step, name in ((1, "kept"), (2, "b")):
        save_step(tmp_path, step, name=name)

    def act():
        save_step(tmp_path, 3, name="c")
        retire(tmp_path / "b", b"\x07" * 16)

    Interposed(monkeypatch, "open", lambda path: path.endswith("b"), act)
    assert latest(tmp_path).path.name == "c"


def test_nothing_is_left_after_the_last_one_is_gone(tmp_path, monkeypatch):
    save_step(tmp_path, 1)
    Interposed(
        monkeypatch,
        "open",
        lambda path: path.endswith(step_name(1)),
        lambda: shutil.rmtree(tmp_path / step_name(1)),
    )
    assert latest(tmp_path) is None


def test_a_listing_that_misses_both_names_is_not_believed(tmp_path, monkeypatch):
    save_step(tmp_path, 1)
    real = os.scandir
    calls = []

    class Nothing:
        def __enter__(self):
            return iter(())

        def __exit__(self, *error):
            return None

    def scandir(path):
        calls.append(path)
        return Nothing() if len(calls) == 1 else real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert latest(tmp_path).step == 1


def test_a_listing_that_is_out_of_date_for_good_ends(tmp_path, monkeypatch):
    save_step(tmp_path, 1)
    save_step(tmp_path, 2)
    real = os.open

    def stale(path, *args, **more):
        if os.fspath(path).endswith(step_name(2)):
            raise FileNotFoundError(2, "No such file or directory")
        return real(path, *args, **more)

    monkeypatch.setattr(os, "open", stale)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert latest(tmp_path).step == 1
    shutil.rmtree(tmp_path / step_name(1))
    with pytest.raises(StorageError, match="nothing is there"):
        latest(tmp_path)


@pytest.mark.parametrize("name", [MANIFEST, SEGMENT])
@pytest.mark.clause("DIR-1", "DIR-2")
def test_a_checkpoint_that_is_removed_while_it_is_opened_by_name(tmp_path, monkeypatch, name):
    save_step(tmp_path, 1)
    path = tmp_path / step_name(1)
    Interposed(
        monkeypatch,
        "open",
        lambda opened: opened == name,
        lambda: retire(path, b"\x07" * 16),
    )
    with pytest.raises(UncommittedError, match="removed or replaced after it had been opened"):
        open_checkpoint(path)


@pytest.mark.clause("DIR-1", "DIR-2")
def test_a_part_that_is_missing_is_not_called_removed(tmp_path, monkeypatch):
    save_step(tmp_path, 1)
    monkeypatch.chdir(tmp_path)
    for name in (SEGMENT, MANIFEST):
        os.unlink(tmp_path / step_name(1) / name)
        with pytest.raises(UncommittedError, match="missing") as caught:
            open_checkpoint(step_name(1))
        assert "removed" not in str(caught.value)


@pytest.mark.clause("SEC-3")
@pytest.mark.parametrize("name", [MANIFEST, SEGMENT])
def test_one_opening_never_sees_two_directories(tmp_path, monkeypatch, name):
    save_step(tmp_path, 1)
    save_step(tmp_path, 2)
    path, aside = tmp_path / step_name(1), tmp_path / "aside"

    def swap():
        path.rename(aside)
        (tmp_path / step_name(2)).rename(path)

    Interposed(monkeypatch, "open", lambda opened: opened == name, swap)
    with open_checkpoint(path) as checkpoint:
        assert (checkpoint.read_array("w") == 1).all()
        assert not checkpoint.is_in_place()
    monkeypatch.undo()
    with open_checkpoint(path) as checkpoint:
        assert (checkpoint.read_array("w") == 2).all()
        assert checkpoint.is_in_place()


@pytest.mark.clause("SEC-3")
def test_verification_never_sees_two_directories(tmp_path, monkeypatch):
    save_step(tmp_path, 1, segment_count=3)
    expected = save_step(tmp_path, 2, segment_count=3).checkpoint_id
    path = tmp_path / step_name(2)

    def swap():
        path.rename(tmp_path / "aside")
        (tmp_path / step_name(1)).rename(path)

    Interposed(monkeypatch, "open", lambda opened: opened == "seg-000001.fps", swap)
    report = verify_checkpoint(path)
    assert (report.problems, report.checkpoint_id) == ((), expected)


@pytest.mark.parametrize("kept_open", [256, 1])
def test_a_retired_checkpoint_stays_readable_when_it_is_open(tmp_path, monkeypatch, kept_open):
    monkeypatch.setattr(reader, "KEPT_OPEN", kept_open)
    save_step(tmp_path, 1, segment_count=2)
    path = tmp_path / step_name(1)
    with open_checkpoint(path) as checkpoint:
        path.rename(tmp_path / ".fps-trash-x")
        assert (checkpoint.read_array("w") == 1).all()
        shutil.rmtree(tmp_path / ".fps-trash-x")
        if kept_open == 256:
            assert (checkpoint.read_array("w") == 1).all()
        else:
            with pytest.raises(UncommittedError, match="removed or replaced"):
                checkpoint.read_array("w")


def test_a_closed_checkpoint_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "KEPT_OPEN", 0)
    save_step(tmp_path, 1)
    checkpoint = open_checkpoint(tmp_path / step_name(1))
    checkpoint.close()
    with pytest.raises(PlanError, match="is closed"):
        checkpoint.read("w")


def test_a_working_directory_that_was_removed(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(StorageError) as caught:
        open_checkpoint("c")
    assert (caught.value.where, caught.value.errno) == ("c", 2)
    with pytest.raises(StorageError, match="no working directory"):
        latest("runs")
    assert verify_checkpoint("c").problems[0].clause == "DIR-7"
    assert latest(tmp_path / "none") is None


@pytest.mark.clause("DIR-7")
@pytest.mark.parametrize("function", ["open", "fstat", "preadv", "scandir"])
def test_an_error_of_any_call_has_path_and_number(tmp_path, monkeypatch, function):
    save_step(tmp_path, 1)

    def fail(*args, **more):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(StorageError) as caught:
        latest(tmp_path) if function == "scandir" else open_checkpoint(tmp_path / step_name(1))
    monkeypatch.undo()
    assert caught.value.errno == 5
    assert str(tmp_path) in caught.value.where
    assert isinstance(caught.value.__cause__, OSError)
