"""fpverify: whether every byte of a checkpoint is as it was saved."""

import argparse
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fpformat.errors import Problem
from fpformat.verify import VerifyReport, verify_checkpoint
from fpformat_tools.cli import FAILED, OK, dump_json, run
from fpformat_tools.progress import bar
from fpformat_tools.text import count_text, nbytes_text, plain

COMMAND = "fpverify"
_EPILOG = """\
examples:
  fpverify step-0000001000
  fpverify step-0000001000 --quiet && echo sound
  fpverify step-0000001000 --json | jq .damaged

Every byte of every file of the checkpoint is read and compared with its checksums; padding,
tables, manifest and state tree are checked against the specification. Each problem is printed
with its clause and error class.

exit codes: 0 sound, 1 damaged, incomplete or no checkpoint, 2 wrong usage
"""
_SHOWN_LIMIT = 50


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description="Check every byte of a checkpoint of fpformat.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="DIR", help="directory of the checkpoint")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.add_argument("--quiet", action="store_true", help="only the exit code")
    return parser


def _total_nbytes(path: str) -> int | None:
    try:
        return sum(entry.stat().st_size for entry in Path(path).iterdir() if entry.is_file())
    except OSError:
        return None


def _place(problem: Problem) -> tuple[str, str]:
    """Return the file that a problem lies in, and where in it."""
    found = re.search(r"(seg-\d{6}\.fps|manifest\.json)(?::\s*|$)", problem.where)
    if found is None:
        return "the whole checkpoint", ""
    return found.group(1), problem.where[found.end() :]


def lines(path: str, report: VerifyReport, *, seconds: float) -> Iterator[str]:
    """Yield the report for people."""
    verdict = "sound" if not report.problems else count_text(len(report.problems), "problem")
    yield f"{path}: {verdict}"
    if report.checkpoint_id is not None and report.manifest is not None:
        yield f"  id       {report.checkpoint_id}"
        segments = count_text(len(report.manifest.segments), "segment")
        tensors = count_text(report.tensor_count, "tensor")
        step = "" if report.manifest.step is None else f"step {report.manifest.step}, "
        yield f"  checked  {step}{tensors} in {segments}, the manifest and every index"
    rate = nbytes_text(int(report.nbytes / max(seconds, 1e-9)))
    yield f"  read     {nbytes_text(report.nbytes)} in {seconds:.2f} s ({rate}/s)"
    grouped: dict[str, list[Problem]] = defaultdict(list)
    for problem in report.problems:
        grouped[_place(problem)[0]].append(problem)
    for name, problems in grouped.items():
        yield f"  {name}"
        for problem in problems[:_SHOWN_LIMIT]:
            where = _place(problem)[1]
            text = f"{where}: {problem.detail}" if where else problem.detail
            yield f"    {problem.error_class:<12} {problem.clause:<7} {text}"
        if len(problems) > _SHOWN_LIMIT:
            yield f"    and {len(problems) - _SHOWN_LIMIT:,} more"
    if report.damaged:
        yield f"  damaged  {count_text(len(report.damaged), 'tensor')}"
        for tensor, scope in report.damaged[:_SHOWN_LIMIT]:
            yield f"    {plain(tensor)}{'' if scope is None else f' of rank {scope}'}"
        if len(report.damaged) > _SHOWN_LIMIT:
            yield f"    and {len(report.damaged) - _SHOWN_LIMIT:,} more"


def document(path: str, report: VerifyReport, *, seconds: float) -> dict[str, Any]:
    """Return the report for programs to read."""
    return {
        "path": path,
        "sound": not report.problems,
        "checkpoint_id": report.checkpoint_id,
        "step": report.manifest.step if report.manifest else None,
        "tensors": report.tensor_count,
        "nbytes": report.nbytes,
        "seconds": round(seconds, 6),
        "problems": [
            {
                "class": problem.error_class,
                "clause": problem.clause,
                "where": problem.where,
                "detail": problem.detail,
            }
            for problem in report.problems
        ],
        "damaged": [{"name": name, "rank": scope} for name, scope in report.damaged],
    }


def _verify(arguments: argparse.Namespace) -> int:
    begin = time.perf_counter()
    with bar("verifying", total_nbytes=_total_nbytes(arguments.path)) as progress:
        report = verify_checkpoint(arguments.path, progress=progress)
    seconds = time.perf_counter() - begin
    if arguments.json:
        dump_json(document(arguments.path, report, seconds=seconds))
    elif not arguments.quiet:
        for line in lines(arguments.path, report, seconds=seconds):
            print(line)
    return FAILED if report.problems else OK


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments without the program's name; those of the process by default.

    Returns:
        The exit code.
    """
    arguments = parser().parse_args(argv)
    report = dump_json if arguments.json else None
    return run(COMMAND, lambda: _verify(arguments), report=report)


if __name__ == "__main__":
    sys.exit(main())
