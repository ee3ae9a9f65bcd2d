"""State -> save plan and sources: everything between the caller's objects and the writer."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypeAlias

from fpformat.errors import PlanError, SaveError
from fpformat.limits import MAX_INT
from fpformat.names import TREE_NAME
from fpformat.records.fold import map_leaves
from fpformat.records.layout import plan_checkpoint, sort_key
from fpformat.records.model import ObjectEntry, SavePlan, ShardKey, ShardSource, TensorEntry
from fpformat.records.nodes import ArrayRef, Node, ParameterRef, TensorRef
from fpformat.records.tree import dump_tree
from fpformat.rules.ties import Ties
from fpformat_io.control import SaveControl
from fpformat_io.engine import EngineReport, write_checkpoint
from fpformat_io.errors import EngineError, engine_error
from fpformat_io.session.saves import SaveReport
from fpformat_io.torch.flatten import FlatState, Slot, flatten
from fpformat_io.torch.sharing import tie_slots

_TREE: Final = 1
_MAX_METADATA_NBYTES: Final = 8 * 1024 * 1024

Sources: TypeAlias = Callable[[list[Slot]], dict[str, ShardSource]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A state that is ready to be written."""

    plan: SavePlan
    sources: Mapping[ShardKey, ShardSource]
    tensor_count: int
    untied: tuple[str, ...]


def capture(
    state: Any, *, step: int | None, metadata: Mapping[str, str] | None, sources: Sources
) -> Capture:
    """Take a state apart and plan its save.

    Args:
        state: What the caller wants to save.
        step: Training step for the manifest.
        metadata: Strings for the manifest.
        sources: Makes the sources of the tensors that own bytes.

    Raises:
        PlanError: The state, the step or the metadata cannot be stored.
        StagingError: The state could not be copied.
    """
    _check_step(step)
    user = _checked_metadata(metadata)
    flat = flatten(state)
    ties, bases = tie_slots(flat.slots)
    entries = sorted(_entries(flat, ties, bases), key=sort_key)
    payload = dump_tree(_renumbered(flat, entries))
    plan = plan_checkpoint(
        entries,
        [ObjectEntry(name=TREE_NAME, kind=_TREE, payload=payload)],
        step=step,
        user=user,
    )
    owning = [slot for slot in flat.slots if slot.name not in ties.aliases]
    by_name = sources(owning + bases)
    return Capture(
        plan=plan,
        sources={((name, None), None): source for name, source in by_name.items()},
        tensor_count=len(flat.slots),
        untied=tuple(ties.untied),
    )


def write(
    path: "str | PathLike[str]",
    ready: Capture,
    save_id: bytes | None = None,
    control: SaveControl | None = None,
) -> EngineReport:
    """Write and commit a captured state.

    Raises:
        PlanError: Something stands at `path`.
        EngineError: The operating system failed; nothing was committed.
    """
    try:
        return write_checkpoint(
            Path(path), ready.plan, ready.sources, save_id=save_id, control=control
        )
    except (PlanError, EngineError):
        raise
    except OSError as error:
        raise engine_error(SaveError(os.fspath(path), "saving", error)) from error
    except Exception as error:
        raise engine_error(error) from error


def report_of(
    written: EngineReport, ready: Capture, *, begin: float, stall_seconds: float | None = None
) -> SaveReport:
    """Return the report of a save that began at `begin` on the performance counter."""
    seconds = time.perf_counter() - begin
    return SaveReport(
        path=written.path,
        checkpoint_id=written.checkpoint_id,
        nbytes=written.nbytes,
        data_nbytes=written.data_nbytes,
        tensor_count=ready.tensor_count,
        seconds=seconds,
        stall_seconds=seconds if stall_seconds is None else stall_seconds,
        untied=ready.untied,
        warnings=written.warnings,
        mode=written.mode,
        bandwidth_bytes_per_s=written.nbytes / written.seconds,
    )


def _check_step(step: int | None) -> None:
    """Raise PlanError for a step that a manifest cannot hold."""
    if step is not None and (type(step) is not int or not 0 <= step <= MAX_INT):
        raise PlanError(f"step={step!r}: expected an int from 0 to 2^53-1, or None")


def _checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise PlanError(
            f"metadata is a {type(metadata).__name__}, expected a mapping of str to str"
        )
    problems = []
    for key, value in metadata.items():
        for text in (key, value):
            if type(text) is not str:
                problems.append(f"{key!r}: {text!r} is a {type(text).__name__}, expected str")
            elif not text.isascii() and text != text.encode(errors="replace").decode():
                problems.append(f"{key!r}: {text!r} has a lone surrogate, so no UTF-8 form")
    if problems:
        raise PlanError("metadata must map str to str:", *problems)
    nbytes = sum(len(key.encode()) + len(text.encode()) for key, text in metadata.items())
    if nbytes > _MAX_METADATA_NBYTES:
        raise PlanError(f"metadata has {nbytes} bytes, at most {_MAX_METADATA_NBYTES} fit")
    return dict(metadata)


def _entries(flat: FlatState, ties: Ties, bases: list[Slot]) -> list[TensorEntry]:
    visible = [
        TensorEntry(
            name=slot.name,
            dtype=slot.dtype,
            shape=tuple(slot.value.shape),
            alias=ties.aliases.get(slot.name),
        )
        for slot in flat.slots
    ]
    hidden = [
        TensorEntry(name=base.name, dtype=base.dtype, shape=tuple(base.value.shape), hidden=True)
        for base in bases
    ]
    return visible + hidden


def _renumbered(flat: FlatState, entries: list[TensorEntry]) -> Node:
    """Return the tree with positions in the table instead of numbers of slots."""
    places = {entry.name: place for place, entry in enumerate(entries)}
    table = [places[slot.name] for slot in flat.slots]

    def change(node: Node) -> Node:
        if isinstance(node, TensorRef):
            return TensorRef(table[node.index])
        if isinstance(node, ParameterRef):
            return ParameterRef(table[node.index], node.requires_grad)
        if isinstance(node, ArrayRef):
            return ArrayRef(table[node.index])
        return node

    return map_leaves(flat.node, change)
