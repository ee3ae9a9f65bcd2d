"""Data types of torch and of the registry, both ways; tensors as plain bytes.

Values are copied as integers of the same width, so that no arithmetic ever touches them.
"""

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from fpformat.dtypes import DTYPES, DType
from fpformat.errors import fault
from fpformat_io.torch.forked import without_pool

_TORCH_NAMES: Final = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4_E2M1_X2": "float4_e2m1fn_x2",
    "C32": "complex32",
    "C64": "complex64",
    "C128": "complex128",
}
# Older releases of torch lack some of them.
_TO_TORCH: Final[dict[int, torch.dtype]] = {
    dtype.code: getattr(torch, _TORCH_NAMES[dtype.name])
    for dtype in DTYPES.values()
    if hasattr(torch, _TORCH_NAMES[dtype.name])
}
_FROM_TORCH: Final = {torch_dtype: DTYPES[code] for code, torch_dtype in _TO_TORCH.items()}
_BITS: Final = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}

_IN_CACHE_NBYTES: Final = 1024 * 1024
_Copy: TypeAlias = Callable[[torch.Tensor, torch.Tensor], None]


def from_torch(dtype: torch.dtype) -> DType | None:
    """Return the registered type, or None when it cannot be stored."""
    return _FROM_TORCH.get(dtype)


def to_torch(dtype: DType, *, where: str) -> torch.dtype:
    """Return the type of torch.

    Raises:
        UnsupportedError: This torch has no such type.
    """
    if dtype.code not in _TO_TORCH:
        detail = f"torch {torch.__version__} has no type {_TORCH_NAMES[dtype.name]}"
        raise fault("TEN-4", where, detail)
    return _TO_TORCH[dtype.code]


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the values lie in host memory as they are, contiguous."""
    is_lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not is_lazy


@without_pool
def fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values of equal shape and type into memory that exists.

    A bool is copied as its byte: a copy of bools would turn every byte but 0 into 1.
    """
    target = target.detach()
    if target.is_conj() or target.is_neg():
        target.copy_(source)
    else:
        _bits(target).copy_(_bits(source))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_BITS[tensor.dtype.itemsize])


@without_pool
def c_order_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy in host memory."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    bits = _bits(tensor)
    copy = torch.empty(bits.shape, dtype=bits.dtype, device="cpu")
    copy.copy_(bits)
    return copy


@without_pool
def copy_range(
    target: "np.ndarray[Any, np.dtype[np.uint8]]", tensor: torch.Tensor, *, offset: int
) -> None:
    """Fill host memory with bytes of a tensor in C order, from `offset`; no more is copied.

    From a device into pinned memory the copy is only begun, on the current stream.
    """
    if not len(target):
        return
    width = tensor.dtype.itemsize
    start, skip = divmod(offset, width)
    address: int = target.__array_interface__["data"][0]
    tensor = tensor.detach()
    if not (tensor.is_conj() or tensor.is_neg()):
        # Some types of one byte can be viewed and moved, but not indexed everywhere.
        tensor = _bits(tensor)
    if skip or len(target) % width or address % width:
        around = torch.empty(-(-(skip + len(target)) // width), dtype=_BITS[width])
        _copy_elements(around, tensor, start, _copy)
        target[:] = around.view(torch.uint8)[skip : skip + len(target)].numpy()
    else:
        _copy_elements(torch.from_numpy(target).view(_BITS[width]), tensor, start, _begin_copy)


def _copy_elements(target: torch.Tensor, tensor: torch.Tensor, start: int, copy: _Copy) -> None:
    """Fill `target`, elements in a row, with those of a tensor from number `start` on."""
    count = len(target)
    if tensor.is_contiguous():
        copy(target, tensor.view(-1)[start : start + count])
        return
    row = tensor.numel() // len(tensor)
    first, skip = divmod(start, row)
    if skip:
        head = min(row - skip, count)
        _copy_elements(target[:head], tensor[first], skip, copy)
        target, first = target[head:], first + 1
    whole = len(target) // row
    if whole:
        box = target[: whole * row].view(whole, *tensor.shape[1:])
        copy(box, tensor[first : first + whole])
    if len(target) % row:
        _copy_elements(target[whole * row :], tensor[first + whole], 0, copy)


def _copy(target: torch.Tensor, part: torch.Tensor) -> None:
    target.copy_(_bits(part.resolve_conj().resolve_neg()))


def _begin_copy(target: torch.Tensor, part: torch.Tensor) -> None:
    part = _bits(part.resolve_conj().resolve_neg())
    if part.device.type != "cpu":
        target.copy_(part, non_blocking=True)
        return
    order = sorted(range(part.ndim), key=part.stride, reverse=True)
    if order[-1:] == [part.ndim - 1]:
        target.copy_(part)
    else:
        _copy_turned(target, part, order)


def _copy_turned(target: torch.Tensor, part: torch.Tensor, order: list[int]) -> None:
    """Copy values whose neighbours in memory are no neighbours in C order.

    First they are gathered as they lie, then turned within the cache: measured, six times as fast
    as one copy, which takes a cache line for each value.
    """
    back = sorted(range(len(order)), key=order.__getitem__)
    row_nbytes = part[:1].numel() * part.itemsize
    for first in range(0, len(part), step := max(_IN_CACHE_NBYTES // row_nbytes, 1)):
        dense = part[first : first + step].permute(order).contiguous()
        target[first : first + step].copy_(dense.permute(back))


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, as a tensor over the same memory."""
    offset = tensor.storage_offset() * tensor.dtype.itemsize
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(tensor.untyped_storage(), offset, (tensor.nbytes,), (1,))
