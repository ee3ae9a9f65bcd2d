"""Saves one at a time: threads, interrupts, forks, exit handlers; no error is dropped."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fpformat.errors import PlanError
from fpformat_io.control import SaveControl
from fpformat_io.errors import EngineError, StagingError, WriteError
from fpformat_io.session import saves as session_module
from fpformat_io.session.saves import SaveReport, SaveSession


def report(path="c") -> SaveReport:
    return SaveReport(
        path=Path(path),
        checkpoint_id="0",
        nbytes=1,
        data_nbytes=1,
        tensor_count=1,
        seconds=1.0,
        stall_seconds=0.0,
        mode="buffered",
        bandwidth_bytes_per_s=1.0,
    )


def start(session, work=report, *, path="c", after=lambda _: None, stop=lambda: None):
    with session.turn():
        return session.start(Path(path), work, after=after, stop=stop)


def fail():
    raise WriteError("no room")


def test_many_threads_take_turns_and_every_save_runs():
    session = SaveSession()
    running, most, done = [], [], []
    lock = threading.Lock()

    def work():
        with lock:
            running.append(1)
            most.append(len(running))
        time.sleep(0.001)  # gives another thread the chance to come between
        with lock:
            running.pop()
            done.append(1)
        return report()

    threads = [
        threading.Thread(target=lambda: [start(session, work) for _ in range(20)]) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with session.turn():
        assert len(done) == 160
    assert max(most) == 1


def test_no_error_is_dropped():
    """Each is raised once: by the handle, or by whoever comes next."""
    session = SaveSession()
    start(session, fail)
    with pytest.raises(WriteError, match="an earlier save failed: no room"):
        start(session)
    heard = start(session, fail)
    with pytest.raises(WriteError, match="no room"):
        heard.wait_durable(60)
    assert start(session).wait_durable(60) == report()


def test_a_handler_that_saves_while_the_thread_is_inside_a_save():
    """Both are made, one after the other, and nothing hangs."""
    session = SaveSession()
    order = []

    def inner(number, frame):
        start(session, lambda: (order.append("inner"), report())[1])

    before = signal.signal(signal.SIGUSR1, inner)
    try:
        with session.turn():
            signal.raise_signal(signal.SIGUSR1)
            work = lambda: (order.append("outer"), report())[1]  # noqa: E731
            session.start(Path("c"), work, after=lambda _: None, stop=lambda: None)
        session.settle()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert order == ["inner", "outer"]


def test_a_thread_that_cannot_be_started(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    session = SaveSession()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(StagingError, match="can't start new thread"):
            start(session)
    assert start(session).wait_durable(60) == report()


@pytest.mark.parametrize("is_started", [False, True])
def test_an_interrupt_at_the_start_of_the_thread(monkeypatch, is_started):
    """The session stays usable, whether the save began or not."""
    begin = threading.Thread.start
    done = []

    def interrupted(thread):
        if is_started:
            begin(thread)
            thread.join()
        raise KeyboardInterrupt

    session = SaveSession()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            start(session, lambda: (done.append(1), report())[1])
    assert done == ([1] if is_started else [])
    assert start(session).wait_durable(60) == report()


@pytest.mark.parametrize("waits", ["handle", "session"])
def test_a_second_interrupt_before_the_save_could_be_taken_back(monkeypatch, waits):
    """Whoever waits next makes the save."""
    handles = []

    def interrupted(*_):
        raise KeyboardInterrupt

    session = SaveSession()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(threading.Thread, "start", interrupted)
        patched.setattr(session_module._Job, "withdraw", interrupted)
        start(session, after=handles.append)
    if waits == "session":
        session.settle()
    else:
        assert start(session).wait_durable(60) == report()
    assert handles == [report()]


def test_a_handler_that_saves_before_the_thread_is_started(monkeypatch):
    session, begin, inner = SaveSession(), threading.Thread.start, []

    def handler_comes_first(thread):
        monkeypatch.setattr(threading.Thread, "start", begin)
        inner.append(start(session))
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", handler_comes_first)
    outer = start(session)
    assert outer.wait_durable(60) == inner[0].wait_durable(60) == report()


def test_a_save_whose_work_ends_in_an_interrupt_keeps_nobody_waiting(monkeypatch):
    """As at the end of the interpreter, where it runs in the thread of its caller."""
    monkeypatch.setattr(session_module, "is_over", lambda: True)
    session = SaveSession()

    def work():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(session, work)
    session.settle()
    assert start(session).wait_durable(0) == report()


def in_child(work) -> int:
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.alarm(60)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("is_running", [False, True])
def test_a_child_gets_an_idle_session(is_running):
    session = SaveSession()
    free = threading.Event()
    if not is_running:
        free.set()
    handle = start(session, lambda: (free.wait(60), report())[1])
    if not is_running:
        handle.wait_durable(60)
        session.settle()

    def child():
        session.settle()
        if is_running:
            with pytest.raises(EngineError, match="forked from"):
                handle.wait_durable()
        else:
            assert handle.wait_durable() == report()
        assert start(session).wait_durable(60) == report()

    try:
        assert in_child(child) == 0
    finally:
        free.set()
    assert handle.wait_durable(60) == report()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_fork_right_behind_the_call(monkeypatch, moment):
    """The child knows that the save is its parent's, wherever the parent's thread is just then."""
    session, begin, codes = SaveSession(), threading.Thread.start, []

    def child():
        with pytest.raises(EngineError, match="forked from"):
            session_job.handle.wait_durable(10)

    def forking(thread):
        nonlocal session_job
        session_job = session._job
        if moment == "before":
            codes.append(in_child(child))
        begin(thread)

    def late(*args):
        if moment == "after":
            codes.append(in_child(child))
        return run_save(*args)

    session_job, run_save = None, session_module._run
    monkeypatch.setattr(session_module, "_run", late)
    monkeypatch.setattr(threading.Thread, "start", forking)
    assert start(session).wait_durable(60) == report()
    assert codes == [0]


def test_a_fork_while_older_checkpoints_are_retired():
    """The save is durable by then: its report is worth the same in the child."""
    session, free, reached = SaveSession(), threading.Event(), threading.Event()
    handle = start(session, after=lambda _: (reached.set(), free.wait(60)))
    assert reached.wait(60)

    def child():
        assert handle.wait_durable(0) == report()

    try:
        assert in_child(child) == 0
    finally:
        free.set()


def test_a_fork_while_another_thread_waits_for_its_turn():
    session = SaveSession()
    free = threading.Event()
    start(session, lambda: (free.wait(60), report())[1])
    waiting = threading.Thread(target=start, args=[session])
    waiting.start()
    while session._lock.acquire(blocking=False):  # until the other thread has it
        session._lock.release()
    try:
        assert in_child(lambda: start(session).wait_durable(60)) == 0
    finally:
        free.set()
        waiting.join()


PRELUDE = """
import atexit, os, signal, sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from io_session import report, start
from fpformat_io.session.saves import SaveSession
session = SaveSession()
def work(done=Path(sys.argv[2]), report=report):
    done.touch()
    return report()
