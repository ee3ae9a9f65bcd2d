"""The bytes of one tensor in C order, wherever its elements lie in its storage.

A contiguous tensor is a plain range and is read as it is asked for. Any other is gathered whole on
its first read and let go after its last byte, so no more than one is in memory at a time; what is
read for that is bounded too, however far apart the elements lie.
"""

from typing import Any, Final

import numpy as np

from fpformat_tools.state import State, Storage, Tensor

_SPAN_LIMIT_NBYTES: Final = 64 * 1024 * 1024
# Elements move as integers, or as opaque bytes: values must not pass through arithmetic.
_ELEMENTS: Final = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}


class PlainSource:
    """A contiguous tensor: a range of its storage."""

    def __init__(self, storage: Storage, *, start: int) -> None:
        self._storage = storage
        self._start = start

    def read(self, *, offset: int, nbytes: int) -> memoryview:
        """Return `nbytes` bytes of the tensor from `offset`."""
        return memoryview(self._storage.read_at(offset=self._start + offset, nbytes=nbytes))


class GatheredSource:
    """A strided tensor, put into C order when it is first read."""

    def __init__(self, storage: Storage, tensor: Tensor) -> None:
        self._storage = storage
        self._tensor = tensor
        self._held: memoryview | None = None

    def read(self, *, offset: int, nbytes: int) -> memoryview:
        """Return `nbytes` bytes of the tensor in C order from `offset`."""
        held = self._held
        if held is None:
            held = gather(self._storage, self._tensor).data.cast("B")
        self._held = held if offset + nbytes < len(held) else None
        return held[offset : offset + nbytes]


TensorSource = PlainSource | GatheredSource


def source_of(state: State, tensor: Tensor) -> TensorSource:
    """Return the bytes of a tensor with elements, in C order."""
    storage = state.storages[tensor.base]
    if tensor.is_contiguous:
        return PlainSource(storage, start=tensor.reach[0])
    return GatheredSource(storage, tensor)


def gather(storage: Storage, tensor: Tensor) -> "np.ndarray[Any, Any]":
    """Return the elements of a tensor in C order."""
    out = np.empty(tensor.shape, dtype=_ELEMENTS[tensor.dtype.nbytes])
    _fill(out, storage, tensor)
    return out.reshape(-1)


def _fill(out: "np.ndarray[Any, Any]", storage: Storage, tensor: Tensor) -> None:
    start, stop = tensor.reach
    axis = max(
        range(len(tensor.shape)),
        key=lambda axis: (tensor.shape[axis] - 1) * tensor.strides[axis],
        default=0,
    )
    if stop - start > _SPAN_LIMIT_NBYTES and tensor.shape[axis] > 1:
        half = tensor.shape[axis] // 2
        for begin, end in ((0, half), (half, tensor.shape[axis])):
            shape = (*tensor.shape[:axis], end - begin, *tensor.shape[axis + 1 :])
            offset = tensor.offset + begin * tensor.strides[axis]
            part = Tensor(
                base=tensor.base,
                dtype=tensor.dtype,
                shape=shape,
                strides=tensor.strides,
                offset=offset,
            )
            where = (slice(None),) * axis + (slice(begin, end),)
            _fill(out[where], storage, part)
        return
    itemsize = tensor.dtype.nbytes
    span = np.frombuffer(storage.read_at(offset=start, nbytes=stop - start), dtype=out.dtype)
    out[...] = np.lib.stride_tricks.as_strided(
        span, tensor.shape, tuple(stride * itemsize for stride in tensor.strides)
    )
