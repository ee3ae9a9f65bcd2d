"""The JSON header of a safetensors file: parsed strictly, in memory bounded by its own length.

The grammar of the header is small: an object of flat objects. So the outer object is walked here,
one name at a time, and only a flat object (no brace inside) is ever handed to the JSON parser.
Deep nesting and long lists of nothing are refused where they begin, and duplicate names, which
JSON parsers pass over in silence, are errors.

``__metadata__`` must be an object of strings. The value null, which some writers leave there, is
taken for no metadata and reported; numbers, lists and objects in it are errors that name the key.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, Final

from fpformat.dtypes import DType, by_name, tensor_nbytes
from fpformat.errors import FpformatError
from fpformat.limits import MAX_NDIM
from fpformat_tools.errors import SourceError
from fpformat_tools.text import shown

METADATA_NAME: Final = "__metadata__"
MAX_HEADER_NBYTES: Final = 100_000_000
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_FLAT: Final = re.compile(r"\{[^{}]*\}")
_ENTRY_LIMIT: Final = 64 * 1024
# Names in the registry that safetensors spells differently; the others are the same.
_OURS: Final = {"F4": "F4_E2M1_X2"}
THEIRS: Final = {ours: theirs for theirs, ours in _OURS.items()}
# Highest first: the order in which the library places tensors, so that all are aligned.
DTYPE_ORDER: Final = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F4", "BOOL"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderEntry:
    """One tensor of a header; `start` and `stop` count from the end of the header."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A whole header in its own order; warnings tell of tolerated oddities."""

    entries: tuple[HeaderEntry, ...]
    metadata: dict[str, str]
    warnings: tuple[str, ...]


class _Walker:
    """A position in the header's text."""

    def __init__(self, text: str, where: str) -> None:
        self.text = text
        self.where = where
        self.position = 0

    def fail(self, detail: str) -> SourceError:
        return SourceError("malformed", self.where, f"header: {detail}")

    def peek(self) -> str:
        found = _SPACE.match(self.text, self.position)
        self.position = found.end() if found else self.position
        return self.text[self.position : self.position + 1]

    def expect(self, mark: str) -> None:
        found = self.peek()
        if found != mark:
            what = f"found {found!r}" if found else "it ends"
            raise self.fail(f"is not JSON: {what} where {mark!r} must stand ({self.position})")
        self.position += 1

    def string(self) -> str:
        self.expect('"')
        try:
            text, self.position = scanstring(self.text, self.position, True)
        except ValueError as error:
            raise self.fail(f"is not JSON: {error}") from error
        return str(text)

    def flat_object(self, name: str) -> dict[str, Any]:
        found = _FLAT.match(self.text, self.position)
        if self.peek() != "{" or not found or found.end() - found.start() > _ENTRY_LIMIT:
            raise self.fail(f"entry {shown(name)} is not a flat object of dtype, shape, offsets")
        self.position = found.end()
        try:
            pairs: list[tuple[str, Any]] = json.loads(found.group(), object_pairs_hook=list)
        except (ValueError, RecursionError) as error:
            raise self.fail(f"entry {shown(name)} is not JSON: {error}") from error
        if len(dict(pairs)) < len(pairs):
            raise self.fail(f"entry {shown(name)} names a key twice")
        return dict(pairs)

    def next_follows(self) -> bool:
        """Pass a comma, or the brace that closes the object."""
        mark = self.peek()
        self.expect("," if mark == "," else "}")
        return mark == ","


def _metadata(walker: _Walker) -> tuple[dict[str, str], tuple[str, ...]]:
    walker.peek()
    if walker.text.startswith("null", walker.position):
        walker.position += 4
        return {}, (f"{walker.where}: {METADATA_NAME} is null; taken for no metadata",)
    if walker.peek() != "{":
        raise walker.fail(f"{METADATA_NAME} must be an object of strings")
    walker.position += 1
    strings: dict[str, str] = {}
    follows = walker.peek() != "}"
    walker.position += not follows
    while follows:
        key = walker.string()
        walker.expect(":")
        if walker.peek() != '"':
            kind = {"{": "an object", "[": "a list", "n": "null", "t": "true", "f": "false"}.get(
                walker.peek(), "a number"
            )
            raise walker.fail(f"{METADATA_NAME}: the value of {shown(key)} is {kind}, not a string")
        if key in strings:
            raise walker.fail(f"{METADATA_NAME}: {shown(key)} stands there twice")
        strings[key] = walker.string()
        follows = walker.next_follows()
    for text in (*strings, *strings.values()):
        _check_unicode(walker, text)
    return strings, ()


