"""A checkpoint of fpformat as an input: the state of one rank, each byte verified as it is read."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np

from fpformat.dtypes import tensor_nbytes
from fpformat.read.reader import Checkpoint, open_checkpoint
from fpformat.read.trees import StateTree
from fpformat.records.model import Box, TensorEntry, TensorKey, View
from fpformat.records.nodes import TensorRef
from fpformat_tools.streams.state import State, Tensor, whole
from fpformat_tools.streams.trees import renumber
from fpformat_tools.text import count_text, shown

_STEP_NBYTES: Final = 8 * 1024 * 1024


class CheckpointStorage:
    """The bytes of one tensor of a checkpoint, read and verified in bounded parts.

    The reader takes boxes, so the rows that hold the wanted bytes are read: the first dimensions
    are stepped through one by one until a row is small enough.
    """

    def __init__(self, checkpoint: Checkpoint, entry: TensorEntry) -> None:
        self._checkpoint = checkpoint
        self._entry = entry
        self.nbytes = tensor_nbytes(entry.dtype, entry.shape, where=shown(entry.name))
        self._axis = 0
        self._row_nbytes = self.nbytes
        for axis, dim in enumerate(entry.shape):
            self._axis = axis
            self._row_nbytes //= max(dim, 1)
            if self._row_nbytes <= _STEP_NBYTES:
                break

    def read_at(self, *, offset: int, nbytes: int) -> memoryview:
        """Return exactly `nbytes` bytes from `offset`."""
        if self.nbytes <= _STEP_NBYTES or not self._entry.shape:
            read = self._checkpoint.read(self._entry.key)
            return read[offset : offset + nbytes].data
        out = np.empty(nbytes, dtype=np.uint8)
        done = 0
        while done < nbytes:
            done += self._read_rows(out, done=done, offset=offset + done)
        return out.data

    def _read_rows(self, out: "np.ndarray[Any, Any]", *, done: int, offset: int) -> int:
        """Read rows from `offset` on into ``out[done:]``; return the number of bytes taken."""
        shape = self._entry.shape
        first, skip = divmod(offset, self._row_nbytes)
        outer, row = divmod(first, shape[self._axis])
        wanted = len(out) - done + skip
        count = max(min(-(-wanted // self._row_nbytes), shape[self._axis] - row), 1)
        start = (*np.unravel_index(outer, shape[: self._axis]),) if self._axis else ()
        box = Box(
            start=(*map(int, start), row, *(0,) * (len(shape) - self._axis - 1)),
            shape=(*(1,) * self._axis, count, *shape[self._axis + 1 :]),
        )
        part = self._checkpoint.read(self._entry.key, box=box)[skip:]
        taken = min(len(part), len(out) - done)
        out[done : done + taken] = part[:taken]
        return taken


class _Collector:
    """Makes tensors and storages of entries, each owner of bytes once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.tensors: list[Tensor] = []
        self.storages: list[CheckpointStorage] = []
        self._checkpoint = checkpoint
        self._bases: dict[TensorKey, int] = {}

    def add(self, key: TensorKey) -> None:
        entry = self._checkpoint.entry(key)
        owner = entry if entry.target is None else self._checkpoint.entry(entry.target)
        if owner.key not in self._bases:
            self._bases[owner.key] = len(self.storages)
            self.storages.append(CheckpointStorage(self._checkpoint, owner))
        base = self._bases[owner.key]
        if isinstance(entry.alias, View):
            tensor = Tensor(
                base=base,
                dtype=entry.dtype,
                shape=entry.shape,
                strides=entry.alias.strides,
                offset=entry.alias.offset,
            )
        else:
            tensor = whole(base=base, dtype=entry.dtype, shape=entry.shape)
        self.tensors.append(tensor)


def open_fpformat(path: Path, stack: ExitStack) -> State:
    """Return the state of a checkpoint; what lies beside it is named.

    Args:
        path: The checkpoint's directory.
        stack: Keeps it open and closes it.

    Raises:
        FormatError: The first broken clause.
    """
    checkpoint = stack.enter_context(open_checkpoint(path))
    tree = checkpoint.tree()
    collector = _Collector(checkpoint)
    if tree is None:
        every = checkpoint.keys()
        keys = [key for key in every if key[1] is None and not checkpoint.entry(key).hidden]
        tree = StateTree(
            node={name: TensorRef(position) for position, (name, _) in enumerate(keys)}, keys=keys
        )
        _add_all(collector, keys)
        node = tree.node
    else:
        node = _referenced(tree, collector)
    manifest = checkpoint.manifest
    return State(
        where=str(path),
        node=node,
        tensors=collector.tensors,
        storages=collector.storages,
        user=dict(manifest.user),
        step=manifest.step,
        beside=_beside(checkpoint),
    )


def _add_all(collector: _Collector, keys: list[TensorKey]) -> None:
    for key in keys:
        collector.add(key)


def _referenced(tree: StateTree, collector: _Collector) -> Any:
    """Collect the tensors that a tree refers to; return the tree with their new numbers."""
    numbers: dict[int, int] = {}

    def number(index: int) -> int:
        if index not in numbers:
            numbers[index] = len(collector.tensors)
            collector.add(tree.keys[index])
        return numbers[index]

    return renumber(tree.node, number)


def _beside(checkpoint: Checkpoint) -> tuple[str, ...]:
    others = [rank for rank in checkpoint.tree_ranks() if rank > 0]
    trees = [f"the separate state of rank {rank}" for rank in others]
    named = [f"object {shown(name)}" for name, _ in checkpoint.objects() if name != "tree"]
    if checkpoint.tree_ranks():
        return (*trees, *named)
    every = checkpoint.keys()
    scoped = [key for key in every if key[1] is not None]
    own = [f"{count_text(len(scoped), 'tensor')} of single ranks"] if scoped else []
    return (*own, *named)
