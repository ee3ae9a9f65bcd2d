"""The footprints of live tensors, and the memory below them that a checkpoint has to hold.

What shares what is decided by `fpformat.rules.ties`; here are only the addresses.
"""

from collections.abc import Sequence

import torch

from fpformat.rules.ties import Footprint, HiddenBase, Ties, find_ties
from fpformat_io.torch.dtypes import to_torch
from fpformat_io.torch.flatten import Slot


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
