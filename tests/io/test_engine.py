"""The engine writes the same bytes as the plain writer, whatever the plan and the way to disk."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from engine_cases import MIB, SAME, Pulled, cases, config, contents, make
from hypothesis import given, settings

from fpformat import BytesSource, PlanError, verify_checkpoint, write_checkpoint
from fpformat_io import engine
from fpformat_io.config import EngineConfig
from fpformat_io.control import SaveControl
from fpformat_io.errors import StagingError
from fpformat_io.native import intrinsics
from fpformat_io.write import volume

MODES = ("direct", "buffered")


def both(folder, plan, sources, mode, **changes):
    """Write with the oracle and the engine; return both directories' files and the report."""
    write_checkpoint(folder / "plain", plan, sources, **SAME)
    report = engine.write_checkpoint(
        folder / "fast", plan, sources, **SAME, config=config(mode, **changes)
    )
    return contents(folder / "plain"), contents(folder / "fast"), report


@given(cases())
@settings(max_examples=40)
@pytest.mark.parametrize("mode", MODES)
def test_segments_are_those_of_the_plain_writer(mode, case):
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        plain, fast, _ = both(Path(folder), *case, mode)
        assert plain == fast


@pytest.mark.parametrize("mode", MODES)
def test_a_mixed_plan(mode, tmp_path):
    sizes = [1, 5000, 64] if intrinsics.IS_INTERPRETED else [1, 5000, 64, 9 * MIB + 1, 3 * MIB, 77]
    plan, sources = make(sizes, pulled={1}, aligned={3, 4})
    plain, fast, report = both(tmp_path, plan, sources, mode)
    assert plain == fast
    assert verify_checkpoint(tmp_path / "fast").problems == ()
    assert report.mode in MODES
    assert report.nbytes == sum(map(len, fast.values()))
    assert report.data_nbytes == sum(sizes) + 300


def test_nothing_to_write(tmp_path):
    plain, fast, _ = both(tmp_path, *make([], objects=False), "auto")
    assert plain == fast


def test_the_way_to_the_disk_is_reported_and_logged(tmp_path, caplog):
    plan, sources = make([10])
    with caplog.at_level("INFO", "fpformat_io"):
        _, _, report = both(tmp_path, plan, sources, "buffered")
    assert (report.mode, report.reason) == ("buffered", "as configured")
    assert [line for line in caplog.messages if "buffered (as configured)" in line]


def test_a_source_that_gives_too_little(tmp_path):
    plan, sources = make([5000, 5000], pulled={0})
    short = {key: Pulled(np.zeros(10, "u1")) for key in sources}
    lost = {key: BytesSource(bytes(10)) for key in sources}
    for wrong in (short, lost):
        with pytest.raises(PlanError, match="gave 10 of 5000"):
            engine.write_checkpoint(tmp_path / "c", plan, wrong, config=config())
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_raises(tmp_path):
    class Broken:
        def read(self, *, offset, nbytes):
            raise ZeroDivisionError

    plan, sources = make([5000])
    with pytest.raises(ZeroDivisionError):
        engine.write_checkpoint(
            tmp_path / "c", plan, dict.fromkeys(sources, Broken()), config=config()
        )
    assert list(tmp_path.iterdir()) == []


def test_an_existing_checkpoint_stays(tmp_path):
    plan, sources = make([10])
    engine.write_checkpoint(tmp_path / "c", plan, sources, **SAME)
    before = contents(tmp_path / "c")
    with pytest.raises(PlanError, match="exists already"):
        engine.write_checkpoint(tmp_path / "c", plan, sources)
    assert contents(tmp_path / "c") == before


def test_memory_that_cannot_be_mapped(tmp_path):
    plan, sources = make([10])
    with pytest.raises(StagingError, match="staging memory"):
        engine.write_checkpoint(
            tmp_path / "c", plan, sources, config=EngineConfig(staging_nbytes=1 << 60)
        )
    assert list(tmp_path.iterdir()) == []


def test_several_threads_save_at_once(tmp_path):
    plan, sources = make([3 * MIB + 1] * 3, pulled={1})
    write_checkpoint(tmp_path / "plain", plan, sources, **SAME)
    failures = []

    def save(place):
        try:
            own_plan, own = make([3 * MIB + 1] * 3, pulled={1})
            identity = {**SAME, "save_id": bytes([place]) * 16}
            path = tmp_path / str(place)
            engine.write_checkpoint(path, own_plan, own, **identity, config=config())
            assert verify_checkpoint(path).problems == ()
        except BaseException as error:  # noqa: BLE001  shown by the main thread
            failures.append(error)

    threads = [threading.Thread(target=save, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


FORK = """
import os, sys, threading
sys.path[:0] = ["tests", "."]
from engine_cases import make, config
from fpformat import verify_checkpoint
from fpformat_io.engine import write_checkpoint
root = sys.argv[1]
plan, sources = make([5 << 20, 3, 5 << 20], pulled={2})
write_checkpoint(root + "/parent", plan, sources, config=config())
assert threading.active_count() == 1
child = os.fork()
if child == 0:
    assert len(os.listdir("/proc/self/task")) == 1
    write_checkpoint(root + "/child", plan, sources, config=config())
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
for name in ("parent", "child"):
    assert not verify_checkpoint(root + "/" + name).problems
"""


def test_after_a_fork_the_child_saves(tmp_path):
    command = [sys.executable, "-c", FORK, str(tmp_path)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_stops_the_save_and_leaves_nothing(tmp_path, monkeypatch):
    """The signal arrives while workers write; none of them may outlive the file."""
    plan, sources = make([4 * MIB] * 8)
    from engine_faults import real_pwrite, replace_pwrite

    calls = []
    control = SaveControl()
    told = threading.Event()
    monkeypatch.setattr(control, "cancel", lambda: (SaveControl.cancel(control), told.set()))

    def slow(descriptor, address, nbytes, offset):
        calls.append(offset)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            assert told.wait(60)
        return real_pwrite(descriptor, address, nbytes, offset)

    replace_pwrite(monkeypatch, slow)
    with pytest.raises(KeyboardInterrupt):
        engine.write_checkpoint(
            tmp_path / "c", plan, sources, config=config("buffered"), control=control
        )
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/task")) >= 1


def test_what_the_volume_states_decides(tmp_path, monkeypatch):
    def mode_of(stated, align=4096):
        monkeypatch.setattr(volume, "stated_alignment", lambda descriptor: stated)
        descriptor = os.open(tmp_path / "f", os.O_CREAT | os.O_WRONLY)
        try:
            return volume.decide(descriptor, mode="auto", align=align)
        finally:
            os.close(descriptor)

    assert mode_of((0, 0)).mode == "buffered"
    assert mode_of((512, 8192)).mode == "buffered"
    assert mode_of((512, 8192), align=8192).offset_align == 8192
    assert mode_of((4, 512)).memory_align == 4
    assert mode_of(None).memory_align == 4096


def teardown_module():
    shutil.rmtree(Path(__file__).parent / "build", ignore_errors=True)
