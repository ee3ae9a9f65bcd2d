"""The registry of data types: code on disk, name, element size, and the numpy type if there is one.

Bytes are moved, never converted: a type without a numpy counterpart is still read and written.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fpformat.errors import fault
from fpformat.limits import MAX_INT


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """One registered data type; `nbytes` is the size of an element."""

    code: int
    name: str
    nbytes: int


_REGISTRY: Final = (
    (1, "BOOL", 1, "bool"),
    (2, "U8", 1, "u1"),
    (3, "I8", 1, "i1"),
    (4, "U16", 2, "u2"),
    (5, "I16", 2, "i2"),
    (6, "U32", 4, "u4"),
    (7, "I32", 4, "i4"),
    (8, "U64", 8, "u8"),
    (9, "I64", 8, "i8"),
    (10, "F16", 2, "f2"),
    (11, "BF16", 2, None),
    (12, "F32", 4, "f4"),
    (13, "F64", 8, "f8"),
    (14, "F8_E4M3", 1, None),
    (15, "F8_E4M3FNUZ", 1, None),
    (16, "F8_E5M2", 1, None),
    (17, "F8_E5M2FNUZ", 1, None),
    (18, "F8_E8M0", 1, None),
    (19, "F4_E2M1_X2", 1, None),
    (20, "C32", 4, None),
    (21, "C64", 8, "c8"),
    (22, "C128", 16, "c16"),
)

DTYPES: Final[dict[int, DType]] = {
    code: DType(code=code, name=name, nbytes=nbytes) for code, name, nbytes, _ in _REGISTRY
}
_BY_NAME: Final = {dtype.name: dtype for dtype in DTYPES.values()}
_NUMPY: Final = {code: np.dtype(text).newbyteorder("<") for code, _, _, text in _REGISTRY if text}
_FROM_NUMPY: Final = {numpy_type: DTYPES[code] for code, numpy_type in _NUMPY.items()}


def by_name(name: str) -> DType:
    """Return the data type called `name` in the registry; KeyError when there is none."""
    return _BY_NAME[name]


def numpy_dtype(dtype: DType) -> "np.dtype[Any] | None":
    """Return the little-endian numpy type of equal meaning, or None."""
    return _NUMPY.get(dtype.code)


def from_numpy(numpy_type: "np.dtype[Any]") -> DType | None:
    """Return the registered type of a numpy type in any byte order, or None."""
    if numpy_type.fields is not None or numpy_type.kind not in "biufc":
        return None
    return _FROM_NUMPY.get(numpy_type.newbyteorder("<"))


def tensor_nbytes(dtype: DType, shape: Sequence[int], *, where: str) -> int:
    """Return the logical size of a tensor in bytes.

    Raises:
        FormatError: TEN-6 when a dimension, or the product of the dimensions that are not zero
            times the element size, is negative or above 2^53 - 1.
    """
    nonzero = math.prod(dim for dim in shape if dim) * dtype.nbytes
    if any(not 0 <= dim <= MAX_INT for dim in shape) or nonzero > MAX_INT:
        raise fault("TEN-6", where, f"shape {tuple(shape)} of {dtype.name} exceeds 2^53-1 bytes")
    return 0 if 0 in shape else nonzero
