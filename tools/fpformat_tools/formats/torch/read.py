"""Files of `torch.save`, zip and legacy, read without torch and without executing their pickle."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from fpformat.dtypes import DType
from fpformat.limits import MAX_INT
from fpformat.records.nodes import Node
from fpformat_tools.errors import SourceError
from fpformat_tools.formats.torch.archive import Archive, CheckedRange, open_archive
from fpformat_tools.formats.torch.objects import ObjectReader
from fpformat_tools.formats.torch.tensors import FindStorage, TensorReader
from fpformat_tools.formats.torch.types import DTYPE_OF_STORAGE
from fpformat_tools.pickles.interpreter import (
    MAX_MEMORY_NBYTES,
    MAX_PICKLE_NBYTES,
    PickleMachine,
    PickleStream,
)
from fpformat_tools.pickles.values import Global, Persistent
from fpformat_tools.streams.ranges import Input, StoredRange
from fpformat_tools.streams.state import PYTORCH, State, Storage

NOTES_NAME: Final = "fpformat.json"
MAX_INFLATED_NBYTES: Final = 64 * 1024 * 1024
MAX_NOTES_NBYTES: Final = 16 * 1024 * 1024
LEGACY_MAGIC: Final = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL: Final = 1001


def _read(value: Any, find: FindStorage, *, pickle_nbytes: int, where: str) -> State:
    tensors = TensorReader(find, where=where)
    objects = ObjectReader(tensors, pickle_nbytes=pickle_nbytes, where=where)
    node: Node = objects.read(value)
    return State(
        where=where,
        node=node,
        tensors=tensors.tensors,
        storages=tensors.storages,
        framework=PYTORCH,
        warnings=tensors.warnings + objects.warnings,
        problems=objects.problems,
    )


def open_zip(path: Path, stack: ExitStack) -> State:
    """Read the state of a zip file of `torch.save`.

    Args:
        path: The file.
        stack: Keeps it open and closes it.

    Raises:
        SourceError: It is cut, damaged, of another kind, or its tensors do not fit its storages.
    """
    source = stack.enter_context(Input(path))
    archive = open_archive(source)
    where = str(path)
    pickled = archive.open("data.pkl")
    limit = MAX_PICKLE_NBYTES if archive.is_stored("data.pkl") else MAX_INFLATED_NBYTES
    if pickled.nbytes > limit:
        detail = f"its pickle of {pickled.nbytes:,} bytes is over the limit"
        raise SourceError("limit", where, detail)
    pickled.check()
    value = PickleMachine(PickleStream(pickled, start=0, where=f"{where}: data.pkl")).run()
    state = _read(value, _archived(archive), pickle_nbytes=pickled.nbytes, where=where)
    _check_partial(state)
    _read_notes(archive, state)
    return state


def _read_notes(archive: Archive, state: State) -> None:
    """Take over the step and the strings that fpconvert put beside the pickle."""
    if NOTES_NAME not in archive.members:
        return
    stretch = archive.open(NOTES_NAME)
    try:
        notes = json.loads(stretch.read_at(offset=0, nbytes=min(stretch.nbytes, MAX_NOTES_NBYTES)))
        step, user = notes.get("step"), notes.get("user", {})
        strings = {key: text for key, text in user.items() if isinstance(text, str)}
    except (ValueError, AttributeError, RecursionError):
        strings, user, step = {}, {}, "unknown"
    try:
        "".join((*strings, *strings.values())).encode()
    except UnicodeEncodeError as error:
        where = f"{state.where}: {NOTES_NAME}"
        raise SourceError("malformed", where, "has text with a lone surrogate") from error
    state.user = strings
    state.step = step if type(step) is int and 0 <= step <= MAX_INT else None
    if state.step != step or len(strings) < len(user):
        state.warnings.append(f"{state.where}: its {NOTES_NAME} makes no sense; left out")


def _archived(archive: Archive) -> FindStorage:
    def find(key: str, dtype: DType, count: int) -> Storage:
        stretch = archive.open(f"data/{key}")
        if stretch.nbytes != count * dtype.nbytes:
            where = f"{archive.source.path}: storage {key}"
            detail = f"has {stretch.nbytes:,} bytes, expected {count:,} of {dtype.nbytes}"
            raise SourceError("corrupt", where, detail)
        return stretch

    return find


def _check_partial(state: State) -> None:
    """Check the checksum of each storage now that no tensor uses from end to end.

    The others are checked while the output is written, in the same pass.
    """
    used: set[int] = set()
    passed: set[int] = set()
    for tensor in state.tensors:
        if not tensor.is_empty:
            used.add(tensor.base)
            if tensor.reach == (0, state.storages[tensor.base].nbytes) and tensor.is_contiguous:
                passed.add(tensor.base)
    for base in used - passed:
        storage = state.storages[base]
        if isinstance(storage, CheckedRange):
            storage.check()


def _walk_storages(value: Any) -> dict[str, DType]:
    """Return the element type of every storage key that a pickle mentions."""
    found: dict[str, DType] = {}
    pending: list[Any] = [value]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        if isinstance(value, Persistent):
            parts = value.identity
            if isinstance(parts, tuple) and len(parts) >= 3 and isinstance(parts[1], Global):
                dtype = DTYPE_OF_STORAGE.get(parts[1].name)
                if dtype is not None and isinstance(parts[2], str):
                    found[parts[2]] = dtype
        elif isinstance(value, dict):
            seen.add(id(value))
            pending.extend(value.values())
        elif isinstance(value, list | tuple):
            seen.add(id(value))
            pending.extend(value)
        elif hasattr(value, "states"):
            seen.add(id(value))
            pending += [*value.arguments, *value.states, *value.members]
            pending += [part for pair in value.pairs for part in pair]
    return found


def _legacy_parts(source: Input) -> tuple[Any, list[str], int]:
    """Return the state's value, the storage keys in file order, and where storages begin."""
    where = str(source.path)
    stretch = StoredRange(source, start=0, nbytes=source.nbytes)
    position = 0
    values: list[Any] = []
    left_nbytes = MAX_MEMORY_NBYTES
    for _ in range(5):
        stream = PickleStream(stretch, start=position, where=where)
        machine = PickleMachine(stream, left_nbytes=left_nbytes)
        values.append(machine.run())
        position, left_nbytes = stream.position, machine.left_nbytes
    magic, protocol, system, value, keys = values
    if magic != LEGACY_MAGIC or protocol != LEGACY_PROTOCOL or not isinstance(system, dict):
        raise SourceError("malformed", where, "does not begin as a legacy file of torch.save")
    if system.get("little_endian") is not True:
        raise SourceError("unsupported", where, "was saved on a big-endian machine")
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise SourceError("malformed", where, "its list of storages is no list of text")
    return value, keys, position


