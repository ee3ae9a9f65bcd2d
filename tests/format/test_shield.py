"""Work that no signal tears apart."""

import os
import signal
import threading

import pytest

from fpformat.publish import shield
from fpformat.publish.shield import run_whole


def test_the_result_and_the_error_of_the_work():
    assert run_whole(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        run_whole(lambda: 1 // 0)


def test_many_interrupts_do_not_reach_the_work():
    """Each is raised in the waiting thread, and the work runs to its end all the same."""
    seen = threading.Semaphore(0)
    done = []

    def work():
        for _ in range(5):
            os.kill(os.getpid(), signal.SIGINT)
            assert seen.acquire(timeout=60)
        done.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_whole(work, stop=seen.release)
    assert done == [True]


def test_what_a_handler_raises_carries_the_error_of_the_work():
    seen = threading.Event()

    def work():
        os.kill(os.getpid(), signal.SIGINT)
        assert seen.wait(60)
        raise ValueError("stopped")

    with pytest.raises(KeyboardInterrupt) as caught:
        run_whole(work, stop=seen.set)
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_interrupt_at_the_start_of_the_thread(monkeypatch):
    """Whether it is there or not, the work is done once."""
    start = threading.Thread.start
    done = []

    def interrupted_before(thread):
        monkeypatch.setattr(threading.Thread, "start", interrupted_after)
        raise KeyboardInterrupt

    def interrupted_after(thread):
        monkeypatch.setattr(threading.Thread, "start", start)
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted_before)
    with pytest.raises(KeyboardInterrupt):
        run_whole(lambda: done.append(True))
    assert done == [True]


def test_without_another_thread(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert run_whole(threading.current_thread) is threading.main_thread()


def test_other_threads_and_the_end_of_the_interpreter_need_no_shield(monkeypatch):
    found = []
    thread = threading.Thread(target=lambda: found.append(run_whole(threading.current_thread)))
    thread.start()
    thread.join()
    assert found == [thread]
    monkeypatch.setattr(shield, "is_over", lambda: True)
    assert run_whole(threading.current_thread) is threading.main_thread()
