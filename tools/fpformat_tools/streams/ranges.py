"""Bytes of inputs by position: opened once, read with `pread`, never mapped into memory.

A `ByteRange` is a readable stretch of bytes; `StoredRange` lies in an open input, `InflatedRange`
in a deflated member of a zip archive, `HeldRange` in memory. Reads beyond the end are errors that
name the place, so that an input which shrinks while it is read is noticed.
"""

import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol

from fpformat_tools.errors import SourceError

STEP_NBYTES: Final = 4 * 1024 * 1024
_PIECE_NBYTES: Final = 1024 * 1024


class Input:
    """One regular input on disk, open for reading until `close`.

    Attributes:
        path: As the caller named it.
        nbytes: Its size when it was opened.
        descriptor: For reads by position.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(self.descriptor)
        except OSError as error:
            raise SourceError("io", str(path), error.strerror or str(error)) from error
        self.nbytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            os.close(self.descriptor)
            raise SourceError("invalid", str(path), "is not a regular file")

    def read_at(self, *, offset: int, nbytes: int) -> bytes:
        """Return exactly `nbytes` bytes from `offset`.

        Raises:
            SourceError: Class corrupt past the end; class io when reading fails.
        """
        if offset < 0 or offset + nbytes > self.nbytes:
            raise self._ends(offset, nbytes)
        parts: list[bytes] = []
        left = nbytes
        while left:
            try:
                part = os.pread(self.descriptor, left, offset + nbytes - left)
            except OSError as error:
                place = f"reading {nbytes:,} bytes at {offset:,}: {error.strerror}"
                raise SourceError("io", str(self.path), place) from error
            if not part:
                raise self._ends(offset, nbytes)
            parts.append(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _ends(self, offset: int, nbytes: int) -> SourceError:
        found = f"ends inside the {nbytes:,} bytes at {offset:,}"
        return SourceError("corrupt", str(self.path), f"truncated: {found}")

    def head(self, nbytes: int) -> bytes:
        """Return the first `nbytes` bytes, fewer where the input is shorter."""
        return self.read_at(offset=0, nbytes=min(nbytes, self.nbytes))

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> "Input":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class ByteRange(Protocol):
    """A stretch of bytes that can be read by position."""

    @property
    def nbytes(self) -> int:
        """The length in bytes."""
        ...

    def read_at(self, *, offset: int, nbytes: int) -> bytes:
        """Return exactly `nbytes` bytes from `offset` of the stretch."""
        ...


class StoredRange:
    """Bytes that lie as they are in an open input."""

    def __init__(self, source: Input, *, start: int, nbytes: int) -> None:
        self.source = source
        self.start = start
        self.nbytes = nbytes

    def read_at(self, *, offset: int, nbytes: int) -> bytes:
        """Return exactly `nbytes` bytes from `offset` of the range."""
        return self.source.read_at(offset=self.start + offset, nbytes=nbytes)


class HeldRange:
    """Bytes in memory."""

    def __init__(self, held: bytes) -> None:
        self._held = held
        self.nbytes = len(held)

    def read_at(self, *, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`."""
        return self._held[offset : offset + nbytes]


class InflatedRange:
    """A deflated stretch, inflated as it is read.

    Reading forward costs one pass; reading backward starts again from the beginning. Nothing but
    the current step is held, so the size that an archive claims costs no memory.
    """

    def __init__(self, stored: StoredRange, *, nbytes: int, where: str) -> None:
        self._stored = stored
        self.nbytes = nbytes
        self._where = where
        self._rewind()

    def _rewind(self) -> None:
        self._inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        self._taken = 0
        self._position = 0

    def _next(self, limit: int) -> bytes:
        while True:
            fed = self._inflater.unconsumed_tail
            if not fed:
                step = min(_PIECE_NBYTES, self._stored.nbytes - self._taken)
                fed = self._stored.read_at(offset=self._taken, nbytes=step)
                self._taken += step
            try:
                part = self._inflater.decompress(fed, limit)
            except zlib.error as error:
                raise SourceError("corrupt", self._where, f"does not inflate: {error}") from error
            if part:
                self._position += len(part)
                return part
            if self._inflater.eof or not fed:
                found = f"inflates to {self._position:,} bytes, expected {self.nbytes:,}"
                raise SourceError("corrupt", self._where, found)

    def read_at(self, *, offset: int, nbytes: int) -> bytes:
        """Return exactly `nbytes` bytes from `offset` of the inflated stretch."""
        if offset < self._position:
            self._rewind()
        while self._position < offset:
            self._next(min(offset - self._position, _PIECE_NBYTES))
        parts: list[bytes] = []
        left = nbytes
        while left:
            parts.append(self._next(min(left, _PIECE_NBYTES)))
            left -= len(parts[-1])
        return b"".join(parts)


def steps(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, nbytes) pairs that cover `nbytes` in bounded steps."""
    for offset in range(0, nbytes, STEP_NBYTES):
        yield offset, min(STEP_NBYTES, nbytes - offset)


def crc32_of(stretch: ByteRange) -> int:
    """Return the CRC-32 that zip archives use, over the whole stretch."""
    crc = 0
    for offset, nbytes in steps(stretch.nbytes):
        crc = zlib.crc32(stretch.read_at(offset=offset, nbytes=nbytes), crc)
    return crc
