"""What a save costs, in counts that do not depend on the machine: calls, memory, turns."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from engine_cases import MIB, config, make

from fpformat import BytesSource, TensorEntry, plan_checkpoint
from fpformat.dtypes import by_name
from fpformat_io import engine
from fpformat_io.config import EngineConfig
from fpformat_io.native import kernels

ROOT = Path(__file__).resolve().parents[2]
SHARED_MEMORY = Path("/dev/shm")


def big(nbytes):
    entry = TensorEntry(name="w", dtype=by_name("U8"), shape=(nbytes,))
    content = np.ones(nbytes, dtype="u1")
    return plan_checkpoint([entry]), {(entry.key, None): BytesSource(content)}


@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_the_number_of_writes(mode, tmp_path):
    """One for each buffer of data, and a few for the rest, the index and the footer."""
    plan, sources = make([40 * MIB, 1000, 1000, 1000])
    settings = EngineConfig(mode=mode, buffer_nbytes=4 * MIB)
    report = engine.write_checkpoint(tmp_path / "c", plan, sources, config=settings)
    size = 4 if report.mode == "direct" else 2
    assert report.calls <= 40 // size + 4


def test_small_tensors_share_writes(tmp_path):
    plan, sources = make([1000] * 2000)
    report = engine.write_checkpoint(tmp_path / "c", plan, sources, config=config("buffered"))
    assert report.calls <= 4


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs a file system in memory")
def test_the_interpreter_is_free_while_workers_write(monkeypatch):
    """A busy thread gets its turns in the middle of the one native call that writes 512 MiB."""
    kernels.warm_up()
    plan, sources = big(512 * MIB)
    real = kernels.run_transfers
    calls = []
    turns = []
    done = threading.Event()

    def run(*arguments):
        begin = time.perf_counter()
        real(*arguments)
        calls.append((begin, time.perf_counter()))

    def be_busy():
        while not done.is_set():
            turns.append(time.perf_counter())

    monkeypatch.setattr("fpformat_io.write.workers.run_transfers", run)
    path = SHARED_MEMORY / f"fpformat-{os.getpid()}"
    thread = threading.Thread(target=be_busy)
    thread.start()
    try:
        engine.write_checkpoint(path, plan, sources, config=EngineConfig(worker_count=1))
    finally:
        done.set()
        thread.join()
        shutil.rmtree(path, ignore_errors=True)
    begin, end = max(calls, key=lambda call: call[1] - call[0])
    quarter = (end - begin) / 4
    # A thread that holds the lock would leave no turn between its first and its last moment.
    assert sum(begin + quarter < turn < end - quarter for turn in turns) > 1000


MEMORY = """
import resource, sys
sys.path[:0] = ["tests", "."]
import numpy as np
from engine_cases import MIB, Pulled, make, config
from fpformat import BytesSource, TensorEntry, plan_checkpoint
from fpformat.dtypes import by_name
from fpformat_io.config import EngineConfig
from fpformat_io.engine import write_checkpoint
kind = sys.argv[2]
plan, sources = make([1000])
write_checkpoint(sys.argv[1] + "/first", plan, sources)
entry = TensorEntry(name="w", dtype=by_name("U8"), shape=(400 * MIB,))
content = np.ones(400 * MIB, dtype="u1")
source = Pulled(content) if kind == "pulled" else BytesSource(content)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_checkpoint(
    sys.argv[1] + "/second",
    plan_checkpoint([entry]),
    {(entry.key, None): source},
    config=EngineConfig(mode=sys.argv[3]),
)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("mode", ["auto", "buffered"])
@pytest.mark.parametrize("kind", ["memory", "pulled"])
def test_peak_memory_is_the_ring(kind, mode, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path), kind, mode],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stderr == ""
    # 64 MiB of ring, up to two huge pages at its ends, and what a source gives at a time.
    assert int(done.stdout) < (64 + 4 + 12) * 1024


def test_waiting_costs_no_turns_of_the_interpreter(tmp_path):
    """The calling thread sleeps while workers write: its processor time stays small."""
    plan, sources = big(64 * MIB)
    kernels.warm_up()
    begin = time.thread_time()
    engine.write_checkpoint(tmp_path / "c", plan, sources, config=EngineConfig(worker_count=2))
    assert time.thread_time() - begin < 0.5
