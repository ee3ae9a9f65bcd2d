"""Saving and loading a whole state in one call."""

import time
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

import torch

from fpformat.arguments import check_kind, checked_int, checked_path
from fpformat.errors import PlanError
from fpformat.read.reader import Checkpoint, open_checkpoint
from fpformat.records.model import TensorKey
from fpformat.records.nodes import Node, TensorRef
from fpformat_io.read.select import checked_keys, select_nodes
from fpformat_io.session.saves import SaveReport
from fpformat_io.torch.plan import prepare
from fpformat_io.torch.restore import restore
from fpformat_io.torch.sources import live_sources
from fpformat_io.torch.write import report_of, write


def save(
    state: Any,
    path: "str | PathLike[str]",
    *,
    step: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> SaveReport:
    """Save a state; it is committed and durable when this returns.

    The state is any nesting of dict, OrderedDict, Counter, list and tuple over tensors,
    parameters, numpy arrays and scalars, and Python's plain values. It is read in place and must
    not change meanwhile; a tensor that is not contiguous host memory is copied when it is written,
    a few megabytes at a time. Tensors come back contiguous; ``requires_grad`` is kept for
    parameters, other attributes set on tensors are not.

    Args:
        state: The state.
        path: Directory to create; nothing may stand there.
        step: Training step, from 0 to 2^53-1.
        metadata: Strings for the manifest.

    Returns:
        Sizes and times.

    Raises:
        PlanError: Something in the state cannot be stored, all of it is listed; `path` exists; or
            an argument is of a wrong kind. Nothing was written.
        EngineError: The operating system failed. Nothing was committed, and what was written is
            removed again.
    """
    begin = time.perf_counter()
    path = checked_path(path)
    ready = prepare(state, step=step, metadata=metadata, sources=live_sources)
    return report_of(write(path, ready), ready, begin=begin)


def load(
    path: "str | PathLike[str]",
    *,
    device: "str | torch.device" = "cpu",
    keys: Iterable[str] | None = None,
    rank: int = 0,
) -> Any:
    """Load a state, nested as it was saved, every byte verified.

    Tensors that shared memory share a storage again. Each tensor with memory of its own begins at a
    multiple of 64 bytes. A checkpoint without a state tree gives a flat dict of tensors.

    Args:
        path: The checkpoint.
        device: Where tensors go. On ``"meta"`` they have no data and none is read; numpy arrays
            are always read.
        keys: Names of tensors or other values, or of the containers that hold them, such as
            ``"model"`` or ``"model/layers.0.weight"`` or ``"optimizer/state/0"``. The elements of
            a path are joined by ``/``; one inside a key is written ``~1``, and ``~`` is ``~0``.
            Only these are read; dicts lack the others, places of lists and tuples hold None.
            Tensors of a subclass are chosen whole.
        rank: Whose state, when the ranks of a run saved different ones.

    Returns:
        The state.

    Raises:
        FormatError: The first fault found, with its clause.
        PlanError: `keys` or `rank` name nothing, a tensor subclass is not registered, or an
            argument is of a wrong kind.
    """
    path = checked_path(path)
    place = checked_device(device)
    keys = None if keys is None else checked_keys(keys)
    rank = checked_int("rank", rank, least=0)
    with open_checkpoint(path) as checkpoint:
        node, table = state_tree(checkpoint, rank)
        if keys is not None:
            node = select_nodes(node, keys)
        return restore(checkpoint, node, table, place)


def checked_device(device: "str | torch.device") -> torch.device:
    """Return the device; PlanError when torch does not know it or cannot use it here."""
    check_kind("device", device, str | torch.device, "a str or a torch.device")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except Exception as error:
        text = str(error).splitlines() or [type(error).__name__]
        raise PlanError(f"device={device!r}: {text[0]}") from error
    return place


def state_tree(checkpoint: Checkpoint, rank: int) -> "tuple[Node, list[TensorKey]]":
    """Return the tree of a rank and the keys its numbers stand for; a flat dict without a tree."""
    tree = checkpoint.tree(rank)
    if tree is not None:
        return tree.node, list(tree.keys)
    every = checkpoint.keys()
    table = [key for key in every if key[1] in (None, rank) and not checkpoint.entry(key).hidden]
    return {name: TensorRef(index) for index, (name, _) in enumerate(table)}, table
