"""Where the bytes of a save come from: live tensors, or copies made at the call."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fpformat.dtypes import numpy_dtype
from fpformat.read.source import BytesSource
from fpformat.records.model import ShardSource
from fpformat_io.errors import StagingError
from fpformat_io.sources import Bytes
from fpformat_io.torch.device import DeviceCopier, DeviceCopiers
from fpformat_io.torch.dtypes import byte_view, c_order_copy, copy_range, is_plain
from fpformat_io.torch.flatten import Slot


def _array_bytes(slot: Slot, array: "np.ndarray[Any, Any]") -> memoryview:
    """Return an array's values, little-endian and in C order; a copy only when they are not."""
    ordered = np.ascontiguousarray(array, dtype=numpy_dtype(slot.dtype))
    return ordered.reshape(-1).view(np.uint8).data


def _tensor_bytes(tensor: torch.Tensor) -> memoryview:
    return byte_view(tensor).numpy().data


class LiveSource:
    """Reads a tensor or an array where it is.

    Attributes:
        copier: Who copies from the device of the tensor, None for host memory.
    """

    def __init__(self, slot: Slot, copier: DeviceCopier | None) -> None:
        self._slot = slot
        self.copier = copier

    @property
    def buffer(self) -> memoryview | None:
        """The bytes of the tensor where they lie, None when it takes a copy to get at them."""
        value = self._slot.value
        if isinstance(value, torch.Tensor):
            return _tensor_bytes(value.detach()) if is_plain(value) else None
        is_ordered = value.flags.c_contiguous and value.dtype == numpy_dtype(self._slot.dtype)
        return _array_bytes(self._slot, value) if is_ordered else None

    def read(self, *, offset: int, nbytes: int) -> memoryview:
        """Return bytes of the tensor; see `fpformat.records.model.ShardSource`."""
        target = np.empty(nbytes, dtype=np.uint8)
        self.read_into(target, offset=offset)
        if self.copier:
            self.copier.wait()
        return target.data

    def read_into(self, target: Bytes, *, offset: int) -> None:
        """Fill `target` with bytes of the tensor; see `fpformat_io.sources.PullSource`."""
        value = self._slot.value
        if not isinstance(value, torch.Tensor):
            self._read_array(target, value, offset=offset)
        elif self.copier:
            self.copier.copy(target, value, offset=offset)
        else:
            copy_range(target, value, offset=offset)

    def _read_array(self, target: Bytes, array: "np.ndarray[Any, Any]", *, offset: int) -> None:
        width = self._slot.dtype.nbytes
        start, skip = divmod(offset, width)
        stop = -(-(offset + len(target)) // width)
        part = array.flat[start:stop].astype(numpy_dtype(self._slot.dtype), copy=False)
        target[:] = part.view(np.uint8)[skip : skip + len(target)]


def live_sources(slots: Sequence[Slot]) -> dict[str, ShardSource]:
    """Return sources that read the state itself, by name; it must not change meanwhile."""
    copiers = DeviceCopiers()
    return {slot.name: LiveSource(slot, copiers.of(slot.value)) for slot in slots}


def copied_sources(slots: Sequence[Slot]) -> dict[str, ShardSource]:
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
