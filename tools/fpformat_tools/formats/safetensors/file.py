"""A safetensors file, opened strictly: bounds before memory, reads by position, never mapped."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fpformat_tools.errors import SourceError
from fpformat_tools.formats.safetensors.header import (
    MAX_HEADER_NBYTES,
    Header,
    HeaderEntry,
    check_cover,
    parse_header,
)
from fpformat_tools.streams.ranges import Input, StoredRange
from fpformat_tools.text import count_text

_LENGTH_NBYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsFile:
    """An open file and its checked header.

    Attributes:
        source: To be closed by whoever opened it.
        start: Where the tensors' bytes begin.
    """

    source: Input
    header: Header
    start: int

    def stretch(self, entry: HeaderEntry) -> StoredRange:
        """Return the bytes of one tensor."""
        return StoredRange(
            self.source, start=self.start + entry.start, nbytes=entry.stop - entry.start
        )


def _header_nbytes(source: Input) -> int:
    where = str(source.path)
    if source.nbytes < _LENGTH_NBYTES:
        detail = f"truncated: has {count_text(source.nbytes, 'byte')}, at least 8 are needed"
        raise SourceError("corrupt", where, detail)
    nbytes = int.from_bytes(source.head(_LENGTH_NBYTES), "little")
    room = source.nbytes - _LENGTH_NBYTES
    if nbytes > MAX_HEADER_NBYTES:
        detail = f"its header claims {nbytes:,} bytes, over the limit of {MAX_HEADER_NBYTES:,}"
        hint = "; this is not a safetensors file, or damaged" if nbytes > room else ""
        raise SourceError("limit", where, detail + hint)
    if nbytes > room:
        needed = f"expected at least {nbytes + _LENGTH_NBYTES:,}"
        detail = f"truncated: the header alone needs {nbytes:,} bytes; {needed}"
        raise SourceError("corrupt", where, f"{detail}, the file has {source.nbytes:,}")
    if nbytes < 2:
        raise SourceError("malformed", where, f"its header of {nbytes} bytes is too short for JSON")
    return nbytes


def open_safetensors(path: Path) -> SafetensorsFile:
    """Open a safetensors file and check all of its header.

    Raises:
        SourceError: One line that names file, tensor, what was expected and what was found.
    """
    source = Input(path)
    try:
        nbytes = _header_nbytes(source)
        start = _LENGTH_NBYTES + nbytes
        raw = source.read_at(offset=_LENGTH_NBYTES, nbytes=nbytes)
        header = parse_header(raw, where=str(path))
        covered = check_cover(header.entries, where=str(path))
        _check_end(source, start=start, covered=covered, header=header)
    except BaseException:
        source.close()
        raise
    return SafetensorsFile(source=source, header=header, start=start)


def _check_end(source: Input, *, start: int, covered: int, header: Header) -> None:
    expected = start + covered
    if source.nbytes == expected:
        return
    sizes = f"expected {expected:,} bytes, found {source.nbytes:,}"
    if source.nbytes > expected:
        detail = f"{source.nbytes - expected:,} bytes follow the last tensor: {sizes}"
        raise SourceError("malformed", str(source.path), detail)
    cut = [entry for entry in header.entries if start + entry.stop > source.nbytes]
    first = min(cut, key=lambda entry: entry.start)
    detail = f"truncated: {sizes}; the first tensor that is cut is {first.name!r}"
    raise SourceError("corrupt", str(source.path), detail)
