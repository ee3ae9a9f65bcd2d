"""What an input is, by its content; names and endings play no part."""

from collections.abc import Sequence
from pathlib import Path

from fpformat_tools.errors import SourceError
from fpformat_tools.formats import registry
from fpformat_tools.formats.directories import hint_of
from fpformat_tools.formats.foreign import refuse_directory, refuse_foreign, refuse_pickle
from fpformat_tools.formats.interface import HEAD_NBYTES, Head, Kind
from fpformat_tools.streams.ranges import Input
from fpformat_tools.text import count_text, listed

_SHORTEST_NBYTES = 8


def _kind_of_content(head: Head) -> Kind:
    """Return what a file is.

    Raises:
        SourceError: It is nothing that can be read; the message says what it is, if known.
    """
    kinds = tuple(registry.kinds())
    if head.nbytes == 0:
        raise SourceError("corrupt", head.where, "is empty (0 bytes)")
    for kind in kinds:
        if kind.detect_first(head):
            return kind
    refuse_foreign(head)
    for kind in kinds:
        if kind.detect(head):
            return kind
    refuse_pickle(head)
    if head.nbytes < _SHORTEST_NBYTES:
        detail = f"truncated: has {count_text(head.nbytes, 'byte')}; no known format is that short"
        raise SourceError("corrupt", head.where, detail)
    for kind in kinds:
        if kind.detect_last(head):
            return kind
    raise SourceError("unsupported", head.where, f"is not {_sought(kinds)}")


def _sought(kinds: Sequence[Kind]) -> str:
    """Return what was looked for, single files first."""
    ordered = sorted(kinds, key=lambda kind: not kind.is_lone)
    *others, last = [kind.sought for kind in ordered if kind.sought]
    return f"{', '.join(others)} or {last}"


def _file_kind(path: Path) -> Kind:
    with Input(path) as source:
        return _kind_of_content(Head(source.head(HEAD_NBYTES), source))


def kind_of(path: Path) -> str:
    """Return the name of the kind of the regular input at `path`."""
    return _file_kind(path).name


def find_source(path: Path) -> tuple[str, Path]:
    """Return the name of the kind of what a path holds, and the path to read.

    For a directory that may be a file in it, such as an index or a lone model.

    Raises:
        SourceError: Nothing there, nothing known, or several candidates, which are listed.
    """
    if not path.is_dir():
        return kind_of(path), path
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise SourceError("io", str(path), error.strerror or str(error)) from error
    for kind in registry.kinds():
        if kind.is_directory(names):
            return kind.name, path
    for kind in registry.kinds():
        found = kind.find(path, names)
        if found is not None:
            return kind.name, found
    refuse_directory(path, names)
    return _lone_model(path, names)


def _lone_model(path: Path, names: Sequence[str]) -> tuple[str, Path]:
    candidates = {name: kind for name in names if (kind := _lone_kind(path / name))}
    if len(candidates) == 1:
        ((name, kind),) = candidates.items()
        return kind.name, path / name
    if candidates:
        detail = f"has no index and several models, name one of them: {listed(candidates)}"
        raise SourceError("invalid", str(path), detail)
    hint = hint_of(path)
    detail = f"holds no manifest.json, no index and no model{f'; {hint}' if hint else ''}"
    raise SourceError("not_fpformat", str(path), detail)


def _lone_kind(path: Path) -> Kind | None:
    if not path.is_file():
        return None
    try:
        kind = _file_kind(path)
    except SourceError:
        return None
    return kind if kind.is_lone else None
