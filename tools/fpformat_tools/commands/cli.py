"""What the commands have in common: exit codes, errors on one line, interrupts, readers that leave.

Whoever reads the output may leave before its end, as ``head`` does. A command then says nothing of
it, and its exit code stays that of what it did. A terminal may lack the characters of a name, or a
file name have none: they are then shown as escapes, for the same reason.
"""

import argparse
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TextIO

import fpformat
from fpformat.errors import FpformatError
from fpformat.limits import VERSION
from fpformat_tools.errors import UsageError

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
BUG: Final = 3
INTERRUPTED: Final = 130
TERMINATED: Final = 143
HUNG_UP: Final = 129
SHOWN_LINES: Final = 50

_ENDS: Final = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGTERM: TERMINATED,
    signal.SIGHUP: HUNG_UP,
}


def _hush(stream: TextIO) -> None:
    """Send the rest of a stream nowhere; the interpreter must not complain at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _escape_unknown() -> None:
    """Let both streams write what their encoding lacks as backslash escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def shortened(line: str, *, width: int) -> str:
    """Return a line as the terminal on standard output will show it, cut to its width."""
    encoding = sys.stdout.encoding or "ascii"
    line = line.encode(encoding, "backslashreplace").decode(encoding)
    return line if len(line) <= width else f"{line[: width - 1]}>"


def name_argument(text: str) -> str:
    """Return a name from the command line; where the locale has no UTF-8, its bytes still do."""
    return os.fsencode(text).decode("utf-8", "surrogateescape") if _is_escaped(text) else text


def _is_escaped(text: str) -> bool:
    return any("\udc80" <= character <= "\udcff" for character in text)


def show(lines: Iterable[str], stream: TextIO | None = None) -> None:
    """Write lines to a stream, to standard output by default, while somebody reads them."""
    stream = stream or sys.stdout
    try:
        for line in lines:
            print(line, file=stream)
        stream.flush()
    except BrokenPipeError:
        _hush(stream)


def say(command: str, text: str) -> None:
    """Write a line of talk to standard error."""
    show([f"{command}: {text}"], sys.stderr)


def new_parser(command: str, *, description: str, epilog: str) -> argparse.ArgumentParser:
    """Return a parser whose help shows the epilog as it is."""
    return argparse.ArgumentParser(
        prog=command,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of a command line; ``--version`` is known to every command.

    Args:
        parser: The parser of the command.
        argv: Arguments without the program's name; those of the process by default.

    Raises:
        SystemExit: With the exit code, when help was asked for or the usage is wrong.
    """
    _escape_unknown()
    version = f"%(prog)s {fpformat.__version__} (format {VERSION[0]}.{VERSION[1]})"
    parser.add_argument("--version", action="version", version=version)
    try:
        return parser.parse_args(argv)
    except SystemExit:
        show([])
        raise


def _short(text: str) -> str:
    """Return text cut after the lines that anybody reads."""
    lines = text.split("\n")
    if len(lines) <= SHOWN_LINES + 1:
        return text
    rest = f"  and {len(lines) - SHOWN_LINES:,} more; all of them with --json"
    return "\n".join((*lines[:SHOWN_LINES], rest))


def dump_json(document: Any) -> None:
    """Write a document to standard output."""
    show([json.dumps(document, ensure_ascii=True, indent=2)])


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
    """Let the first request to end unwind, so that what is half written is removed.

    Further ones are ignored meanwhile: somebody who presses Ctrl-C twice wants the command to end,
    not its clean-up. A request that whoever started the command has it ignore, as ``nohup`` does
    with SIGHUP, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _ENDS}

    def leave(number: int, frame: object) -> NoReturn:
        for each in _ENDS:
            signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(_ENDS[signal.Signals(number)])

    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
            _hush(sys.stdout)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command, from the words that were typed to the exit code.

    Attributes:
        name: For messages.
        parser: Makes the parser of its command line, which has an option ``--json``.
        body: Does what the arguments ask for and returns the exit code.
    """

    name: str
    parser: Callable[[], argparse.ArgumentParser]
    body: Callable[[argparse.Namespace], int]

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the command.

        Args:
            argv: Arguments without the program's name; those of the process by default.

        Returns:
            The exit code.
        """
        arguments = parse(self.parser(), argv)
        report = dump_json if arguments.json else None
        return run(self.name, lambda: self.body(arguments), report=report)
