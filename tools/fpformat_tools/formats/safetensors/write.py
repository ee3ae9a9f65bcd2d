"""A state written as safetensors: one file, or a directory in the manner of the Hub.

Tensors stand in the order in which the library places them (element types from wide to narrow,
then names), so that each is aligned, and a file that the library wrote comes back byte for byte.
Tied tensors are written at every name; the key ``fpformat.aliases`` in ``__metadata__`` holds a
JSON object of name to name, by which reading ties them again. ``fpformat.step`` is the step.
Where there is metadata at all it has the key ``format``, as transformers refuses any other.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fpformat_tools.errors import TargetError
from fpformat_tools.formats.interface import Target, Written
from fpformat_tools.formats.safetensors.flat_names import flat_tensors
from fpformat_tools.formats.safetensors.header import (
    DTYPE_ORDER,
    MAX_HEADER_NBYTES,
    METADATA_NAME,
    THEIRS,
)
from fpformat_tools.streams.gather import check_size, source_of
from fpformat_tools.streams.output import (
    OutputFile,
    check_space,
    new_directory,
    new_file,
    refuse_existing,
)
from fpformat_tools.streams.progress import Progress
from fpformat_tools.streams.ranges import steps
from fpformat_tools.streams.sharing import footprint
from fpformat_tools.streams.state import PYTORCH, State, Tensor
from fpformat_tools.text import listed, shown

ALIASES_KEY: Final = "fpformat.aliases"
STEP_KEY: Final = "fpformat.step"
FORMAT_KEY: Final = "format"
DEFAULT_SHARD_NBYTES: Final = 5_000_000_000
_RANK: Final = {name: rank for rank, name in enumerate(DTYPE_ORDER)}


def is_reserved(key: str) -> bool:
    """Whether a key of the metadata is one of fpconvert's own."""
    return key.startswith("fpformat.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """One file: tensors in their order and the header that describes them."""

    name: str
    tensors: Sequence[tuple[str, Tensor]]
    header: bytes

    @property
    def nbytes(self) -> int:
        """Size of the whole file."""
        return len(self.header) + sum(tensor.nbytes for _, tensor in self.tensors)


def _their_dtype(tensor: Tensor) -> str:
    return THEIRS.get(tensor.dtype.name, tensor.dtype.name)


def _their_shape(tensor: Tensor) -> list[int]:
    # Two values lie in a byte; safetensors counts the values.
    double = tensor.dtype.name in THEIRS
    return [*tensor.shape[:-1], tensor.shape[-1] * 2] if double else list(tensor.shape)


def _check_dtypes(tensors: Mapping[str, Tensor], where: str) -> None:
    problems = [
        f"{shown(name)} is {tensor.dtype.name}"
        for name, tensor in tensors.items()
        if _their_dtype(tensor) not in _RANK or (tensor.dtype.name in THEIRS and not tensor.shape)
    ]
    if problems:
        detail = f"safetensors has no such data type: {problems[0]}"
        raise TargetError("unsupported", where, detail, problems[1:])


def _tie(state: State, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return name -> first name in byte order of tied tensors; warn of sharing that is lost.

    spec: CNV-15, CNV-16
    """
    alike: dict[object, list[str]] = defaultdict(list)
    by_base: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for name, tensor in tensors.items():
        if not tensor.is_empty:
            alike[tensor.base, footprint(state, name, tensor).geometry].append(name)
    ties: dict[str, str] = {}
    for names in alike.values():
        first, *others = sorted(names, key=str.encode)
        ties.update(dict.fromkeys(others, first))
        by_base[tensors[first].base].append((*tensors[first].reach, first))
    if ties:
        kept = f"written at each name and recorded in {ALIASES_KEY}"
        state.warnings.append(f"{state.where}: tied tensors are {kept}: {listed(ties)}")
    loose = [name for spans in by_base.values() for name in _overlapping(sorted(spans))]
    if loose:
        text = "tensors that share memory with others are written as copies"
        state.warnings.append(f"{state.where}: {text}: {listed(loose)}")
    return ties


def _overlapping(spans: Sequence[tuple[int, int, str]]) -> Iterator[str]:
    end = -1
    for start, stop, name in spans:
        if start < end:
            yield name
        end = max(end, stop)


def dump_header(tensors: Sequence[tuple[str, Tensor]], metadata: Mapping[str, str]) -> bytes:
    """Return length and header of a file, padded with spaces to a multiple of 8."""
    entries: dict[str, object] = {METADATA_NAME: dict(sorted(metadata.items()))} if metadata else {}
    position = 0
    for name, tensor in tensors:
        stop = position + tensor.nbytes
        entries[name] = {
            "dtype": _their_dtype(tensor),
            "shape": _their_shape(tensor),
            "data_offsets": [position, stop],
        }
        position = stop
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _plan_file(
    name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], ties: Mapping[str, str]
) -> FilePlan:
    ordered = sorted(tensors.items(), key=lambda named: (_RANK[_their_dtype(named[1])], named[0]))
    strings = dict(metadata)
    if ties:
        strings[ALIASES_KEY] = json.dumps(ties, ensure_ascii=False, sort_keys=True)
    if strings:
        strings.setdefault(FORMAT_KEY, PYTORCH)
    header = dump_header(ordered, strings)
    if len(header) - 8 > MAX_HEADER_NBYTES:
        detail = f"its header would have {len(header) - 8:,} bytes; the limit is 100,000,000"
        raise TargetError("limit", name, detail)
    return FilePlan(name=name, tensors=ordered, header=header)


