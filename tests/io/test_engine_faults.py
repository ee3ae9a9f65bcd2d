"""Errors of the volume: the right bytes, or one clear error and nothing left behind."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_cases import MIB, SAME, config, contents, make
from engine_faults import ERRORS, build_injector, failing, real_pwrite, replace_pwrite

from fpformat import verify_checkpoint, write_checkpoint
from fpformat_io import engine
from fpformat_io.errors import WriteError
from fpformat_io.write import pipeline, volume
from fpformat_io.write import segment as segment_writer

ROOT = Path(__file__).resolve().parents[2]
MODES = ("direct", "buffered")


@pytest.fixture
def state():
    return make([2 * MIB + 5, 100, 3 * MIB, 5000, 2 * MIB], pulled={4}, aligned={2})


def expected(folder, state):
    write_checkpoint(folder / "plain", *state, **SAME)
    return contents(folder / "plain")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("code", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("at", [0, 1, 3, 5])
def test_an_error_at_one_write(mode, code, at, state, tmp_path, monkeypatch):
    calls = []

    def pwrite(descriptor, address, nbytes, offset):
        calls.append((offset, nbytes))
        return (
            failing(code)
            if len(calls) == at + 1
            else real_pwrite(descriptor, address, nbytes, offset)
        )

    replace_pwrite(monkeypatch, pwrite)
    with pytest.raises(WriteError, match=os.strerror(code)) as caught:
        engine.write_checkpoint(tmp_path / "c", *state, config=config(mode))
    error = caught.value
    assert error.errno == code
    assert (error.offset, error.nbytes) == calls[at]
    assert error.path.endswith("seg-000000.fps")
    assert isinstance(error.__cause__, OSError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("most", [1, 4096, 5000])
def test_short_writes_are_continued(mode, most, tmp_path, monkeypatch):
    state = make([9000, 100]) if most == 1 else make([2 * MIB + 5, 100, 70_000], pulled={2})

    def pwrite(descriptor, address, nbytes, offset):
        return real_pwrite(descriptor, address, min(nbytes, most), offset)

    replace_pwrite(monkeypatch, pwrite)
    report = engine.write_checkpoint(tmp_path / "fast", *state, **SAME, config=config(mode))
    monkeypatch.undo()
    assert contents(tmp_path / "fast") == expected(tmp_path, state)
    if report.mode == "direct":
        assert most == 4096


@pytest.mark.parametrize("mode", MODES)
def test_a_write_that_writes_nothing(mode, state, tmp_path, monkeypatch):
    replace_pwrite(monkeypatch, lambda *call: 0)
    with pytest.raises(WriteError) as caught:
        engine.write_checkpoint(tmp_path / "c", *state, config=config(mode))
    assert caught.value.errno == errno.EIO
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", MODES)
def test_interrupted_writes_are_repeated(mode, state, tmp_path, monkeypatch):
    calls = []

    def pwrite(*call):
        calls.append(call)
        return failing(errno.EINTR) if len(calls) % 2 else real_pwrite(*call)

    replace_pwrite(monkeypatch, pwrite)
    report = engine.write_checkpoint(tmp_path / "fast", *state, **SAME, config=config(mode))
    assert report.calls == len(calls)
    assert contents(tmp_path / "fast") == expected(tmp_path, state)


@pytest.mark.parametrize("at", [0, 2, 5])
def test_direct_writes_that_are_refused_go_through_the_cache(at, state, tmp_path, monkeypatch):
    calls = []

    def pwrite(descriptor, address, nbytes, offset):
        is_direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        calls.append(is_direct)
        if is_direct and len(calls) > at:
            return failing(errno.EINVAL)
        return real_pwrite(descriptor, address, nbytes, offset)

    replace_pwrite(monkeypatch, pwrite)
    report = engine.write_checkpoint(tmp_path / "fast", *state, **SAME, config=config())
    if calls[0]:
        assert report.mode == "buffered"
        assert "refused a direct write" in report.reason
    assert contents(tmp_path / "fast") == expected(tmp_path, state)


def test_direct_io_that_is_refused_when_asked_for(state, tmp_path, monkeypatch):
    real = fcntl.fcntl

    def refuse(descriptor, command, argument=0):
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, command, argument)

    monkeypatch.setattr(volume.fcntl, "fcntl", refuse)
    report = engine.write_checkpoint(tmp_path / "fast", *state, **SAME, config=config())
    assert report.mode == "buffered"
    assert "refuses O_DIRECT" in report.reason
    assert contents(tmp_path / "fast") == expected(tmp_path, state)


def test_no_room_shows_before_the_first_write(state, tmp_path, monkeypatch):
    def full(descriptor, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(segment_writer, "preallocate", full)
    stated = volume.Volume(mode="direct", memory_align=512, offset_align=512, reason="told")
    monkeypatch.setattr(pipeline, "decide", lambda *args, **more: stated)
    with pytest.raises(WriteError, match="allocating") as caught:
        engine.write_checkpoint(tmp_path / "c", *state, config=config())
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_a_failed_sync(state, tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(WriteError, match="syncing") as caught:
        engine.write_checkpoint(tmp_path / "c", *state, config=config())
    assert caught.value.errno == errno.EIO
    assert list(tmp_path.iterdir()) == []


SAVE = """
import sys
sys.path[:0] = ["tests", "."]
from engine_cases import SAME, make, config
from fpformat_io.engine import write_checkpoint
from fpformat_io.errors import WriteError
plan, sources = make([9000, 100] if sys.argv[2] == "small" else [2 << 20, 100, 70_000])
try:
    report = write_checkpoint(sys.argv[1] + "/c", plan, sources, **SAME, config=config())
except WriteError as error:
    print(error.errno)
else:
    print(report.mode)
"""
FAULTS = [
    ({}, "same"),
    ({"FAULT_DIRECT": 1}, "buffered"),
    ({"FAULT_ERRNO": errno.EINVAL, "FAULT_AT": 0}, "same or buffered"),
    ({"FAULT_SHORT": 4096}, "same"),
    ({"FAULT_SHORT": 5000}, "same"),
    ({"FAULT_SHORT": 1}, "buffered"),
    ({"FAULT_EINTR": 1}, "same"),
    ({"FAULT_ERRNO": errno.EIO, "FAULT_AT": 1}, str(errno.EIO)),
    ({"FAULT_ERRNO": errno.ENOSPC, "FAULT_AT": 0}, str(errno.ENOSPC)),
]


@pytest.fixture(scope="module")
def injector(tmp_path_factory):
    return build_injector(tmp_path_factory.mktemp("injector"))


@pytest.mark.parametrize(("faults", "outcome"), FAULTS, ids=lambda value: str(value))
def test_faults_below_the_c_library(faults, outcome, injector, tmp_path):
    size = "small" if faults.get("FAULT_SHORT") == 1 else "large"
    environment = {**os.environ, **{name: str(value) for name, value in faults.items()}}
    done = subprocess.run(
        [sys.executable, "-c", SAVE, str(tmp_path), size],
        cwd=ROOT,
        env={**environment, "LD_PRELOAD": str(injector)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stderr == ""
    if outcome.isdigit():
        assert done.stdout.split() == [outcome]
        assert list(tmp_path.iterdir()) == []
        return
    if outcome == "buffered":
        assert done.stdout.split() == ["buffered"]
    assert verify_checkpoint(tmp_path / "c").problems == ()
    state = make([9000, 100] if size == "small" else [2 << 20, 100, 70_000])
    assert contents(tmp_path / "c") == expected(tmp_path, state)
