"""The commit: its order, what an error at any call leaves, and what stands at the final name."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from format.samples import write_sample

from fpformat import (
    CommitOutcomeUnknownError,
    FpformatError,
    NotDurableError,
    PlanError,
    SaveError,
    open_checkpoint,
    verify_checkpoint,
)
from fpformat.publish import shield
from fpformat.publish.latch import Latch
from fpformat.publish.staging import Event, Staging, State, next_state

CALLS = ("mkdir", "open", "write", "fsync", "rename")


class Trace:
    """Record the system calls of a save that change or sync something, and fail one of them."""

    def __init__(self, monkeypatch, fail_at=None, error=errno.EIO):
        self.calls: list[tuple[str, str]] = []
        self._fail_at = fail_at
        self._error = error
        self._names: dict[int, str] = {}
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name, real):
        def call(*args, **options):
            first = args[0]
            target = self._names.get(first, "?") if isinstance(first, int) else os.fspath(first)
            target = os.path.basename(target)
            if name == "open" and not args[1] & os.O_CREAT:
                result = real(*args, **options)
                self._names[result] = target
                return result
            if name == "mkdir" and not target.startswith(".fps-"):
                return real(*args, **options)
            self.calls.append((name, target))
            if len(self.calls) - 1 == self._fail_at:
                raise OSError(self._error, os.strerror(self._error))
            result = real(*args, **options)
            if name == "open":
                self._names[result] = target
            return result

        return call


def save(tmp_path: Path, monkeypatch, **options) -> Trace:
    with monkeypatch.context() as patched:
        trace = Trace(patched, **options)
        write_sample(tmp_path / "c")
    return trace


@pytest.mark.clause("COM-4", "COM-5", "COM-6")
def test_the_order_of_a_save(tmp_path, monkeypatch):
    """Everything is synced before the rename, and the parent after it."""
    calls = [call for call in save(tmp_path, monkeypatch).calls if call[0] != "write"]
    staging = f".fps-{bytes(range(16)).hex()}"
    assert calls[-11:] == [
        ("mkdir", staging),
        ("open", "seg-000000.fps"),
        ("fsync", "seg-000000.fps"),
        ("open", "seg-000001.fps"),
        ("fsync", "seg-000001.fps"),
        ("fsync", staging),
        ("open", "manifest.json"),
        ("fsync", "manifest.json"),
        ("fsync", staging),
        ("rename", staging),
        ("fsync", tmp_path.name),
    ]


def test_an_error_at_any_call_leaves_nothing_or_the_whole(tmp_path, monkeypatch):
    (tmp_path / "count").mkdir()
    count = len(save(tmp_path / "count", monkeypatch).calls)
    for code in (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
        for at in range(count):
            folder = tmp_path / f"{code}-{at}"
            folder.mkdir()
            with pytest.raises((SaveError, PlanError)) as caught:
                save(folder, monkeypatch, fail_at=at, error=code)
            if isinstance(caught.value, SaveError):
                assert caught.value.errno == code
                assert caught.value.error_class == "io"
                assert str(folder) in str(caught.value)
            left = [path.name for path in folder.iterdir()]
            last_sync = at == count - 1
            assert left == (["c"] if last_sync else []), (code, at)
            if last_sync:
                assert verify_checkpoint(folder / "c").problems == ()


@pytest.mark.parametrize("nbytes", [1, 1000, 4095])
def test_short_writes_are_continued(tmp_path, monkeypatch, nbytes):
    real = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda fd, data: real(fd, memoryview(data)[:nbytes]))
        write_sample(tmp_path / "c")
    assert verify_checkpoint(tmp_path / "c").problems == ()


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_nothing_is_ever_overwritten(tmp_path, make):
    make(tmp_path / "c")
    with pytest.raises(PlanError, match="exists already"):
        write_sample(tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.clause("COM-7")
def test_a_name_taken_during_the_save_is_not_replaced(tmp_path, monkeypatch):
    real = os.rename

    def late(source, target):
        os.makedirs(os.path.join(target, "other"))
        return real(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", late)
        with pytest.raises(SaveError, match="publishing failed"):
            write_sample(tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"]
    assert os.listdir(tmp_path / "c") == ["other"]


@pytest.mark.clause("COM-7")
def test_a_rename_that_worked_although_it_failed(tmp_path, monkeypatch):
    """A network file system may answer a repeated request with an error."""
    real = os.rename

    def twice(source, target):
        real(source, target)
        raise OSError(errno.ENOENT, "lost answer")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", twice)
        write_sample(tmp_path / "c")
    assert verify_checkpoint(tmp_path / "c").problems == ()


@pytest.mark.clause("COM-7")
def test_an_outcome_that_cannot_be_known_removes_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "gone")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", fail)
        patched.setattr(Path, "read_bytes", fail)
        with pytest.raises(CommitOutcomeUnknownError):
            write_sample(tmp_path / "c")
    assert len(os.listdir(tmp_path / f".fps-{bytes(range(16)).hex()}")) == 3


@pytest.mark.parametrize("has_thread", [True, False])
@pytest.mark.parametrize("call", ["mkdir", "rename"])
def test_an_interrupt_behind_a_call_leaves_nothing_or_the_whole(
    tmp_path, monkeypatch, call, has_thread
):
    """It comes before anything could note that the call worked."""
    if not has_thread:  # as at the end of the interpreter
        monkeypatch.setattr(shield, "is_over", lambda: True)
    real = getattr(os, call)

    def interrupted(*args, **options):
        real(*args, **options)
        if has_thread:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)  # so that the main thread gets it
        else:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, call, interrupted)
        write_sample(tmp_path / "c")
    if call == "rename":
        assert verify_checkpoint(tmp_path / "c").problems == ()
        assert os.listdir(tmp_path) == ["c"]
    elif has_thread:
        assert os.listdir(tmp_path) == []


def test_a_save_that_is_told_to_stop_ends_at_the_next_call(tmp_path):
    stop = Latch()
    staging = Staging(tmp_path / "c", b"0123456789abcdef", stop=stop)
    staging.create_segment(0)
    stop.set()
    with pytest.raises(SaveError, match="told to stop"):
        staging.create_segment(1)
    staging.abandon()
    assert os.listdir(tmp_path) == []


def test_abandoning_twice_does_nothing(tmp_path):
    staging = Staging(tmp_path / "c", b"0123456789abcdef")
    staging.abandon()
    staging.abandon()
    assert not list(tmp_path.iterdir())


def test_the_table_of_states():
    assert next_state(State.OPEN, Event.SEAL) is State.SEALED
    assert next_state(State.SEALED, Event.PUBLISH) is State.COMMITTED
    for state, event in ((State.OPEN, Event.PUBLISH), (State.COMMITTED, Event.ABANDON)):
        with pytest.raises(AssertionError):
            next_state(state, event)


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from format.samples import write_sample
    at = int(sys.argv[2])
    def wrap(real):
        def call(*args, **options):
            global at
            at -= 1
            if at < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)
        return call
    for name in ("mkdir", "write", "fsync", "rename"):
        setattr(os, name, wrap(getattr(os, name)))
    write_sample(Path(sys.argv[1]) / "c")
"""


