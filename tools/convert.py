"""Conversion of a checkpoint: what goes in, what comes out, what is refused on the way."""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, Literal

from fpformat.names import Path as StatePath
from fpformat.nodes import ArrayRef, Node, children_of, walk_tensors
from fpformat_tools import safetensors_input, safetensors_output
from fpformat_tools.detect import Kind, find_source
from fpformat_tools.errors import SourceError, TargetError, UsageError
from fpformat_tools.flat_names import others_of
from fpformat_tools.fpformat_input import open_fpformat
from fpformat_tools.fpformat_output import Written, write_fpformat
from fpformat_tools.output import refuse_existing
from fpformat_tools.progress import Progress
from fpformat_tools.state import State
from fpformat_tools.text import path_text
from fpformat_tools.torch_file import open_legacy, open_zip
from fpformat_tools.torch_output import write_torch
from fpformat_tools.torch_pickle import reason_to_refuse
from fpformat_tools.trees import prune, select

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
DEFAULT_SHARD_NBYTES: Final = 5_000_000_000


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
    """

    source: Path
    target: Path
    to: Format | None = None
    key: str | None = None
    max_shard_nbytes: int | None = None
    unsupported: Unsupported = Unsupported.REFUSE


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a conversion did.

    Attributes:
        data_nbytes: Logical bytes of all tensors.
        skipped: What was left out because the request allowed it.
        left_out: Keys of the input that ``--key`` left out.
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


def target_format(request: Request, kind: Kind) -> Format:
    """Return the format of the output.

    Raises:
        UsageError: Neither asked for nor told by the ending.
    """
    known = request.to or ENDINGS.get(request.target.suffix.lower())
    if known is None and not request.target.suffix and kind != "fpformat":
        known = "fpformat"
    if known is None:
        choices = ", ".join(FORMATS)
        raise UsageError(f"{request.target}: its ending names no format; give --to ({choices})")
    if request.max_shard_nbytes is not None and (
        known != "safetensors" or request.target.suffix == ".safetensors"
    ):
        raise UsageError("--max-shard-size is for a safetensors directory: name one as DST")
    return known


def _lines(problems: Iterable[tuple[StatePath, str]]) -> list[str]:
    return [f"{path_text(path)}: {reason}" if path else reason for path, reason in problems]


def _refuse_or_skip(state: State, request: Request, path: StatePath) -> list[str]:
    """Return what of the input was left out; refuse it unless that was allowed."""
    lines = _lines(
        (place, why) for place, why in state.problems if not place or place[: len(path)] == path
    )
    if lines and request.unsupported is Unsupported.REFUSE:
        detail = f"{len(lines):,} of its values have no form in fpformat and are never executed"
        hint = "--skip-unsupported leaves them out"
        raise SourceError("unsupported", state.where, f"{detail}; {hint}", lines)
    return lines


def _fit(state: State, to: Format, request: Request) -> list[str]:
    """Return what the output cannot hold, taken out of the state; refuse unless allowed.

    spec: CNV-2, CNV-20, CNV-25
    """
    lines: list[str] = []
    if to == "safetensors":
        others = others_of(state)
        lines = others.values
        if others.attributes:
            text = "attributes of ordered dictionaries are not kept in safetensors"
            state.warnings.append(f"{state.where}: {text}: {', '.join(others.attributes)}")
    elif to == "torch":
        state.node, problems = prune(state.node, reason_to_refuse)
        lines = _lines(problems)
    if lines and request.unsupported is Unsupported.REFUSE:
        what = "tensors only" if to == "safetensors" else "what weights_only accepts"
        detail = f"{to} holds {what}; {len(lines):,} other values are in the way"
        hint = "--key selects a part, --skip-unsupported leaves them out"
        raise TargetError("unsupported", state.where, f"{detail}; {hint}", lines)
    return lines


def _write(state: State, to: Format, request: Request, progress: Progress) -> Written:
    if to == "fpformat":
        return write_fpformat(state, request.target, progress=progress)
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
    """Return the keys that lie beside a path, level by level."""
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
    to = target_format(request, kind)
    with ExitStack() as stack:
        state = _OPENERS[kind](place, stack)
        path, left_out = _select(state, request)
        skipped = _refuse_or_skip(state, request, path)
        skipped += _fit(state, to, request)
        tensors = [
            state.tensors[ref.index]
            for _, ref in walk_tensors(state.node)
            if to != "safetensors" or not isinstance(ref, ArrayRef)
        ]
        nbytes = sum(tensor.nbytes for tensor in tensors)
        with show_progress(nbytes) as progress:
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
