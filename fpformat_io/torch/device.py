"""Copies from an accelerator into pinned host memory, on a stream of their own.

The stream first waits for what the caller's stream was doing at the call, so a copy sees the state
as it was then; the device goes on computing meanwhile. That the state does not change before the
copies have arrived is the caller's promise, which the gate before an optimizer step keeps.
"""

from typing import Any, Final

import numpy as np
import torch

from fpformat.limits import round_up
from fpformat_io.sources import Bytes
from fpformat_io.torch.dtypes import copy_range

_PAGE_NBYTES: Final = 4096


class DeviceCopier:
    """Copies from one device; see `fpformat_io.sources.Copier`."""

    def __init__(self, device: torch.device, module: Any) -> None:
        """Order a stream of its own behind the caller's.

        Args:
            device: The device.
            module: What torch has for its kind, such as ``torch.cuda``.
        """
        self._module = module
        self._stream = module.Stream(device=device)
        self._stream.wait_stream(module.current_stream(device))

    def memory(self, nbytes: int) -> Bytes:
        """Return pinned memory, or plain memory where there is none, in which copies are slower.

        It begins at a multiple of 4096, so that it can be written from directly. torch keeps it for
        the next save, and takes the next power of two.
        """
        memory = _pinned(nbytes)
        if memory.data_ptr() % _PAGE_NBYTES:
            memory = _pinned(nbytes + _PAGE_NBYTES)
        skip = round_up(memory.data_ptr(), to=_PAGE_NBYTES) - memory.data_ptr()
        found: Bytes = memory.numpy()[skip : skip + nbytes]
        return found

    def copy(self, target: Bytes, tensor: torch.Tensor, *, offset: int) -> None:
        """Begin to copy bytes of a tensor, in C order, from `offset`."""
        with self._module.stream(self._stream):
            copy_range(target, tensor, offset=offset)

    def wait(self) -> None:
        """Return when all copies have arrived."""
        self._stream.synchronize()


def _pinned(nbytes: int) -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return torch.empty(nbytes, dtype=torch.uint8)


class DeviceCopiers:
    """One copier for each device of a save; None where torch has no streams for it."""

    def __init__(self) -> None:
        self._known: dict[torch.device, DeviceCopier | None] = {}

    def of(self, value: "torch.Tensor | np.ndarray[Any, Any]") -> DeviceCopier | None:
        """Return the copier for the device of a value."""
        if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
            return None
        if value.device not in self._known:
            module = getattr(torch, value.device.type, None)
            has_streams = hasattr(module, "Stream") and hasattr(module, "current_stream")
            copier = DeviceCopier(value.device, module) if has_streams else None
            self._known[value.device] = copier
        return self._known[value.device]