def test_a_kill_before_any_call_leaves_nothing_or_the_whole(tmp_path):
    """The final name shows a whole checkpoint or nothing, and the save can be repeated."""
    committed = []
    at = 0
    while not committed or not committed[-1]:
        folder = tmp_path / str(at)
        folder.mkdir()
        ended = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(KILLED), str(folder), str(at)],
            check=False,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
        committed.append((folder / "c").exists())
        if committed[-1]:
            assert verify_checkpoint(folder / "c").problems == ()
        else:
            assert ended.returncode == -signal.SIGKILL
            assert all(name.startswith(".fps-") for name in os.listdir(folder))
        at += 3
    assert len(committed) > 4
    with pytest.raises(FpformatError), open_checkpoint(tmp_path / "0" / "c"):
        pass


@pytest.mark.clause("COM-26")
@pytest.mark.parametrize("call", ["open", "fsync", "close"])
def test_a_name_that_cannot_be_made_durable_is_said_to_be_committed(tmp_path, monkeypatch, call):
    """After the rename nothing is removed, and the error says that the checkpoint stands."""
    real_rename, real = os.rename, getattr(os, call)

    def fail(*_args, **_options):
        raise OSError(errno.EIO, "after the rename")

    def rename(source, target):
        real_rename(source, target)
        monkeypatch.setattr(os, call, fail)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(NotDurableError, match="is committed"):
        write_sample(tmp_path / "c")
    monkeypatch.setattr(os, call, real)
    assert os.listdir(tmp_path) == ["c"]
    assert verify_checkpoint(tmp_path / "c").problems == ()


def test_a_name_that_is_too_long_is_refused_before_writing(tmp_path):
    with pytest.raises(SaveError, match="too long"):
        write_sample(tmp_path / ("x" * 256))
    assert not list(tmp_path.iterdir())


def test_a_path_with_a_nul_is_refused(tmp_path):
    with pytest.raises(PlanError, match="is no path"):
        write_sample(tmp_path / "a\0b")
    with pytest.raises(PlanError, match="is no path"):
        open_checkpoint(tmp_path / "a\0b")