def split(tensors: Mapping[str, Tensor], *, limit_nbytes: int) -> list[dict[str, Tensor]]:
    """Divide tensors in their order; one that is over the limit stands alone, no part is empty.

    spec: CNV-21
    """
    parts: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if parts[-1] and used + tensor.nbytes > limit_nbytes:
            parts.append({})
            used = 0
        parts[-1][name] = tensor
        used += tensor.nbytes
    return parts


def _write_file(output: OutputFile, state: State, plan: FilePlan, progress: Progress) -> None:
    output.write(plan.header)
    for _, tensor in plan.tensors:
        if tensor.is_empty:
            continue
        source = source_of(state, tensor)
        for offset, nbytes in steps(tensor.nbytes):
            output.write(source.read(offset=offset, nbytes=nbytes))
            progress(nbytes)


def _prepare(state: State) -> tuple[dict[str, Tensor], dict[str, str], dict[str, str]]:
    tensors = flat_tensors(state)
    _check_dtypes(tensors, state.where)
    for tensor in tensors.values():
        check_size(state, tensor)
    metadata = {key: text for key, text in state.user.items() if not is_reserved(key)}
    if len(metadata) < len(state.user):
        names = listed(key for key in state.user if is_reserved(key))
        state.warnings.append(f"{state.where}: reserved keys, left out: {names}")
    if state.step is not None:
        metadata[STEP_KEY] = str(state.step)
    if state.framework is not None:
        metadata.setdefault(FORMAT_KEY, state.framework)
    return tensors, metadata, _tie(state, tensors)


def is_directory(path: Path) -> bool:
    """Whether the output at a path is a directory; one file has the ending of such."""
    return path.suffix != ".safetensors"


def write_safetensors(state: State, target: Target, progress: Progress) -> Written:
    """Write the tensors of a state as one file, or as a directory with the Hub's names.

    Raises:
        TargetError: safetensors cannot hold it, or the system refused to write.
    """
    refuse_existing(target.path)
    tensors, metadata, ties = _prepare(state)
    if not is_directory(target.path):
        plan = _plan_file(target.path.name, tensors, metadata, ties)
        return _write_lone(state, target.path, plan, progress)
    parts = split(tensors, limit_nbytes=target.max_shard_nbytes or DEFAULT_SHARD_NBYTES)
    plans = [
        _plan_file(name, part, metadata, ties)
        for name, part in zip(_shard_names(len(parts)), parts, strict=True)
    ]
    return _write_directory(state, target.path, plans, progress)


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]


def _write_lone(state: State, path: Path, plan: FilePlan, progress: Progress) -> Written:
    check_space(path, nbytes=plan.nbytes)
    with new_file(path, warn=state.warnings.append) as output:
        _write_file(output, state, plan, progress)
    return Written(paths=(path,), nbytes=plan.nbytes)


def _write_directory(
    state: State, path: Path, plans: Sequence[FilePlan], progress: Progress
) -> Written:
    """Write a model in files; where there are several they have an index."""
    nbytes = sum(plan.nbytes for plan in plans)
    check_space(path, nbytes=nbytes)
    with new_directory(path, warn=state.warnings.append) as folder:
        for plan in plans:
            with _new_part(folder / plan.name) as output:
                _write_file(output, state, plan, progress)
        if len(plans) > 1:
            _write_index(folder, plans)
    return Written(paths=(path,), nbytes=nbytes)


@contextmanager
def _new_part(path: Path) -> Iterator[OutputFile]:
    """Yield a file of a directory that is being written; it is synced when the block ends."""
    output = OutputFile(path)
    try:
        yield output
        output.finish()
    finally:
        output.close()


def _write_index(folder: Path, plans: Sequence[FilePlan]) -> None:
    placed = {name: plan.name for plan in plans for name, _ in plan.tensors}
    total = sum(tensor.nbytes for plan in plans for _, tensor in plan.tensors)
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
    with _new_part(folder / "model.safetensors.index.json") as output:
        text = json.dumps(document, ensure_ascii=False, indent=2) + "\n"
        output.write(text.encode())
