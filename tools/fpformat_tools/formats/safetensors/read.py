"""Safetensors as an input: one file, or a directory with an index. The state is flat."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from fpformat.records.nodes import Node, TensorRef
from fpformat_tools.formats.safetensors.file import SafetensorsFile, open_safetensors
from fpformat_tools.formats.safetensors.header import HeaderEntry
from fpformat_tools.formats.safetensors.index import open_indexed
from fpformat_tools.formats.safetensors.write import ALIASES_KEY, STEP_KEY, is_reserved
from fpformat_tools.streams.ranges import steps
from fpformat_tools.streams.state import State, Tensor, whole
from fpformat_tools.text import listed


def open_file(path: Path, stack: ExitStack) -> State:
    """Return the state in one safetensors file, kept open by `stack`."""
    opened = open_safetensors(path)
    stack.callback(opened.source.close)
    tensors = [(entry, opened) for entry in opened.header.entries]
    return _state(str(path), tensors, opened.header.metadata, opened.header.warnings)


def open_index(path: Path, stack: ExitStack) -> State:
    """Return the state that an index describes, its files kept open by `stack`."""
    model = open_indexed(path, stack)
    return _state(str(path), model.tensors, model.metadata, model.warnings)


def _state(
    where: str,
    tensors: Sequence[tuple[HeaderEntry, SafetensorsFile]],
    metadata: Mapping[str, str],
    warnings: Sequence[str],
) -> State:
    state = State(
        where=where,
        node=_flat([entry.name for entry, _ in tensors]),
        tensors=[
            whole(base=position, dtype=entry.dtype, shape=entry.shape)
            for position, (entry, _) in enumerate(tensors)
        ],
        storages=[opened.stretch(entry) for entry, opened in tensors],
        warnings=list(warnings),
    )
    _take_metadata(state, metadata, [entry.name for entry, _ in tensors])
    return state


def _take_metadata(state: State, metadata: Mapping[str, str], names: Sequence[str]) -> None:
    """Take over the strings; those that fpconvert wrote itself mean something.

    spec: CNV-11
    """
    state.user = {key: text for key, text in metadata.items() if not is_reserved(key)}
    reserved = {key: text for key, text in metadata.items() if is_reserved(key)}
    aliases, step = reserved.pop(ALIASES_KEY, None), reserved.pop(STEP_KEY, None)
    if step is not None and step.isascii() and step.isdigit() and len(step) < 16:
        state.step = int(step)
    elif step is not None:
        reserved[STEP_KEY] = step
    if aliases is not None:
        _tie(state, names, aliases)
    if reserved:
        state.warnings.append(f"{state.where}: reserved keys, left out: {listed(reserved)}")


def _flat(names: Sequence[str]) -> Node:
    return {name: TensorRef(position) for position, name in enumerate(names)}


def _tie(state: State, names: Sequence[str], aliases: str) -> None:
    """Tie the tensors that were tied before, if their bytes are still equal.

    spec: CNV-17
    """
    try:
        recorded = json.loads(aliases)
        pairs = [(str(one), str(two)) for one, two in recorded.items()]
    except (ValueError, AttributeError, RecursionError):
        state.warnings.append(f"{state.where}: {ALIASES_KEY} is no JSON object; left out")
        return
    positions = {name: position for position, name in enumerate(names)}
    tensors = list(state.tensors)
    differing = []
    for one, two in pairs:
        # One file of several may hold neither of the two names.
        if one not in positions or two not in positions:
            continue
        alias, target = tensors[positions[one]], tensors[positions[two]]
        if _is_same(state, alias, target):
            tensors[positions[one]] = target
        else:
            differing.append(one)
    if differing:
        text = "were tied and differ now, so they stay apart"
        state.warnings.append(f"{state.where}: {listed(differing)} {text}")
    state.tensors = tensors


def _is_same(state: State, one: Tensor, two: Tensor) -> bool:
    if one.dtype != two.dtype or one.shape != two.shape or one.is_empty:
        return False
    first, second = state.storages[one.base], state.storages[two.base]
    return all(
        first.read_at(offset=offset, nbytes=nbytes) == second.read_at(offset=offset, nbytes=nbytes)
        for offset, nbytes in steps(one.nbytes)
    )
