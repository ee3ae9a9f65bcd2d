"""The bytes of one tensor in C order, wherever its elements lie in its storage.

A contiguous tensor is a plain range and is read as it is asked for. Any other is put into C order
block by block, as it is read. A block of a transposed tensor may need bytes from all over its
storage, so blocks are large where elements do not repeat, and small where they do (``expand``), for
then the size says nothing of what the input holds. What is read for a block is bounded too, however
far apart the elements lie.
"""

from math import prod
from typing import Any, Final

import numpy as np

from fpformat.names import name_of
from fpformat.records.nodes import walk_tensors
from fpformat_tools.errors import TargetError
from fpformat_tools.streams.state import State, Storage, Tensor
from fpformat_tools.text import plain

# A logical size above both is not written out: no real model has a use for it.
MAX_REPEATS: Final = 64
MAX_REPEATED_NBYTES: Final = 1 << 30
_SPAN_LIMIT_NBYTES: Final = 64 * 1024 * 1024
_BLOCK_NBYTES: Final = 64 * 1024 * 1024
_LARGE_BLOCK_NBYTES: Final = 1 << 30
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
    """A strided tensor, put into C order block by block as it is read.

    The last block is kept until another is needed or the last byte was read.
    """

    def __init__(self, storage: Storage, tensor: Tensor) -> None:
        self._storage = storage
        self._tensor = _simplified(tensor)
        self._nbytes = tensor.nbytes
        start, stop = tensor.reach
        limit_nbytes = _BLOCK_NBYTES if self._nbytes > stop - start else _LARGE_BLOCK_NBYTES
        self._axis, self._rows = _blocks(self._tensor, limit_nbytes)
        self._row_nbytes = prod(self._tensor.shape[self._axis + 1 :]) * tensor.dtype.nbytes
        self._held = memoryview(b"")
        self._held_start = 0

    def read(self, *, offset: int, nbytes: int) -> memoryview:
        """Return `nbytes` bytes of the tensor in C order from `offset`."""
        parts: list[memoryview] = []
        position, stop = offset, offset + nbytes
        while position < stop:
            if not self._held_start <= position < self._held_start + len(self._held):
                self._load(position)
            begin = position - self._held_start
            parts.append(self._held[begin : begin + stop - position])
            position += len(parts[-1])
        if stop == self._nbytes:
            self._held = memoryview(b"")
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def _load(self, position: int) -> None:
        """Gather the block that holds a byte: some rows of one axis, at fixed places before it."""
        self._held = memoryview(b"")
        tensor, axis = self._tensor, self._axis
        if not tensor.shape:
            block, self._held_start = tensor, 0
        else:
            outer, row = divmod(position // self._row_nbytes, tensor.shape[axis])
            row -= row % self._rows
            count = min(self._rows, tensor.shape[axis] - row)
            self._held_start = (outer * tensor.shape[axis] + row) * self._row_nbytes
            offset = tensor.offset + row * tensor.strides[axis]
            for before in reversed(range(axis)):
                outer, place = divmod(outer, tensor.shape[before])
                offset += place * tensor.strides[before]
            block = Tensor(
                base=tensor.base,
                dtype=tensor.dtype,
                shape=(count, *tensor.shape[axis + 1 :]),
                strides=tensor.strides[axis:],
                offset=offset,
            )
        self._held = gather(self._storage, block).data.cast("B")


TensorSource = PlainSource | GatheredSource


def _simplified(tensor: Tensor) -> Tensor:
    """Return the same elements in the same order with as few axes as will do."""
    axes: list[tuple[int, int]] = []
    for dim, stride in zip(tensor.shape, tensor.strides, strict=True):
        if dim == 1:
            continue
        if axes and axes[-1][1] == dim * stride:
            axes[-1] = (axes[-1][0] * dim, stride)
        else:
            axes.append((dim, stride))
    return Tensor(
        base=tensor.base,
        dtype=tensor.dtype,
        shape=tuple(dim for dim, _ in axes),
        strides=tuple(stride for _, stride in axes),
        offset=tensor.offset,
    )


def _blocks(tensor: Tensor, limit_nbytes: int) -> tuple[int, int]:
    """Return the axis along which a tensor is divided, and how many of its rows make a block."""
    row_nbytes = tensor.nbytes
    for axis, dim in enumerate(tensor.shape):
        row_nbytes //= dim
        if row_nbytes <= limit_nbytes:
            return axis, max(1, min(dim, limit_nbytes // row_nbytes))
    return 0, 1


def check_size(state: State, tensor: Tensor) -> None:
    """Refuse to write out a tensor that repeats the elements of a small storage without measure.

    Raises:
        TargetError: Its logical size is over `MAX_REPEATED_NBYTES` and over `MAX_REPEATS` times
            the size of its storage.
    """
    held = state.storages[tensor.base].nbytes
    if tensor.nbytes <= max(MAX_REPEATED_NBYTES, MAX_REPEATS * held):
        return
    names = (name_of(path) for path, ref in walk_tensors(state.node) if _is(state, ref, tensor))
    name = plain(next(names, "<hidden>"))
    detail = f"would be written out to {tensor.nbytes:,} bytes, its storage has {held:,}"
    hint = "an output that keeps views, such as fpformat, can hold it"
    raise TargetError("limit", f"{state.where}: {name}", f"{detail}; {hint}")


def _is(state: State, ref: Any, tensor: Tensor) -> bool:
    return state.tensors[ref.index] is tensor


def source_of(state: State, tensor: Tensor) -> TensorSource:
    """Return the bytes of a tensor with elements, in C order.

    Raises:
        TargetError: They are too many for its storage, see `check_size`.
    """
    check_size(state, tensor)
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
