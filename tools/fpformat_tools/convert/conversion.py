"""Conversion of a checkpoint: what goes in, what comes out, what is refused on the way."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, Literal

from fpformat.names import Path as StatePath
from fpformat.records.nodes import (
    ArrayRef,
    Node,
    NumpyScalar,
    children_of,
    walk_leaves,
    walk_tensors,
)
from fpformat_tools.errors import SourceError, TargetError, UsageError
from fpformat_tools.formats.detect import Kind, find_source
from fpformat_tools.formats.fpformat.read import open_fpformat
from fpformat_tools.formats.fpformat.reproducible import source_date_us
from fpformat_tools.formats.fpformat.write import SaveId, Written, write_fpformat
from fpformat_tools.formats.safetensors import read as safetensors_input
from fpformat_tools.formats.safetensors import write as safetensors_output
from fpformat_tools.formats.safetensors.flat_names import others_of
from fpformat_tools.formats.torch.pickled import reason_to_refuse
from fpformat_tools.formats.torch.read import open_legacy, open_zip
from fpformat_tools.formats.torch.write import write_torch
from fpformat_tools.streams.output import refuse_existing
from fpformat_tools.streams.progress import Progress
from fpformat_tools.streams.state import State
from fpformat_tools.streams.trees import numpy_as_plain, prune, select
from fpformat_tools.text import count_text, path_text, verb_text

Format = Literal["fpformat", "safetensors", "torch"]
FORMATS: Final[tuple[Format, ...]] = ("fpformat", "safetensors", "torch")
ENDINGS: Final[dict[str, Format]] = {
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".ckpt": "torch",
    ".fpformat": "fpformat",
    ".fp": "fpformat",
}
KIND_TEXT: Final[dict[Kind, str]] = {
    "fpformat": "fpformat",
    "safetensors": "safetensors",
    "index": "a safetensors directory",
    "torch_zip": "a torch file",
    "torch_legacy": "a legacy torch file",
}
_OPENERS: Final[dict[Kind, Callable[[Path, ExitStack], State]]] = {
    "fpformat": open_fpformat,
    "safetensors": safetensors_input.open_file,
    "index": safetensors_input.open_index,
    "torch_zip": open_zip,
    "torch_legacy": open_legacy,
}
# Values of numpy in the way of an output that would not be, were they made plain.
_NUMPY: Final[dict[Format, tuple[type, ...]]] = {
    "fpformat": (),
    "safetensors": (ArrayRef,),
    "torch": (ArrayRef, NumpyScalar),
}
DEFAULT_SHARD_NBYTES: Final = 5_000_000_000


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
        max_shard_nbytes: Limit of a file in a safetensors directory; None for the default.
        save_id: Where the save id of a checkpoint of fpformat comes from.
    """

    source: Path
    target: Path
    to: Format | None = None
    key: str | None = None
    max_shard_nbytes: int | None = None
    unsupported: Unsupported = Unsupported.REFUSE
    numpy: Numpy = Numpy.KEEP
    save_id: SaveId = SaveId.RANDOM


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a conversion did.

    Attributes:
        data_nbytes: Logical bytes of all tensors.
        skipped: What was left out because the request allowed it.
        left_out: Names of the input that ``--key`` left out.
    """

    kind: Kind
    to: Format
    tensor_count: int
    data_nbytes: int
    written: Written
    seconds: float
    warnings: tuple[str, ...]
    skipped: tuple[str, ...]
    left_out: tuple[str, ...]


ShowProgress = Callable[[int], AbstractContextManager[Progress]]
"""Takes the number of bytes to come; gives what to call with each number of bytes moved."""


def target_format(request: Request) -> Format:
    """Return the format of the output; a name without an ending is a checkpoint of fpformat.

    Raises:
        UsageError: Neither asked for nor told by the ending.
    """
    known = request.to or ENDINGS.get(request.target.suffix.lower())
    if known is None and not request.target.suffix:
        known = "fpformat"
    if known is None:
        choices = ", ".join(FORMATS)
        raise UsageError(f"{request.target}: its ending names no format; give --to ({choices})")
    if request.max_shard_nbytes is not None and (
        known != "safetensors" or request.target.suffix == ".safetensors"
    ):
        raise UsageError("--max-shard-size is for a safetensors directory: name one as DST")
    return known


Problems = list[tuple[StatePath, str]]


def _lines(problems: Problems) -> list[str]:
    return [f"{path_text(path)}: {reason}" for path, reason in problems]


def _skipped(problems: Problems, to: Format) -> list[str]:
    """Return the lines of what was left out; in a list or a tuple None stands in its place."""
    lines = _lines(problems)
    if to == "safetensors":
        return lines
    return [
        f"{line}; None stands in its place" if path and path[-1][0] == "index" else line
        for line, (path, _) in zip(lines, problems, strict=True)
    ]


def _them(number: int) -> str:
    return verb_text(number, "it", "them")


def _refuse_or_skip(state: State, to: Format, request: Request, path: StatePath) -> list[str]:
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
    return [*_skipped(problems, to), *state.beside]


def _fit(state: State, to: Format, request: Request) -> list[str]:
    """Return what the output cannot hold, taken out of the state; refuse unless allowed.

    spec: CNV-2, CNV-20, CNV-25
    """
    lines: list[str] = []
    skipped: list[str] = []
    has_numpy = any(isinstance(leaf, _NUMPY[to]) for _, leaf in walk_leaves(state.node))
    if to == "safetensors":
        others = others_of(state)
        lines = skipped = others.values
        if others.attributes:
            text = "attributes of ordered dictionaries are not kept in safetensors"
            state.warnings.append(f"{state.where}: {text}: {', '.join(others.attributes)}")
    elif to == "torch":
        state.node, problems = prune(state.node, reason_to_refuse)
        lines, skipped = _lines(problems), _skipped(problems, to)
    if lines and request.unsupported is Unsupported.REFUSE:
        number = len(lines)
        what = "tensors only" if to == "safetensors" else "what weights_only accepts"
        others_text = f"{count_text(number, 'other value')} {verb_text(number, 'is', 'are')}"
        hint = "--numpy-to-tensor makes tensors of numpy arrays, " if has_numpy else ""
        hint += f"--key selects a part, --skip-unsupported leaves {_them(number)} out"
        detail = f"{to} holds {what}; {others_text} in the way; {hint}"
        raise TargetError("unsupported", state.where, detail, lines)
    return skipped


def _write(state: State, to: Format, request: Request, progress: Progress) -> Written:
    if to == "fpformat":
        return write_fpformat(
            state,
            request.target,
            progress=progress,
            save_id=request.save_id,
            created_us=source_date_us(),
        )
    if to == "torch":
        return write_torch(state, request.target, progress=progress)
    if request.target.suffix == ".safetensors":
        return safetensors_output.write_safetensors(state, request.target, progress=progress)
    limit = request.max_shard_nbytes or DEFAULT_SHARD_NBYTES
    return safetensors_output.write_directory(
        state, request.target, limit_nbytes=limit, progress=progress
    )


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
    if to == "fpformat":
        source_date_us()  # A wrong time is refused before anything is read.
    with ExitStack() as stack:
        state = _OPENERS[kind](place, stack)
        path, left_out = _select(state, request)
        if request.numpy is Numpy.CONVERT:
            state.node = numpy_as_plain(state.node)
        skipped = _refuse_or_skip(state, to, request, path)
        skipped += _fit(state, to, request)
        tensors = [
            state.tensors[ref.index]
            for _, ref in walk_tensors(state.node)
            if to != "safetensors" or not isinstance(ref, ArrayRef)
        ]
        nbytes = sum(tensor.nbytes for tensor in tensors)
        readings = 2 if to == "fpformat" and request.save_id is SaveId.CONTENT else 1
        with show_progress(readings * nbytes) as progress:
            written = _write(state, to, request, progress)
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