def _check_unicode(walker: _Walker, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise walker.fail(f"{shown(text)} has a lone surrogate, so no UTF-8 form") from error


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _shape_of(dtype_name: str, dims: list[int], fail: Any) -> tuple[DType, tuple[int, ...]]:
    try:
        dtype = by_name(_OURS.get(dtype_name, dtype_name))
    except KeyError:
        known = dtype_name[:2] == "F6"
        what = "has values of 6 bits, which have no whole bytes" if known else "is not known"
        hint = "" if dtype_name else "; the writer probably dropped a tied tensor"
        raise fail(f"dtype {shown(dtype_name)} {what}{hint}") from None
    if dtype_name in _OURS:
        # Two values lie in a byte; the registry's shape counts bytes.
        if not dims or dims[-1] % 2:
            raise fail(f"shape {dims} of F4 does not fill whole bytes in its last dimension")
        return dtype, (*dims[:-1], dims[-1] // 2)
    if dtype.name in THEIRS or dtype.name not in DTYPE_ORDER:
        raise fail(f"dtype {shown(dtype_name)} is not one of safetensors")
    return dtype, tuple(dims)


def _entry(walker: _Walker, name: str, fields: dict[str, Any]) -> HeaderEntry:
    def fail(detail: str) -> SourceError:
        return walker.fail(f"tensor {shown(name)}: {detail}")

    missing = [key for key in ("dtype", "shape", "data_offsets") if key not in fields]
    if missing or len(fields) > 3:
        found = f"has {', '.join(map(shown, fields)) or 'nothing'}"
        raise fail(f"must have dtype, shape and data_offsets and nothing else; it {found}")
    dtype_name, dims, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype_name, str):
        raise fail("its dtype is not a string")
    if not isinstance(dims, list) or not all(map(_is_count, dims)):
        raise fail("its shape is not a list of whole numbers of at least 0")
    if len(dims) > MAX_NDIM:
        raise fail(f"has {len(dims)} dimensions, more than {MAX_NDIM}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise fail("its data_offsets are not two whole numbers of at least 0")
    dtype, shape = _shape_of(dtype_name, dims, fail)
    try:
        nbytes = tensor_nbytes(dtype, shape, where=shown(name))
    except FpformatError as error:
        raise fail(f"shape {dims} of {dtype_name} is too large") from error
    start, stop = offsets
    if start > stop:
        raise fail(f"data_offsets {offsets} are reversed")
    if stop - start != nbytes:
        raise fail(f"data_offsets {offsets} span {stop - start:,} bytes, shape needs {nbytes:,}")
    return HeaderEntry(name=name, dtype=dtype, shape=shape, start=start, stop=stop)


def check_cover(entries: Iterable[HeaderEntry], *, where: str) -> int:
    """Return the number of bytes that the tensors cover.

    Raises:
        SourceError: Two tensors overlap, or a stretch belongs to none.
    """
    position = 0
    previous = "the header"
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        if entry.start != position:
            fault = "overlaps" if entry.start < position else "leaves a hole after"
            detail = f"tensor {shown(entry.name)}: starts at {entry.start:,} and {fault} {previous}"
            raise SourceError("malformed", where, f"header: {detail}, which ends at {position:,}")
        position = entry.stop
        previous = f"tensor {shown(entry.name)}"
    return position


def parse_header(raw: bytes, *, where: str) -> Header:
    """Return the header that `raw` spells, every entry checked by itself.

    Raises:
        SourceError: Class malformed, one line, naming the tensor where one is to blame.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        detail = f"header: is not UTF-8 (byte {error.start})"
        raise SourceError("malformed", where, detail) from error
    walker = _Walker(text, where)
    entries: dict[str, HeaderEntry] = {}
    metadata: dict[str, str] = {}
    warnings: tuple[str, ...] = ()
    seen: set[str] = set()
    if not text.startswith("{"):
        raise walker.fail("must begin with '{'")
    walker.expect("{")
    follows = walker.peek() != "}"
    walker.position += not follows
    while follows:
        name = walker.string()
        _check_unicode(walker, name)
        walker.expect(":")
        if name in seen:
            raise walker.fail(f"{shown(name)} stands there twice")
        seen.add(name)
        if name == METADATA_NAME:
            metadata, warnings = _metadata(walker)
        else:
            walker.peek()
            entries[name] = _entry(walker, name, walker.flat_object(name))
        follows = walker.next_follows()
    if walker.peek():
        raise walker.fail(f"text follows its end ({walker.position})")
    return Header(entries=tuple(entries.values()), metadata=metadata, warnings=warnings)
