"""fpverify: whether every byte of a checkpoint is as it was saved."""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fpformat.errors import Problem
from fpformat.names import MANIFEST_NAME, segment_name
from fpformat.read.verify import VerifyReport, verify_checkpoint
from fpformat_tools.commands.cli import FAILED, OK, Command, dump_json, new_parser, show
from fpformat_tools.formats.directories import hint_of
from fpformat_tools.show.damage import Damage, assess, segment_of
from fpformat_tools.streams.progress import bar
from fpformat_tools.text import count_text, listed, nbytes_text, verb_text

COMMAND = "fpverify"
_EPILOG = """\
examples:
  fpverify step-0000001000
  fpverify run/step-*
  fpverify step-0000001000 --quiet && echo sound
  fpverify step-0000001000 --json | jq .damaged

Every byte of every file of the checkpoint is read and compared with its checksums; padding,
tables, manifest and state tree are checked against the specification. Each problem is printed
with its clause and error class, tensors by their names (elements joined by /, as in fpinspect).

exit codes: 0 all sound, 1 any damaged, incomplete or no checkpoint, 2 wrong usage
"""
_SHOWN_LIMIT = 50
_DAMAGED = "DAMAGED"
# Classes of error that say nothing of the bytes; any other means damage.
_VERDICTS = {
    "incomplete": "INCOMPLETE",
    "not_fpformat": "NOT A CHECKPOINT",
    "io": "UNREADABLE",
    "unsupported": "UNSUPPORTED",
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = new_parser(
        COMMAND, description="Check every byte of checkpoints of fpformat.", epilog=_EPILOG
    )
    parser.add_argument("paths", metavar="DIR", nargs="+", help="directory of a checkpoint")
    parser.add_argument("--json", action="store_true", help="the report as JSON, a list of several")
    parser.add_argument("--quiet", action="store_true", help="only the exit code")
    return parser


def _total_nbytes(path: str) -> int | None:
    try:
        return sum(entry.stat().st_size for entry in Path(path).iterdir() if entry.is_file())
    except OSError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What verification of one directory came to.

    Attributes:
        damage: What the faults mean for the tensors; None when there are none.
        hint: What to name instead, where the directory holds checkpoints.
    """

    path: str
    report: VerifyReport
    damage: Damage | None
    seconds: float
    hint: str


@dataclass(slots=True, kw_only=True)
class Fault:
    """Problems of one clause at one place, shown as one line.

    Attributes:
        segment: Ordinal of the segment, None for a problem of the whole.
        where: The place in the segment, such as a tensor.
        is_consequence: Whether another fault of the segment explains it.
    """

    segment: int | None
    where: str
    problem: Problem
    count: int = 1
    is_consequence: bool = False


def faults_of(report: VerifyReport) -> list[Fault]:
    """Return the problems of a report, those of one tensor together."""
    faults: dict[tuple[int | None, str, str], Fault] = {}
    for problem in report.problems:
        segment = segment_of(problem, report.manifest)
        where = "" if segment is None else problem.where.partition(f"{segment_name(segment)}: ")[2]
        key = (segment, where, f"{problem.clause} {problem.detail if not where else ''}")
        if key in faults:
            faults[key].count += 1
        else:
            faults[key] = Fault(segment=segment, where=where, problem=problem)
    every = list(faults.values())
    for fault in every:
        # A file whose bytes differ has another checksum: that is no fault of its own.
        if fault.problem.clause == "SUM-4":
            fault.is_consequence = sum(other.segment == fault.segment for other in every) > 1
    return every


def headline(report: VerifyReport, damage: Damage | None) -> str:
    """Return the verdict in a few words."""
    if damage is None:
        return "sound"
    faults = faults_of(report)
    verdicts = {_VERDICTS.get(fault.problem.error_class, _DAMAGED) for fault in faults}
    verdict = _DAMAGED if _DAMAGED in verdicts else min(verdicts)
    total = len(damage.names)
    parts = []
    others = [
        fault
        for fault in faults
        if not fault.is_consequence
        and not (fault.problem.clause == "SUM-2" and fault.where.startswith("tensor "))
    ]
    if others:
        parts.append(count_text(len(others), "problem"))
    if damage.damaged:
        parts.append(f"{count_text(len(damage.damaged), 'damaged tensor')} of {total:,}")
    text = f"{verdict}: {', '.join(parts)}"
    if report.manifest is None:
        return f"{text}; no tensor could be checked" if verdict == _DAMAGED else text
    rest = total - len(damage.damaged)
    if damage.unread:
        return f"{text}; {_unverified_text(damage)} could not be checked"
    if not damage.is_local or not rest:
        return text
    if damage.damaged:
        return f"{text}; the {verb_text(rest, 'other is', 'others are')} good"
    return f"{text}; {verb_text(rest, 'the tensor is', f'all {rest:,} tensors are')} good"


def _unverified_text(damage: Damage) -> str:
    number = damage.unverified_count
    return "an unknown number of tensors" if number is None else count_text(number, "tensor")


def _checked_text(report: VerifyReport, damage: Damage | None) -> str:
    """Return what was read and compared."""
    manifest = report.manifest
    total = len(manifest.segments) if manifest else 0
    step = "" if manifest is None or manifest.step is None else f"step {manifest.step}, "
    segments = count_text(total, "segment")
    if damage is None or not damage.unread:
        tensors = count_text(report.tensor_count, "tensor")
        return f"{step}{tensors} in {segments}, the manifest and every index"
    read = total - len(damage.unread)
    return f"{step}the manifest" + (f" and {read:,} of {segments}" if read else "")


def lines(outcome: Outcome) -> Iterator[str]:
    """Yield the report for people."""
    report, damage = outcome.report, outcome.damage
    yield f"{outcome.path}: {headline(report, damage)}"
    if outcome.hint:
        yield f"  hint     {outcome.hint}"
    if report.checkpoint_id is not None and report.manifest is not None:
        yield f"  id       {report.checkpoint_id}"
        yield f"  checked  {_checked_text(report, damage)}"
    for name, keys in damage.unread.items() if damage else ():
        held = "the number of its tensors is unknown"
        if keys is not None:
            held = f"{count_text(len(keys), 'tensor')} unverified"
        yield f"  unread   {name} could not be read: {held}"
    if report.nbytes:
        rate = f" ({nbytes_text(int(report.nbytes / max(outcome.seconds, 1e-9)))}/s)"
        speed = "" if report.problems else rate
        yield f"  read     {nbytes_text(report.nbytes)} in {outcome.seconds:.2f} s{speed}"
    if damage is not None:
        yield from _fault_lines(report, damage)


def _fault_lines(report: VerifyReport, damage: Damage) -> Iterator[str]:
    grouped: dict[int | None, list[Fault]] = defaultdict(list)
    for fault in faults_of(report):
        grouped[fault.segment].append(fault)
    for segment, faults in grouped.items():
        yield f"  {_file_of(segment, faults)}"
        for fault in faults[:_SHOWN_LIMIT]:
            yield f"    {_fault_text(fault, report, damage)}"
        if len(faults) > _SHOWN_LIMIT:
            yield f"    and {len(faults) - _SHOWN_LIMIT:,} more; all of them with --json"


def _file_of(segment: int | None, faults: Sequence[Fault]) -> str:
    if segment is not None:
        return segment_name(segment)
    if all(fault.problem.where.endswith(MANIFEST_NAME) for fault in faults):
        return MANIFEST_NAME
    return "the whole checkpoint"


def _fault_text(fault: Fault, report: VerifyReport, damage: Damage) -> str:
    problem = fault.problem
    if fault.is_consequence:
        return f"{'':<12} {problem.clause:<7} so the CRC-32C of the whole file differs as well"
    where = f"{fault.where}{_ranks_text(fault, report)}: " if fault.where else ""
    more = f" and {fault.count - 1:,} more" if fault.count > 1 else ""
    text = f"{where}{problem.detail}{more}{_ties_text(fault, damage)}"
    return f"{problem.error_class:<12} {problem.clause:<7} {text}"


def _ranks_text(fault: Fault, report: VerifyReport) -> str:
    named = [key[1] for key in report.damaged if fault.where == f"tensor {key[0]!r}"]
    ranks = [str(rank) for rank in named if rank is not None]
    return f" of rank {' or '.join(ranks)}" if ranks else ""


def _ties_text(fault: Fault, damage: Damage) -> str:
    tied = [
        name
        for owner, keys in damage.sharers.items()
        if fault.where == f"tensor {owner[0]!r}"
        for name, _ in keys
    ]
    return f"; the same bytes are in {listed(tied)}" if tied else ""


def document(outcome: Outcome) -> dict[str, Any]:
    """Return the report for programs to read."""
    report, damage = outcome.report, outcome.damage
    return {
        "path": outcome.path,
        "sound": not report.problems,
        "verdict": headline(report, damage),
        "checkpoint_id": report.checkpoint_id,
        "step": report.manifest.step if report.manifest else None,
        "tensors": report.tensor_count,
        "nbytes": report.nbytes,
        "seconds": round(outcome.seconds, 6),
        "problems": [
            {
                "class": problem.error_class,
                "clause": problem.clause,
                "where": problem.where,
                "detail": problem.detail,
            }
            for problem in report.problems
        ],
        "damaged": [
            {"name": name, "rank": scope} for name, scope in (damage.damaged if damage else ())
        ],
        "unverified": _unverified_count(report, damage),
    }


def _unverified_count(report: VerifyReport, damage: Damage | None) -> int | None:
    """Return how many tensors could not be checked, None when nobody can know."""
    if damage is None:
        return 0
    return None if report.manifest is None else damage.unverified_count


def verify(path: str) -> Outcome:
    """Verify one directory."""
    begin = time.perf_counter()
    with bar("verifying", total_nbytes=_total_nbytes(path)) as progress:
        report = verify_checkpoint(path, progress=progress)
    is_absent = any(problem.clause == "DIR-1" for problem in report.problems)
    return Outcome(
        path=path,
        report=report,
        damage=assess(path, report) if report.problems else None,
        seconds=time.perf_counter() - begin,
        hint=hint_of(path) if is_absent else "",
    )


def _verify(arguments: argparse.Namespace) -> int:
    code = OK
    documents = []
    for path in arguments.paths:
        outcome = verify(path)
        code = FAILED if outcome.report.problems else code
        if arguments.json:
            documents.append(document(outcome))
        elif not arguments.quiet:
            show(lines(outcome))
    if documents:
        dump_json(documents[0] if len(documents) == 1 else documents)
    return code


main = Command(name=COMMAND, parser=parser, body=_verify).main


if __name__ == "__main__":
    sys.exit(main())
