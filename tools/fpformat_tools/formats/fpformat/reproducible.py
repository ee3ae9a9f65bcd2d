"""Same source, same bytes: the time and the save id of a checkpoint that shall be made again.

Two things in a checkpoint change from save to save: its time and its save id. The time can be given
by ``SOURCE_DATE_EPOCH`` (https://reproducible-builds.org/specs/source-date-epoch/). The save id can
be taken from everything else that the files will hold, so that equal ids mean equal files and parts
of two such saves may be confused without harm. Its price is a second look at the source, and that
the staging directory, which is called after the save id, is the same for every such conversion.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from fpformat.limits import MAX_INT, SAVE_ID_NBYTES
from fpformat.records.model import SavePlan, ShardKey, ShardSource
from fpformat_tools.errors import SourceError, TargetError, UsageError
from fpformat_tools.streams.progress import Progress
from fpformat_tools.streams.ranges import steps
from fpformat_tools.text import shown

VARIABLE: Final = "SOURCE_DATE_EPOCH"
_MARK: Final = b"fpconvert --reproducible 1\n"


def source_date_us() -> int | None:
    """Return the time that the environment asks for, in microseconds; None where it does not.

    Raises:
        UsageError: It is not a number of seconds that a manifest can hold.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    # A manifest holds no integer above 2^53 - 1.
    if not re.fullmatch(r"[0-9]{1,16}", text) or int(text) > MAX_INT // 10**6:
        raise UsageError(f"{VARIABLE} is {shown(text)}, expected a number of seconds since 1970")
    return int(text) * 10**6


class SteadySource:
    """A source that is read twice, front to back, and has to give the same bytes both times."""

    def __init__(self, source: ShardSource, *, nbytes: int, where: str) -> None:
        self._source = source
        self._nbytes = nbytes
        self._where = where
        self._first = b""
        self._again = hashlib.sha256()

    def digest(self, progress: Progress) -> bytes:
        """Read everything and return its SHA-256."""
        digest = hashlib.sha256()
        for offset, nbytes in steps(self._nbytes):
            digest.update(self._source.read(offset=offset, nbytes=nbytes))
            progress(nbytes)
        self._first = digest.digest()
        return self._first

    def read(self, *, offset: int, nbytes: int) -> memoryview:
        """Return bytes of the second reading.

        Raises:
            SourceError: With the last bytes, when they are not those of the first reading.
        """
        part = self._source.read(offset=offset, nbytes=nbytes)
        self._again.update(part)
        if offset + nbytes == self._nbytes and self._again.digest() != self._first:
            raise SourceError("corrupt", self._where, "changed while it was read")
        return part


def content_save_id(
    plan: SavePlan,
    sources: Mapping[ShardKey, SteadySource],
    *,
    created_us: int,
    progress: Progress,
) -> bytes:
    """Return a save id that follows from everything else that the files will hold.

    spec: COM-10
    """
    digest = hashlib.sha256(_MARK)
    for record in _records(plan):
        digest.update(record.encode() + b"\n")
    digest.update(b"%d\n" % created_us)
    for source in sources.values():
        digest.update(source.digest(progress))
    return digest.digest()[:SAVE_ID_NBYTES]


def _records(plan: SavePlan) -> Iterator[str]:
    """Yield every record of a plan as text; in ASCII, as repr() depends on Python's Unicode."""
    yield ascii((plan.step, sorted(plan.user.items()), plan.world_size, plan.geometry))
    for segment in plan.segments:
        yield from map(ascii, segment.entries)
        yield from map(ascii, segment.parts)
        yield from map(ascii, segment.objects)


def is_taken(target: Path, path: Path) -> TargetError:
    """Return the error for a staging directory of the same name that cannot be taken for dead."""
    detail = (
        f"another conversion of the same content is writing here, or left what cannot be removed: "
        f"{path.name}"
    )
    return TargetError("io", str(target), detail)