"""

AT_EXIT = "atexit.register(lambda: start(session, work))"
IN_DEL = """
class Owner:
    def __del__(self):
        start(session, work)
owner = Owner()
"""
IN_HOOK = """
sys.excepthook = lambda *_: start(session, work)
raise SystemError
"""
TWICE = """
free = threading.Event()
def slow():
    print("running", flush=True)
    free.wait()
    {end}
start(session, slow, stop=free.set)
"""


def run(tmp_path, body, *, interrupts=0):
    done = tmp_path / "done"
    (tmp_path / "io_session.py").write_text(Path(__file__).read_text().partition("PRELUDE")[0])
    script = PRELUDE + body
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), str(done)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(interrupts):
        assert process.stdout.readline() == "running\n"
        time.sleep(0.5)  # until it waits for its threads; earlier, it is an ordinary interrupt
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors, done.exists()


@pytest.mark.parametrize("body", [AT_EXIT, IN_DEL, IN_HOOK], ids=["atexit", "del", "excepthook"])
def test_a_save_at_the_end_of_the_interpreter_is_made(tmp_path, body):
    _, errors, is_saved = run(tmp_path, body)
    assert is_saved, errors


def test_a_save_of_an_exit_handler_that_fails_says_so(tmp_path):
    _, errors, _ = run(tmp_path, "atexit.register(lambda: start(session, lambda: 1 / 0))")
    assert "division by zero" in errors


@pytest.mark.parametrize("is_given_up", [True, False])
def test_an_interrupt_while_the_interpreter_waits_at_exit(tmp_path, is_given_up):
    """The save is told to stop, is waited for, and its loss is said."""
    end = "raise SystemError('stopped')" if is_given_up else "return work()"
    _, errors, is_saved = run(tmp_path, TWICE.format(end=end), interrupts=1)
    assert ("the save of c was given up" in errors) == is_given_up, errors
    assert is_saved != is_given_up


def test_nothing_is_left_of_sessions_that_are_gone():
    session = SaveSession()
    start(session).wait_durable(60)
    session.settle()
    assert not session_module._UNENDED
    assert session in session_module._SESSIONS


@pytest.mark.parametrize("timeout", ["", "1", True, float("nan"), -1, -0.5, [], 1j])
def test_a_timeout_that_makes_no_sense(timeout):
    handle = start(SaveSession())
    for wait in (handle.wait_durable, handle.wait_staged, SaveControl().wait_staged):
        with pytest.raises(PlanError, match="timeout"):
            wait(timeout)
    assert handle.wait_durable(2**70) == report()
