"""The tensors of a flat state that share memory, and the entries that a checkpoint has of all.

What shares what is decided by `fpformat.rules.ties`; here are only the addresses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fpformat.records.fold import map_leaves
from fpformat.records.layout import sort_key
from fpformat.records.model import TensorEntry
from fpformat.records.nodes import ArrayRef, Node, ParameterRef, TensorRef
from fpformat.rules.ties import Footprint, HiddenBase, Ties, find_ties
from fpformat_io.torch.dtypes import to_torch
from fpformat_io.torch.flatten import FlatState, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedState:
    """A state whose tensors are entries of a table.

    Attributes:
        node: The tree; the numbers in it are positions in `entries`.
        entries: In table order: tensors, aliases, views and hidden bases.
        owners: The slots of the entries that have bytes of their own.
        tensor_count: Names of tensors and arrays, tied ones included.
        untied: Names that shared memory and are stored apart.
    """

    node: Node
    entries: tuple[TensorEntry, ...]
    owners: tuple[Slot, ...]
    tensor_count: int
    untied: tuple[str, ...]


def tie(flat: FlatState) -> TiedState:
    """Find the tensors of a state that share memory, and number its entries."""
    ties, bases = tie_slots(flat.slots)
    entries = tuple(sorted(_entries(flat, ties, bases), key=sort_key))
    return TiedState(
        node=_renumbered(flat, entries),
        entries=entries,
        owners=(*(slot for slot in flat.slots if slot.name not in ties.aliases), *bases),
        tensor_count=len(flat.slots),
        untied=tuple(ties.untied),
    )


def tie_slots(slots: Sequence[Slot]) -> tuple[Ties, list[Slot]]:
    """Find the tensors that share memory.

    Args:
        slots: The tensors and arrays of a state; arrays and empty tensors are never tied.

    Returns:
        What was found, and a slot for each hidden base: a view of the storage it stands for.
    """
    live = {
        slot.name: slot.value
        for slot in slots
        if isinstance(slot.value, torch.Tensor) and slot.value.numel()
    }
    ties = find_ties(_footprint(slot, live[slot.name]) for slot in slots if slot.name in live)
    return ties, [_base_slot(base, live[base.holder]) for base in ties.bases]


def _footprint(slot: Slot, tensor: torch.Tensor) -> Footprint:
    storage = tensor.untyped_storage()
    return Footprint(
        name=slot.name,
        dtype=slot.dtype,
        space=tensor.device,
        start=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        room=(storage.data_ptr(), storage.data_ptr() + storage.nbytes()),
        is_plain=not (tensor.is_conj() or tensor.is_neg()),
    )


def _base_slot(base: HiddenBase, holder: torch.Tensor) -> Slot:
    storage = holder.untyped_storage()
    offset = (base.start - storage.data_ptr()) // base.dtype.nbytes
    tensor = torch.empty(0, dtype=to_torch(base.dtype, where=base.name), device=holder.device)
    return Slot(
        name=base.name,
        value=tensor.set_(storage, offset, base.shape, (1,)),
        dtype=base.dtype,
    )


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


def _renumbered(flat: FlatState, entries: Sequence[TensorEntry]) -> Node:
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
