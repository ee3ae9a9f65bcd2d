"""Saves without native workers: whatever is wrong with numba, a checkpoint is written all the same.

What breaks numba runs before the first save, in a fresh interpreter, because kernels are compiled
once in a process.
"""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from engine_cases import SAME, contents, make

from fpformat import PlanError, verify_checkpoint, write_checkpoint
from fpformat_io import engine
from fpformat_io.errors import WriteError
from fpformat_io.native import intrinsics, kernels
from fpformat_io.write import workers

ROOT = Path(__file__).resolve().parents[2]
SAVES = """
import logging, sys
sys.path[:0] = ["tests", "."]
logging.basicConfig(format="%(message)s", stream=sys.stdout)
from engine_cases import SAME, make
from fpformat_io import engine
plan, sources = make([5000, 70_000, 3], pulled={1})
for name in ("first", "second"):
    report = engine.write_checkpoint(sys.argv[1] + "/" + name, plan, sources, **SAME)
    SAME["save_id"] = bytes(16)
print(report.mode, "calls" if report.calls else "plain")
"""
# What a numba that nobody has tried might lack.
BROKEN = {
    "no numba": "import sys; sys.modules['numba'] = None",
    "no llvmlite": "import sys; sys.modules['llvmlite'] = None",
    "no cache class": "import numba.core.caching as m; del m.NullCache",
    "no serialize": "import numba.core as m, numba; del m.serialize\nimport sys\n"
    "sys.modules['numba.core.serialize'] = None",
    "no compile": "from numba.core.dispatcher import Dispatcher as D\ndel D.compile",
    "other compile": "from numba.core.dispatcher import Dispatcher as D\n"
    "D.compile = lambda self: None",
    "no disable": "from numba.core.dispatcher import _DispatcherBase as D\ndel D.disable_compile",
    "foreign error": "import numba\ndef njit(**options): raise OSError('no LLVM\\nat all')\n"
    "numba.njit = njit",
}
# What only the cache needs: kernels run, and are compiled at every start.
UNCACHED = {
    "no rebuild": "from numba.core.compiler import CompileResult as C\ndel C._rebuild",
    "no reduce": "from numba.core.compiler import CompileResult as C\ndel C._reduce",
    "no magic": "from numba.core.codegen import CPUCodegen as C\nC.magic_tuple = None",
}


def saves(folder, preamble, **more):
    """Save twice in a fresh interpreter; return the log and the last line."""
    (folder / "out").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", preamble + SAVES, str(folder / "out")],
        cwd=ROOT,
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (0, "")
    *log, last = done.stdout.splitlines()
    return log, last


@pytest.mark.parametrize("fault", BROKEN)
def test_the_plain_writer_takes_over_with_one_line(fault, tmp_path):
    log, last = saves(tmp_path, BROKEN[fault] + "\n", NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    assert len(log) == 1, log
    assert "no native workers" in log[0]
    assert last == "buffered plain"
    plan, sources = make([5000, 70_000, 3], pulled={1})
    write_checkpoint(tmp_path / "oracle", plan, sources, **SAME)
    assert contents(tmp_path / "out" / "first") == contents(tmp_path / "oracle")
    assert verify_checkpoint(tmp_path / "out" / "second").problems == ()


@pytest.mark.skipif(intrinsics.IS_INTERPRETED, reason="nothing is compiled")
@pytest.mark.parametrize("fault", UNCACHED)
def test_a_cache_that_does_not_work_costs_a_line_and_time(fault, tmp_path):
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    (tmp_path / "once").mkdir()
    saves(tmp_path / "once", "", **environment)
    if fault == "no reduce":
        for path in (tmp_path / "cache" / "fpformat").iterdir():
            path.unlink()
    log, last = saves(tmp_path, UNCACHED[fault] + "\n", **environment)
    assert last.endswith(" calls")
    assert len(set(log)) == len(log) <= 2, log
    assert all("compiled kernels" in line for line in log)
    assert log


def test_a_kernel_that_computes_something_else_is_found_out(monkeypatch):
    monkeypatch.setattr(kernels, "checksum", lambda source, nbytes: 1)
    with pytest.raises(RuntimeError, match="kernels compute"):
        kernels.warm_up()


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setattr(engine, "_native", lambda: None)


@pytest.mark.usefixtures("plain")
def test_the_report_says_how_it_was_written(tmp_path):
    plan, sources = make([5000])
    report = engine.write_checkpoint(tmp_path / "c", plan, sources, **SAME)
    assert (report.mode, report.calls, report.save_id) == ("buffered", 0, SAME["save_id"])
    assert "plain" in report.reason
    assert report.nbytes == sum(map(len, contents(tmp_path / "c").values()))


@pytest.mark.usefixtures("plain")
def test_errors_are_those_of_the_engine(tmp_path, monkeypatch):
    plan, sources = make([5000])
    engine.write_checkpoint(tmp_path / "c", plan, sources)
    with pytest.raises(PlanError, match="exists already"):
        engine.write_checkpoint(tmp_path / "c", plan, sources)

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError) as caught:
        engine.write_checkpoint(tmp_path / "d", plan, sources)
    assert caught.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("sizes", [[5000], [9_000_000]])
def test_a_worker_that_dies_fails_the_save(sizes, tmp_path, monkeypatch):
    """The exception of a thread goes to stderr only, and what it did not write would be zeros."""
    plan, sources = make(sizes)

    def die(*arguments):
        arguments[3][workers.STOP] = 1

    monkeypatch.setattr(workers, "run_transfers", die)
    with pytest.raises(WriteError, match="a worker died: 0 of"):
        engine.write_checkpoint(tmp_path / "c", plan, sources)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("allowed", [0, 1])
def test_threads_that_cannot_be_started(allowed, tmp_path, monkeypatch):
    real = workers._thread.start_new_thread
    begun = []

    def start(function, arguments):
        if len(begun) == allowed:
            raise RuntimeError("can't start new thread")
        begun.append(real(function, arguments))
        return begun[-1]

    monkeypatch.setattr(workers._thread, "start_new_thread", start)
    plan, sources = make([9_000_000])
    engine.write_checkpoint(tmp_path / "c", plan, sources)
    assert len(begun) == allowed
    assert verify_checkpoint(tmp_path / "c").problems == ()
    assert np.frombuffer(contents(tmp_path / "c")["seg-000000.fps"], "u1").size > 9_000_000
