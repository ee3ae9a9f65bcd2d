"""Arrays, scalars and data types of numpy, as their pickles describe them; nothing is called."""

import re
from collections.abc import Callable
from math import prod
from typing import Any, Final

import numpy as np

from fpformat.dtypes import DType, from_numpy
from fpformat.limits import MAX_INT
from fpformat_tools.pickles.values import Built, Global, Unrepresentable
from fpformat_tools.text import shown

_CODE: Final = re.compile(r"[biufc]\d{1,2}|[?]")
_CORES: Final = ("numpy.core.multiarray", "numpy._core.multiarray")
_LATIN: Final = ("latin1", "latin-1")
_MAX_NDIM: Final = 32
_NUMERICS: Final = ("numpy.core.numeric", "numpy._core.numeric")


def names(value: Any, modules: tuple[str, ...], name: str) -> bool:
    """Whether a value is the import of `name` from one of `modules`."""
    return isinstance(value, Global) and value.module in modules and value.name == name


Charge = Callable[[int], None]
"""Told how many bytes are about to be copied; raises when they are too many."""


def bytes_of(value: Any, charge: Charge, *, nbytes: int | None = None) -> bytes:
    """Return bytes, also where protocol 2 spells them as encoded text.

    Args:
        value: What describes them.
        charge: Told of their number before they are made.
        nbytes: How many they must be; None for any number.

    Raises:
        Unrepresentable: They are described in another way, or are of another number.
    """
    held = _text_of(value) if isinstance(value, Built) else value
    if not isinstance(held, bytes | bytearray | str):
        raise Unrepresentable("bytes that a pickle describes in an unknown way")
    if nbytes is not None and len(held) != nbytes:
        raise Unrepresentable(f"a numpy value of {nbytes:,} bytes that has {len(held):,}")
    charge(len(held))
    if not isinstance(held, str):
        return bytes(held)
    try:
        return held.encode("latin-1")
    except UnicodeEncodeError as error:
        raise Unrepresentable("bytes spelled as text that are none") from error


def _text_of(value: Built) -> Any:
    """Return the text of which protocol 2 makes bytes; None for a call of another kind."""
    function, arguments = value.function, value.arguments
    if names(function, ("__builtin__", "builtins"), "bytes") and arguments == ():
        return b""
    if not names(function, ("_codecs",), "encode") or len(arguments) != 2:
        return None
    text, encoding = arguments
    if not isinstance(text, str) or not isinstance(encoding, str):
        return None
    if encoding not in _LATIN:
        raise Unrepresentable(
            f"text in the encoding {shown(encoding)}; only latin1 stands for bytes"
        )
    return text


def is_dtype(value: Any) -> bool:
    """Whether a value describes a numpy data type."""
    return isinstance(value, Built) and names(value.function, ("numpy",), "dtype")


def dtype_of(value: Any) -> "tuple[DType, np.dtype[Any]]":
    """Return a registered data type and the numpy type in the byte order of its bytes."""
    if not is_dtype(value) or not value.arguments or not isinstance(value.arguments[0], str):
        raise Unrepresentable("a numpy type that a pickle describes in an unknown way")
    code = value.arguments[0]
    state = value.states[-1] if value.states else (3, "<")
    if not isinstance(state, tuple) or len(state) < 2 or state[1] not in ("<", ">", "|", "="):
        raise Unrepresentable(f"a numpy type {shown(code)} in an unknown state")
    if not _CODE.fullmatch(code):
        raise Unrepresentable(f"a numpy value of type {shown(code)}")
    try:
        numpy_type = np.dtype(code).newbyteorder(">" if state[1] == ">" else "<")
    except TypeError as error:
        raise Unrepresentable(f"a numpy value of type {shown(code)}") from error
    registered = from_numpy(numpy_type)
    if registered is None:
        raise Unrepresentable(f"a numpy value of type {numpy_type}")
    return registered, numpy_type


def is_scalar(value: Any) -> bool:
    """Whether a value describes a numpy scalar."""
    return isinstance(value, Built) and names(value.function, _CORES, "scalar")


def scalar_of(value: Built, charge: Charge) -> tuple[DType, bytes]:
    """Return the type and the little-endian element of a numpy scalar."""
    if len(value.arguments) != 2:
        raise Unrepresentable("a numpy scalar that a pickle describes in an unknown way")
    registered, numpy_type = dtype_of(value.arguments[0])
    raw = bytes_of(value.arguments[1], charge, nbytes=registered.nbytes)
    return registered, _little(raw, numpy_type)


def is_array(value: Any) -> bool:
    """Whether a value describes a numpy array."""
    return isinstance(value, Built) and (
        names(value.function, _CORES, "_reconstruct")
        or names(value.function, _NUMERICS, "_frombuffer")
    )


def array_of(value: Built, charge: Charge) -> tuple[DType, tuple[int, ...], bytes]:
    """Return type, shape and little-endian bytes in C order of a numpy array."""
    if names(value.function, _NUMERICS, "_frombuffer"):
        parts = value.arguments
        if len(parts) != 4 or parts[3] not in ("C", "F"):
            raise Unrepresentable("a numpy array that a pickle describes in an unknown way")
        held, described, shape, fortran = parts[0], parts[1], parts[2], parts[3] == "F"
    else:
        state = value.states[-1] if value.states else None
        ours = value.arguments and names(value.arguments[0], ("numpy",), "ndarray")
        if not ours or not isinstance(state, tuple) or len(state) != 5:
            raise Unrepresentable("a numpy array that a pickle describes in an unknown way")
        _, shape, described, fortran, held = state
    registered, numpy_type = dtype_of(described)
    if (
        not isinstance(shape, tuple)
        or len(shape) > _MAX_NDIM
        or any(type(dim) is not int or not 0 <= dim <= MAX_INT for dim in shape)
    ):
        raise Unrepresentable("a numpy array whose shape makes no sense")
    count = prod(shape)
    raw = bytes_of(held, charge, nbytes=count * registered.nbytes)
    if fortran is True and count:
        array = np.frombuffer(raw, np.dtype((np.void, registered.nbytes)))
        raw = array.reshape(shape, order="F").tobytes()
    return registered, shape, _little(raw, numpy_type)


def _little(raw: bytes, numpy_type: "np.dtype[Any]") -> bytes:
    if numpy_type.newbyteorder("<") == numpy_type:
        return raw
    return np.frombuffer(raw, numpy_type).astype(numpy_type.newbyteorder("<")).tobytes()