def open_legacy(path: Path, stack: ExitStack) -> State:
    """Read the state of a legacy file of `torch.save` (before torch 1.6, or by request).

    Args:
        path: The file.
        stack: Keeps it open and closes it.

    Raises:
        SourceError: It is cut, damaged, or its tensors do not fit its storages.
    """
    source = stack.enter_context(Input(path))
    where = str(path)
    value, keys, position = _legacy_parts(source)
    pickle_nbytes = position
    dtypes = _walk_storages(value)
    found: dict[str, StoredRange] = {}
    for key in keys:
        if key not in dtypes:
            detail = f"storage {key} is of an unknown type, so the ones after it cannot be found"
            raise SourceError("unsupported", where, detail)
        count = int.from_bytes(source.read_at(offset=position, nbytes=8), "little")
        nbytes = count * dtypes[key].nbytes
        if position + 8 + nbytes > source.nbytes:
            needed = f"storage {key} needs bytes up to {position + 8 + nbytes:,}"
            raise SourceError("corrupt", where, f"truncated: {needed}, it has {source.nbytes:,}")
        found[key] = StoredRange(source, start=position + 8, nbytes=nbytes)
        position += 8 + nbytes
    return _read(value, _listed(found, where), pickle_nbytes=pickle_nbytes, where=where)


def _listed(found: dict[str, StoredRange], where: str) -> Callable[[str, DType, int], Storage]:
    def find(key: str, dtype: DType, count: int) -> Storage:
        if key not in found or found[key].nbytes != count * dtype.nbytes:
            detail = f"storage {key} is missing or has another size than {count:,} elements"
            raise SourceError("malformed", where, detail)
        return found[key]

    return find
