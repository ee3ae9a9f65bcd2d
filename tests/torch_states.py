"""Comparing states bit by bit: types, order and types of keys, bytes of tensors, shared memory."""

import struct
from collections import OrderedDict

import numpy as np
import torch


def raw_bytes(tensor):
    """Return the bytes that a tensor means, in C order, whatever its strides are."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    view = tensor.view(bits.get(tensor.dtype.itemsize, torch.complex128))
    return np.ascontiguousarray(view.numpy()).tobytes()


def leaves(state, path=()):
    """Yield the path and value of every leaf and empty container."""
    if isinstance(state, dict | list | tuple) and type(state) is not torch.Size and state:
        pairs = state.items() if isinstance(state, dict) else enumerate(state)
        for key, value in pairs:
            yield from leaves(value, (*path, (type(state), type(key), key)))
        if type(state) is OrderedDict and vars(state):
            yield from leaves(dict(vars(state)), (*path, (type(state), str, "attributes")))
    else:
        yield path, state


def differences(one, other):
    """Return the paths at which two states differ; a state equals itself."""
    mine, theirs = list(leaves(one)), list(leaves(other))
    if [path for path, _ in mine] != [path for path, _ in theirs]:
        return ["the paths differ", [path for path, _ in mine], [path for path, _ in theirs]]
    pairs = zip(mine, theirs, strict=True)
    return [path for (path, value), (_, again) in pairs if not same_leaf(value, again)]


def same_leaf(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (
            (one.dtype, one.shape) == (other.dtype, other.shape)
            and raw_bytes(one) == raw_bytes(other)
            and (type(one) is torch.Tensor or one.requires_grad == other.requires_grad)
        )
    if isinstance(one, np.ndarray | np.generic):
        # Byte order is not kept: what was big-endian comes back little-endian.
        little = one.dtype.newbyteorder("<")
        forms = [(value.shape, value.astype(little).tobytes()) for value in (one, other)]
        return little == other.dtype.newbyteorder("<") and forms[0] == forms[1]
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    if isinstance(one, complex):
        return struct.pack("<dd", one.real, one.imag) == struct.pack("<dd", other.real, other.imag)
    return bool(one == other)


def shared(state):
    """Return the groups of names whose tensors share a storage."""
    groups = {}
    for path, value in leaves(state):
        if isinstance(value, torch.Tensor) and value.numel():
            place = value.untyped_storage().data_ptr()
            groups.setdefault(place, []).append("/".join(str(key) for *_, key in path))
    return sorted(sorted(names) for names in groups.values() if len(names) > 1)
