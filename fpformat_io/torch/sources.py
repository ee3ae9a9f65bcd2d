"""Where the bytes of a save come from: live tensors, or copies made at the call."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fpformat.dtypes import numpy_dtype
from fpformat.model import ShardSource
from fpformat.source import BytesSource
from fpformat_io.errors import StagingError
from fpformat_io.torch.dtypes import byte_view, c_order, c_order_copy, is_plain
from fpformat_io.torch.flatten import Slot


def _array_bytes(slot: Slot, array: "np.ndarray[Any, Any]") -> memoryview:
    """Return an array's values, little-endian and in C order; a copy only when they are not."""
    ordered = np.ascontiguousarray(array, dtype=numpy_dtype(slot.dtype))
    return ordered.reshape(-1).view(np.uint8).data


def _tensor_bytes(tensor: torch.Tensor) -> memoryview:
    return byte_view(tensor).numpy().data


class _Scratch:
    """Holds the host copy of one tensor at a time, so that a save needs no more than that."""

    def __init__(self) -> None:
        self._owner: object = None
        self._copy = memoryview(b"")

    def bytes_of(self, owner: object, make: Callable[[], memoryview]) -> memoryview:
        """Return the bytes that `owner` made last, or make them in place of another's."""
        if owner is not self._owner:
            self._owner, self._copy = None, memoryview(b"")
            self._copy = make()
            self._owner = owner
        return self._copy


class LiveSource:
    """Reads a tensor where it is; what is no plain host memory is copied when it is its turn."""

    def __init__(self, slot: Slot, scratch: _Scratch) -> None:
        self._slot = slot
        self._scratch = scratch

    @property
    def buffer(self) -> memoryview | None:
        """The bytes of the tensor where they lie, None when it takes a copy to get at them."""
        value = self._slot.value
        if isinstance(value, torch.Tensor):
            return _tensor_bytes(value.detach()) if is_plain(value) else None
        is_ordered = value.flags.c_contiguous and value.dtype == numpy_dtype(self._slot.dtype)
        return _array_bytes(self._slot, value) if is_ordered else None

    def read(self, *, offset: int, nbytes: int) -> memoryview:
        """Return bytes of the tensor; see `fpformat.model.ShardSource`."""
        return self._scratch.bytes_of(self, self._make)[offset : offset + nbytes]

    def _make(self) -> memoryview:
        value = self._slot.value
        if isinstance(value, torch.Tensor):
            return _tensor_bytes(c_order(value))
        return _array_bytes(self._slot, value)


def live_sources(slots: list[Slot]) -> dict[str, ShardSource]:
    """Return sources that read the state itself, by name; it must not change meanwhile."""
    scratch = _Scratch()
    return {slot.name: LiveSource(slot, scratch) for slot in slots}


def copied_sources(slots: list[Slot]) -> dict[str, ShardSource]:
    """Return sources over copies, by name; the state may change as soon as this returns.

    Raises:
        StagingError: There is not enough memory, or the device failed.
    """
    try:
        return {slot.name: BytesSource(_copy(slot)) for slot in slots}
    except (MemoryError, RuntimeError) as error:
        total = sum(slot.value.nbytes for slot in slots)
        raise StagingError(f"copying {total} bytes to host memory failed: {error}") from error


def _copy(slot: Slot) -> memoryview:
    if isinstance(slot.value, torch.Tensor):
        return _tensor_bytes(c_order_copy(slot.value))
    live = _array_bytes(slot, slot.value)
    return np.frombuffer(live, dtype=np.uint8).copy().data if live else live
