"""Work of torch in a process that was forked.

torch spreads a copy over a pool of threads. A fork takes the pool's records along but none of its
threads, and the child's first large copy would wait for them for ever. Whether the parent used its
pool cannot be asked, so a forked process always copies in the thread that asks for it.
"""

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_FORKED_WITHOUT_EXEC: Final = 0x40
_FLAGS: Final = 6


def _is_marked_as_forked() -> bool:
    """Return whether the kernel says that this process runs no program of its own.

    ``proc_pid_stat(5)`` names the field ``flags``; the bit is PF_FORKNOEXEC of Linux. Where there
    is no such file, only a fork after the import of this module is noticed.
    """
    try:
        stated = Path("/proc/self/stat").read_bytes()
        # The name of the program, in brackets, may hold anything.
        return bool(int(stated.rpartition(b")")[2].split()[_FLAGS]) & _FORKED_WITHOUT_EXEC)
    except (OSError, ValueError, IndexError):
        return False


_IMPORTED_BY: Final = os.getpid()
# The parent may have used torch before, and only the child imports this.
_IMPORTED_AFTER_A_FORK: Final = _is_marked_as_forked()


def is_forked() -> bool:
    """Return whether this process was forked and runs no other program since."""
    return _IMPORTED_AFTER_A_FORK or os.getpid() != _IMPORTED_BY


def without_pool(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function run without torch's pool in a forked process; elsewhere nothing changes.

    The number of threads is a setting of each thread, which a new one takes over from the last
    that was set, so a thread that begins meanwhile may keep the 1.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not is_forked():
            return function(*args, **kwargs)
        count = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_num_threads(count)

    return run
