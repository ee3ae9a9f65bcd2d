"""What conversions and saves that died left in a directory.

Staging directories of checkpoints are known to `fpformat.publish.leftovers`; here are the temporary
names of the converter's other outputs. Who writes one holds a lock on it, so what can be locked is
dead.
"""

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fpformat.publish import leftovers

_TEMPORARY: Final = re.compile(r"\.fpconvert-[0-9a-f]{16}\.tmp")
_PART: Final = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?")
_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """Something with a temporary name.

    Attributes:
        path: Where it is.
        nbytes: Size of what is in it.
        is_dead: Whether its writer is known to be gone.
    """

    path: Path
    nbytes: int
    is_dead: bool


def temporary_name() -> str:
    """Return a new name for an output that is being written."""
    return f".fpconvert-{os.urandom(8).hex()}.tmp"


def find(folder: Path, *, min_age_s: float = leftovers.STALE_AGE_S) -> list[Leftover]:
    """Return everything in a directory that has a temporary name.

    Raises:
        OSError: It cannot be listed.
    """
    dead = {*leftovers.dead(folder, min_age_s=min_age_s)}
    found = []
    for path in (*leftovers.leftovers(folder), *_temporaries(folder)):
        with suppress(FileNotFoundError):
            is_dead = path in dead or _is_dead_temporary(path, min_age_s)
            found.append(Leftover(path=path, nbytes=_nbytes(path), is_dead=is_dead))
    return found


def collect(
    folder: Path, *, warn: Callable[[str], None], min_age_s: float = leftovers.STALE_AGE_S
) -> tuple[Path, ...]:
    """Remove what dead writers left in a directory.

    Args:
        folder: The directory.
        warn: Takes one line for each thing that cannot be removed; it is left.
        min_age_s: For how long nothing may have changed, at least.

    Returns:
        What is gone.

    Raises:
        OSError: The directory cannot be listed.
    """
    gone = [*leftovers.collect(folder, warn=warn, min_age_s=min_age_s)]
    for path in _temporaries(folder):
        try:
            with _claimed(path, min_age_s) as is_dead:
                if is_dead:
                    _remove(path)
                    gone.append(path)
        except FileNotFoundError:
            continue  # somebody else was faster
        except OSError as error:
            warn(f"{path}: cannot be removed: {error.strerror}")
    return tuple(gone)


def _temporaries(folder: Path) -> list[Path]:
    return [folder / name for name in sorted(os.listdir(folder)) if _TEMPORARY.fullmatch(name)]


@contextmanager
def _claimed(path: Path, min_age_s: float) -> Iterator[bool]:
    """Lock an output; yield whether it is one whose writer is dead."""
    with leftovers.claimed(path, _FLAGS, min_age_s=min_age_s) as descriptor:
        mode = 0 if descriptor is None else os.fstat(descriptor).st_mode
        yield stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _is_dead_temporary(path: Path, min_age_s: float) -> bool:
    if not _TEMPORARY.fullmatch(path.name):
        return False
    with suppress(OSError), _claimed(path, min_age_s) as is_dead:
        return is_dead
    return False


def _remove(path: Path) -> None:
    """Remove an output; of a directory only what the converter writes into one."""
    if not path.is_dir():
        path.unlink()
        return
    for name in os.listdir(path):
        if _PART.fullmatch(name):
            (path / name).unlink()
    path.rmdir()


def _nbytes(path: Path) -> int:
    if not path.is_dir():
        return path.lstat().st_size
    return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(path))
