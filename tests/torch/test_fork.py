"""A forked child saves and loads, whatever its parent did with torch's pool of threads.

Everything runs in fresh interpreters, since a pool that was begun stays. An alarm ends a child that
waits for threads that no longer exist.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = """
from fpformat_io.torch import Checkpointer, load, load_into, save
"""
# Large enough that torch divides every copy among its threads.
PARENT = """
import os, signal, sys, threading
import numpy as np
import torch
root = sys.argv[1]
torch.set_num_threads(4)
def large(): return torch.arange(6_000_000, dtype=torch.int32).reshape(3000, 2000)
state = {
    "turned": large().t(),
    "strided": large()[:, ::2],
    "rows": large()[::2],
    "dense": large(),
    "inner": large().reshape(300, 200, 100).permute(1, 0, 2),
    "conj": torch.complex(large().float(), large().float()).conj(),
}
expected = {name: value.resolve_conj().numpy().copy() for name, value in state.items()}
def check(found):
    # The comparison must not wait for the pool either.
    torch.set_num_threads(1)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert np.array_equal(found[name].resolve_conj().numpy(), value), name
"""
POOL = "(large() + large()).sum()\n"
FORK = """
sys.stdout.flush()
child = os.fork()
if child:
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"the child ended with {status}"
else:
    signal.alarm(40)
    try:
"""
END = """
    except BaseException as error:
        print("in the child:", repr(error), file=sys.stderr)
        os._exit(1)
    os._exit(0)
"""
SAVE = "save(state, root + '/child')"
RUN = """
with Checkpointer(root + "/run") as checkpointer:
    path = checkpointer.save(1, state).wait_durable().path
    checkpointer.save(2, state)
"""
THREAD = """
failures = []
def run():
    try:
        save(state, root + "/child")
    except BaseException as error:
        failures.append(error)
thread = threading.Thread(target=run)
thread.start()
thread.join()
assert not failures, failures
"""
LOAD = """
check(load(root + "/parent"))
"""
# Memory that torch makes is then filled, by the pool.
DETERMINISTIC = "torch.use_deterministic_algorithms(True)" + LOAD
LOAD_INTO = """
template = {
    "turned": torch.empty(3000, 2000, dtype=torch.int32).t(),
    "strided": torch.empty(3000, 2000, dtype=torch.int32)[:, ::2],
    "rows": torch.empty(3000, 2000, dtype=torch.int32)[::2],
    "dense": torch.empty(3000, 2000, dtype=torch.int32),
    "inner": torch.empty(300, 200, 100, dtype=torch.int32).permute(1, 0, 2),
    "conj": torch.empty(3000, 2000, dtype=torch.complex64).conj(),
}
load_into(root + "/parent", template)
check(template)
"""
COUNTS = """
from fpformat_io.torch.forked import without_pool
found = []
@without_pool
def note(error=None):
    found.append(torch.get_num_threads())
    if error:
        raise error
def run():
    note()
    try:
        note(KeyError())
    except KeyError:
        found.append(torch.get_num_threads())
run()
thread = threading.Thread(target=run)
thread.start()
thread.join()
assert found == [1, 1, 4, 1, 1, 4], found
"""


def run_forked(in_child, folder, *, before=IMPORTS + POOL, after=""):
    """Run a child with the parent's `state`; fails when the child fails or hangs."""
    lines = "".join(f"        {line}\n" for line in in_child.strip().splitlines())
    code = PARENT + before + FORK + lines + END + after
    done = subprocess.run(
        # Newer Pythons warn of every fork of a process with threads.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (0, "")


CHECK = "check(load(root + '/child'))"


@pytest.mark.parametrize("saves", [SAVE, THREAD], ids=["caller", "thread"])
def test_a_child_saves(saves, tmp_path):
    run_forked(saves, tmp_path, after=CHECK)


def test_a_child_that_alone_imports_the_package_saves(tmp_path):
    run_forked(IMPORTS + SAVE, tmp_path, before=POOL, after=IMPORTS + CHECK)


def test_a_child_of_a_child_saves(tmp_path):
    between = "if child := os.fork(): sys.exit(os.waitpid(child, 0)[1] != 0)\n"
    run_forked(SAVE, tmp_path, before=IMPORTS + POOL + between, after=CHECK + "; os._exit(0)")


def test_a_child_saves_in_the_background(tmp_path):
    after = "for step in (1, 2): check(load(f'{root}/run/step-{step:010d}'))"
    run_forked(RUN, tmp_path, after=after)


@pytest.mark.parametrize(
    "loads", [LOAD, DETERMINISTIC, LOAD_INTO], ids=["load", "deterministic", "load_into"]
)
def test_a_child_loads(loads, tmp_path):
    before = IMPORTS + POOL + "save(state, root + '/parent')\n"
    run_forked(loads, tmp_path, before=before)


def test_only_while_it_copies_has_a_child_one_thread(tmp_path):
    run_forked(COUNTS, tmp_path)


def test_nothing_changes_in_a_process_that_was_not_forked(tmp_path):
    code = "assert not is_forked()\n" + COUNTS.replace("[1, 1, 4, 1, 1, 4]", "[4] * 6")
    forked = "from fpformat_io.torch.forked import is_forked\n"
    done = subprocess.run(
        [sys.executable, "-c", PARENT + forked + code, str(tmp_path)], cwd=ROOT, timeout=100
    )
    assert done.returncode == 0
