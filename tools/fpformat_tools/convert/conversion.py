"""Conversion of a checkpoint: what goes in, what comes out, what is refused on the way.

No format is named here; the table of formats says what each can do.
"""

import errno
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from fpformat.names import Path as StatePath
from fpformat.publish.latch import Latch
from fpformat.publish.shield import run_whole
from fpformat.records.nodes import Node, children_of, walk_leaves, walk_tensors
from fpformat_tools.errors import SourceError, TargetError, UsageError
from fpformat_tools.formats import registry
from fpformat_tools.formats.detect import find_source
from fpformat_tools.formats.interface import Output, Problems, SaveId, Target, Written
from fpformat_tools.streams.output import refuse_existing
from fpformat_tools.streams.progress import Progress
from fpformat_tools.streams.state import State
from fpformat_tools.streams.trees import numpy_as_plain, select
from fpformat_tools.text import count_text, path_text, verb_text


class Numpy(Enum):
    """What to do with arrays and scalars of numpy."""

    KEEP = "keep"
    CONVERT = "convert"


class Unsupported(Enum):
    """What to do with values that have no form in the format or in the output."""

    REFUSE = "refuse"
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a conversion shall do.

    Attributes:
        to: Format of the output; None takes it from the ending of `target`.
        key: Part of the state to convert; None for all of it.
        max_shard_nbytes: Limit of a file where the output has several; None for the default.
        save_id: Where the save id comes from, where the output has one.
    """

    source: Path
    target: Path
    to: str | None = None
    key: str | None = None
    max_shard_nbytes: int | None = None
    unsupported: Unsupported = Unsupported.REFUSE
    numpy: Numpy = Numpy.KEEP
    save_id: SaveId = SaveId.RANDOM


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a conversion did.

    Attributes:
        kind: Name of the kind of input.
        to: Name of the format of the output.
        data_nbytes: Logical bytes of all tensors.
        skipped: What was left out because the request allowed it.
        left_out: Names of the input that ``--key`` left out.
    """

    kind: str
    to: str
    tensor_count: int
    data_nbytes: int
    written: Written
    seconds: float
    warnings: tuple[str, ...]
    skipped: tuple[str, ...]
    left_out: tuple[str, ...]


ShowProgress = Callable[[int], AbstractContextManager[Progress]]
"""Takes the number of bytes to come; gives what to call with each number of bytes moved."""


def target_format(request: Request) -> str:
    """Return the name of the format of the output.

    Raises:
        UsageError: Neither asked for nor told by the ending; or it has no use for an option.
    """
    outputs = registry.outputs()
    named = {ending: name for name, output in outputs.items() for ending in output.endings}
    known = request.to or named.get(request.target.suffix.lower())
    if known is None:
        choices = ", ".join(outputs)
        raise UsageError(f"{request.target}: its ending names no format; give --to ({choices})")
    if request.max_shard_nbytes is not None and not outputs[known].is_sharded(request.target):
        sharded = " or ".join(output.sharded for output in outputs.values() if output.sharded)
        raise UsageError(f"--max-shard-size is for {sharded}: name one as DST")
    return known


def _lines(problems: Problems) -> list[str]:
    return [f"{path_text(path)}: {reason}" for path, reason in problems]


def _skipped(problems: Problems, output: Output) -> list[str]:
    """Return the lines of what was left out; in a list or a tuple None stands in its place."""
    lines = _lines(problems)
    if output.is_flat:
        return lines
    return [
        f"{line}; None stands in its place" if path and path[-1][0] == "index" else line
        for line, (path, _) in zip(lines, problems, strict=True)
    ]


def _them(number: int) -> str:
    return verb_text(number, "it", "them")


