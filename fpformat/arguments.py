"""The kinds of arguments that public calls take, checked before anything is touched.

Every wrong argument is one `PlanError` that names it, its type and what was expected. Only short
plain values are shown: others may be a whole state.
"""

import os
from collections.abc import Iterable, Sequence
from types import UnionType
from typing import Any, Final

from fpformat.errors import PlanError

_PLAIN: Final = (type(None), bool, int, float)
_SHOWN: Final = 60
_PATH: Final = "a str or an os.PathLike[str]"


def wrong(name: str, value: Any, expected: str) -> PlanError:
    """Return the error for an argument of a wrong kind, for the caller to raise."""
    is_plain = type(value) in _PLAIN or (type(value) in (str, bytes) and len(value) <= _SHOWN)
    shown = f"{name}={value!r}" if is_plain else name
    return PlanError(f"{shown} is of type {type(value).__name__}, expected {expected}")


def checked_path(path: Any, name: str = "path") -> str:
    """Return a path as text.

    Bytes are refused, as in the annotations of all public calls: paths in messages, reports and
    results are text.

    Raises:
        PlanError: It is no path, is empty, or cannot be one of this system.
    """
    try:
        text = os.fspath(path)
    except TypeError as error:
        raise wrong(name, path, _PATH) from error
    if not isinstance(text, str):
        raise wrong(name, path, _PATH)
    if not text:
        raise PlanError(f"{name} is empty, expected the path of a directory")
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError as error:
        raise PlanError(f"{name}={text!r}: is no path: {error}") from error
    if b"\0" in encoded:
        raise PlanError(f"{name}={text!r}: is no path: it has a null character")
    return text


def checked_paths(name: str, paths: Any) -> tuple[str, ...]:
    """Return several paths as text; a single one is refused, whose characters it would be."""
    if isinstance(paths, str | bytes | os.PathLike) or not isinstance(paths, Iterable):
        raise wrong(name, paths, f"a sequence of paths, each {_PATH}")
    return tuple(checked_path(path, f"{name}[{at}]") for at, path in enumerate(paths))


def checked_flag(name: str, value: Any) -> bool:
    """Return a bool; whatever else has a truth value is taken for a mistake."""
    if type(value) is not bool:
        raise wrong(name, value, "a bool")
    return value


def checked_int(name: str, value: Any, *, least: int) -> int:
    """Return an int of at least `least`."""
    if type(value) is not int:
        raise wrong(name, value, f"an int of at least {least}")
    if value < least:
        raise PlanError(f"{name}={value}: expected an int of at least {least}")
    return value


def check_timeout(value: Any) -> None:
    """Raise PlanError for what is no number of seconds to wait; None waits for ever."""
    expected = "seconds, a number of at least 0, or None"
    if value is not None and type(value) not in (int, float):
        raise wrong("timeout", value, expected)
    if value is not None and not value >= 0:
        raise PlanError(f"timeout={value!r}: expected {expected}")


def check_kind(name: str, value: Any, kinds: "type | UnionType", expected: str) -> None:
    """Raise PlanError for a value that is none of `kinds`."""
    if not isinstance(value, kinds):
        raise wrong(name, value, expected)


def check_all(name: str, values: Any, kind: type, expected: str) -> None:
    """Raise PlanError for what is no sequence, or for an element that is not of `kind`."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise wrong(name, values, f"a sequence, each element {expected}")
    for at, value in enumerate(values):
        check_kind(f"{name}[{at}]", value, kind, expected)
