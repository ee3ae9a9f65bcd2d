"""A latch: no interrupt breaks it, and no waiter is forgotten."""

import sys
import threading
import time

import pytest

from fpformat.publish.latch import Latch


def test_many_wait_for_one():
    latch, woken = Latch(), []
    threads = [
        threading.Thread(target=lambda: woken.append(latch.wait(60)), daemon=True) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    assert not latch.is_set()
    latch.set()
    for thread in threads:
        thread.join()
    assert woken == [True] * 8
    latch.set()
    assert latch.is_set()
    assert latch.wait()


@pytest.mark.parametrize("timeout", [0, 0.001, -1])
def test_who_waits_in_vain_leaves_nothing_behind(timeout):
    latch = Latch()
    assert latch.wait(timeout) is False
    assert latch._waiting == []
    latch.set()
    assert latch.wait(timeout) is True


def test_a_timeout_longer_than_any_lock_takes():
    latch = Latch()
    threading.Timer(0.01, latch.set).start()
    assert latch.wait(float("inf"))


class Interrupt(BaseException):
    pass


@pytest.mark.parametrize("function", [Latch.wait, Latch.set])
def test_an_interrupt_at_any_step_keeps_nobody_waiting(function):
    """Each step of the function is interrupted once; after that it still does what it shall."""
    lines = count_steps(function)
    assert lines > 3
    for at in range(lines):
        latch = Latch()
        waiting = threading.Thread(target=latch.wait, daemon=True)
        waiting.start()
        while not latch._waiting:
            time.sleep(0)
        with pytest.raises(Interrupt):
            traced(function, latch, at)
        latch.set()
        assert latch.wait(60)
        waiting.join(60)
        assert not waiting.is_alive()


def traced(function, latch, at):
    """Call `function` and raise at the given number of bytecode instructions in it."""
    seen = 0

    def trace(frame, event, argument):
        nonlocal seen
        if frame.f_code is not function.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if seen - 1 == at:
                raise Interrupt
        return trace

    if function is Latch.wait:
        threading.Timer(0.02, latch.set).start()
    sys.settrace(trace)
    try:
        function(latch)
    finally:
        sys.settrace(None)
    return seen


def count_steps(function):
    latch = Latch()
    return traced(function, latch, -1)
