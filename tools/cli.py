"""What the commands have in common: exit codes, errors on one line, interrupts."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn

from fpformat.errors import FpformatError
from fpformat_tools.errors import UsageError

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
BUG: Final = 3
INTERRUPTED: Final = 130
TERMINATED: Final = 143
SHOWN_LINES: Final = 50


def say(command: str, text: str) -> None:
    """Write a line of talk to standard error."""
    print(f"{command}: {text}", file=sys.stderr)


def _short(text: str) -> str:
    """Return text cut after the lines that anybody reads."""
    lines = text.split("\n")
    if len(lines) <= SHOWN_LINES + 1:
        return text
    rest = f"  and {len(lines) - SHOWN_LINES:,} more; all of them with --json"
    return "\n".join((*lines[:SHOWN_LINES], rest))


def dump_json(document: Any) -> None:
    """Write a document to standard output."""
    print(json.dumps(document, ensure_ascii=True, indent=2))


def error_document(error: Exception) -> dict[str, Any]:
    """Return an error for programs to read."""
    document: dict[str, Any] = {
        "class": getattr(error, "error_class", "io"),
        "message": str(error).partition("\n")[0],
    }
    for key in ("clause", "where", "detail"):
        if hasattr(error, key):
            document[key] = getattr(error, key)
    if getattr(error, "problems", ()):
        document["problems"] = list(error.problems)  # type: ignore[attr-defined]
    return {"error": document}


@contextmanager
def _terminable() -> Iterator[None]:
    """Let a request to terminate unwind, so that what is half written is removed."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(TERMINATED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(command: str, body: Callable[[], int], *, report: Callable[[Any], None] | None) -> int:
    """Run a command's body and return the exit code; nothing ever ends in a traceback.

    Args:
        command: Its name, for messages.
        body: Returns the exit code.
        report: Takes an error as a document, where the caller asked for JSON.
    """
    try:
        with _terminable():
            code = body()
            sys.stdout.flush()
            return code
    except UsageError as error:
        say(command, str(error))
        return USAGE
    except (FpformatError, OSError, MemoryError) as error:
        if isinstance(error, BrokenPipeError):
            # Whoever read the output has enough; the interpreter must not complain at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return OK
        say(command, _short(str(error)) or "out of memory")
        if report is not None:
            report(error_document(error))
        return FAILED
    except KeyboardInterrupt:
        say(command, "interrupted; nothing was left behind")
        return INTERRUPTED
    except Exception as error:
        say(command, f"internal error, please report it: {type(error).__name__}: {error}")
        return BUG