def _refuse_or_skip(state: State, output: Output, request: Request, path: StatePath) -> list[str]:
    """Return what of the input was left out; refuse it unless that was allowed."""
    problems = [(place, why) for place, why in state.problems if place[: len(path)] == path]
    number = len(problems) + len(state.beside)
    if number and request.unsupported is Unsupported.REFUSE:
        if problems:
            have, are = verb_text(number, "has", "have"), verb_text(number, "is", "are")
            text = f"{count_text(number, 'value')} {have} no form in fpformat and {are} never run"
        else:
            text = f"only one state can be converted, {count_text(number, 'part')} would be lost"
        hint = f"--skip-unsupported leaves {_them(number)} out"
        lines = [*_lines(problems), *state.beside]
        raise SourceError("unsupported", state.where, f"{text}; {hint}", lines)
    return [*_skipped(problems, output), *state.beside]


def _fit(state: State, to: str, output: Output, request: Request) -> list[str]:
    """Return what the output cannot hold, taken out of the state; refuse unless allowed.

    spec: CNV-2, CNV-20, CNV-25
    """
    has_numpy = any(isinstance(leaf, output.numpy) for _, leaf in walk_leaves(state.node))
    problems = output.fit(state)
    if problems and request.unsupported is Unsupported.REFUSE:
        number = len(problems)
        others_text = f"{count_text(number, 'other value')} {verb_text(number, 'is', 'are')}"
        hint = "--numpy-to-tensor makes tensors of numpy arrays, " if has_numpy else ""
        hint += f"--key selects a part, --skip-unsupported leaves {_them(number)} out"
        detail = f"{to} holds {output.holds}; {others_text} in the way; {hint}"
        raise TargetError("unsupported", state.where, detail, _lines(problems))
    return _skipped(problems, output)


def _select(state: State, request: Request) -> tuple[StatePath, tuple[str, ...]]:
    if request.key is None:
        return (), ()
    whole = state.node
    state.node, path = select(whole, request.key)
    return path, left_of(whole, path)


def left_of(node: Node, path: StatePath) -> tuple[str, ...]:
    """Return the names of what lies beside a path, level by level."""
    beside: list[str] = []
    for depth, element in enumerate(path):
        children = children_of(node) or ()
        for other, child in children:
            if other == element:
                node = child
            elif other[0] in ("key", "index"):
                beside.append(path_text((*path[:depth], other)))
    return tuple(beside)


def _write_whole(output: Output, state: State, target: Target, progress: Progress) -> Written:
    """Write a state; an interrupt stops it, and is raised when nothing is left behind.

    One that comes when the output stands already changes nothing any more.
    """
    stop = Latch()
    done: list[Written] = []

    def moved(nbytes: int) -> None:
        if stop.is_set():
            raise InterruptedError(errno.EINTR, "interrupted")
        progress(nbytes)

    try:
        run_whole(lambda: done.append(output.write(state, target, moved)), stop=stop.set)
    except (KeyboardInterrupt, SystemExit):
        if not done:
            raise
    return done[0]


def convert(request: Request, *, show_progress: ShowProgress) -> Report:
    """Convert a checkpoint; the output appears whole or not at all.

    Raises:
        UsageError: The request makes no sense.
        FpformatError: The input is refused, or the output cannot hold or take it.
    """
    begin = time.perf_counter()
    refuse_existing(request.target)
    kind, place = find_source(request.source)
    to = target_format(request)
    output = registry.outputs()[to]
    target = Target(
        path=request.target, max_shard_nbytes=request.max_shard_nbytes, save_id=request.save_id
    )
    output.check(target)
    with ExitStack() as stack:
        state = registry.kind_named(kind).open(place, stack)
        path, left_out = _select(state, request)
        if request.numpy is Numpy.CONVERT:
            state.node = numpy_as_plain(state.node)
        skipped = _refuse_or_skip(state, output, request, path)
        skipped += _fit(state, to, output, request)
        tensors = [state.tensors[ref.index] for _, ref in walk_tensors(state.node)]
        nbytes = sum(tensor.nbytes for tensor in tensors)
        with show_progress(output.readings(target) * nbytes) as progress:
            written = _write_whole(output, state, target, progress)
    return Report(
        kind=kind,
        to=to,
        tensor_count=len(tensors),
        data_nbytes=nbytes,
        written=written,
        seconds=time.perf_counter() - begin,
        warnings=tuple(state.warnings),
        skipped=tuple(skipped),
        left_out=left_out,
    )
