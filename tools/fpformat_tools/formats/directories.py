"""Directories that are no checkpoint but hold some, as a run's directory does."""

import os
from pathlib import Path

from fpformat.errors import FormatError, fault
from fpformat.names import MANIFEST_NAME
from fpformat_tools.text import count_text, plain

_NAMED_COUNT = 2


def checkpoints_in(path: "str | Path") -> list[str]:
    """Return the names of the checkpoints below a directory, the last in order first."""
    try:
        names = [name for name in os.listdir(path) if not name.startswith(".")]
    except OSError:
        return []
    root = Path(path)
    return sorted((name for name in names if (root / name / MANIFEST_NAME).is_file()), reverse=True)


def hint_of(path: "str | Path") -> str:
    """Return what to name instead of a directory that holds checkpoints, nothing for another."""
    names = checkpoints_in(path)
    if not names:
        return ""
    some = " or ".join(plain(os.path.join(path, name)) for name in names[:_NAMED_COUNT])
    return f"the directory holds {count_text(len(names), 'checkpoint')}: name one, such as {some}"


def with_hint(error: FormatError, path: "str | Path") -> FormatError:
    """Return an error, with the hint where its cause is that checkpoints lie one level below."""
    hint = hint_of(path) if error.clause == "DIR-1" else ""
    return fault(error.clause, error.where, f"{error.detail}; {hint}") if hint else error
