"""fpinspect gc: what saves and conversions that died left in a directory, and its removal."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fpformat_tools.commands.cli import FAILED, OK, Command, dump_json, new_parser, say, show
from fpformat_tools.errors import SourceError
from fpformat_tools.streams.leftovers import Leftover, collect, find
from fpformat_tools.text import count_text, nbytes_text

COMMAND = "fpinspect gc"
_EPILOG = """\
examples:
  fpinspect gc runs --dry-run
  fpinspect gc runs

Names that begin with .fps- or .fpconvert- belong to saves and conversions that are going on, or
died. Whoever writes holds a lock, and is left alone. Where a file system has no locks, or other
machines use it too, only what nothing changed for a day is removed.

exit codes: 0 done, 1 the directory cannot be read or something cannot be removed, 2 wrong usage
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = new_parser(
        COMMAND,
        description="Remove what saves and conversions that died left in a directory.",
        epilog=_EPILOG,
    )
    parser.add_argument("path", metavar="DIR", type=Path, help="directory of checkpoints")
    parser.add_argument("--dry-run", action="store_true", help="only show what would be removed")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    return parser


def _found(folder: Path) -> list[Leftover]:
    try:
        return find(folder)
    except OSError as error:
        detail = f"cannot be listed: {error.strerror}"
        raise SourceError("io", str(folder), detail) from error


def _verdicts(found: Sequence[Leftover], gone: Sequence[Path], is_dry: bool) -> Iterator[str]:
    for leftover in found:
        if leftover.path in gone:
            yield "removed"
        elif not leftover.is_dead:
            yield "in use"
        else:
            yield "would be removed" if is_dry else "stays"


def _document(rows: Sequence[tuple[Leftover, str]]) -> list[dict[str, Any]]:
    return [
        {"path": str(leftover.path), "nbytes": leftover.nbytes, "verdict": verdict}
        for leftover, verdict in rows
    ]


def _lines(rows: Sequence[tuple[Leftover, str]]) -> Iterator[str]:
    for leftover, verdict in rows:
        yield f"{verdict:<16}  {nbytes_text(leftover.nbytes):>9}  {leftover.path}"
    if not rows:
        yield "nothing is left behind"


def _collect(arguments: argparse.Namespace) -> int:
    found = _found(arguments.path)
    problems: list[str] = []
    gone = () if arguments.dry_run else collect(arguments.path, warn=problems.append)
    rows = list(zip(found, _verdicts(found, gone, arguments.dry_run), strict=True))
    if arguments.json:
        dump_json(_document(rows))
    else:
        show(_lines(rows))
    for problem in problems:
        say(COMMAND, problem)
    if gone and not arguments.json:
        freed = sum(leftover.nbytes for leftover, verdict in rows if verdict == "removed")
        say(COMMAND, f"removed {count_text(len(gone), 'leftover')}, {nbytes_text(freed)}")
    return FAILED if problems else OK


main = Command(name=COMMAND, parser=parser, body=_collect).main
