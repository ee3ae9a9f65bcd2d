"""Compiled kernels on disk, so that only the first save on a machine pays for compiling.

One file for each kernel, named after everything it depends on: kernel, argument types, processor,
versions, and the source of all kernels. It begins with the SHA-256 of the rest, because a damaged
piece of machine code would not raise but crash. Whatever is wrong with the cache, kernels are
compiled as if there were none, and the log says so once.
"""

import hashlib
import logging
import os
import pickle
import stat
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import numba
from numba.core import config, serialize
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult

_LOG: Final = logging.getLogger("fpformat_io")
_DIGEST_NBYTES: Final = 32
# Kernels take up to 200 kB.
_MAX_NBYTES: Final = 16 * 1024 * 1024
# Parts of numba without annotations.
_NUMBA: Final[Any] = config
_RESULT: Final[Any] = CompileResult
_SERIALIZE: Final[Any] = serialize
_SOURCES: Final = ("intrinsics.py", "crc_tables.py", "columns.py", "kernels.py")


def _candidates() -> list[Path]:
    """Return the directories to try: numba's own setting, beside the source, the user's cache."""
    if _NUMBA.CACHE_DIR:
        return [Path(_NUMBA.CACHE_DIR) / "fpformat"]
    home = os.path.expanduser("~/.cache")
    return [Path(__file__).parent / "__pycache__", Path(home) / "fpformat"]


@cache
def cache_directory() -> Path | None:
    """Return a directory that can be written; None, with a line in the log, when there is none."""
    for folder in _candidates():
        with suppress(OSError, RuntimeError):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
    warn_once("no directory for compiled kernels can be written")
    return None


@cache
def warn_once(reason: str) -> None:
    """Log that this process compiles again; each reason once."""
    _LOG.warning("%s; compiling takes a few seconds at every start", reason)


@cache
def _source_digest() -> bytes:
    digest = hashlib.sha256()
    for name in _SOURCES:
        with suppress(OSError):
            digest.update((Path(__file__).parent / name).read_bytes())
    return digest.digest()


def _read(path: Path) -> bytes:
    """Return what a file holds; whatever else stands there is neither waited for nor read.

    Raises:
        OSError: There is none, it is no regular file, or no kernel is that large.
    """
    # Without O_NONBLOCK, opening a pipe waits for somebody who writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("a kernel is no regular file")
        if status.st_size > _MAX_NBYTES:
            raise OSError(f"a kernel is larger than {_MAX_NBYTES} bytes")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(_MAX_NBYTES)
    finally:
        os.close(descriptor)


def _store(path: Path, stored: bytes) -> None:
    """Write a file that appears whole or not at all, with the permissions that the umask leaves."""
    new = path.with_name(f"{path.stem}-{os.urandom(8).hex()}.tmp")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(stored)
        os.replace(new, path)
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise


class KernelCache(NullCache):
    """Takes the place of a numba dispatcher's cache of one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def _path(self, signature: Any, codegen: Any) -> Path | None:
        folder = cache_directory()
        if folder is None:
            return None
        parts = (
            self._function.__qualname__,
            str(signature),
            repr(codegen.magic_tuple()),
            numba.__version__,
            sys.version,
        )
        name = hashlib.sha256("\n".join(parts).encode() + _source_digest()).hexdigest()[:32]
        return folder / f"kernel-{name}.bin"

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """Return the compiled kernel, or None when it is absent or not to be trusted."""
        try:
            target_context.refresh()
            path = self._path(signature, target_context.codegen())
            if path is None:
                return None
            stored = _read(path)
            digest, payload = stored[:_DIGEST_NBYTES], stored[_DIGEST_NBYTES:]
            if hashlib.sha256(payload).digest() != digest:
                warn_once(f"the compiled kernels in {path.parent} are damaged")
                return None
            return _RESULT._rebuild(target_context, *pickle.loads(payload))
        except FileNotFoundError:
            return None
        except Exception as error:  # noqa: BLE001  a cache must never fail a save
            warn_once(f"compiled kernels in {cache_directory()} cannot be used ({error!r})")
            return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Store a compiled kernel."""
        try:
            path = self._path(signature, compiled.codegen)
            if path is None:
                return
            payload = _SERIALIZE.dumps(compiled._reduce())
            _store(path, hashlib.sha256(payload).digest() + payload)
        except Exception as error:  # noqa: BLE001  a cache must never fail a save
            warn_once(f"compiled kernels cannot be stored in {cache_directory()} ({error!r})")
