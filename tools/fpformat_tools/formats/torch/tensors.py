"""Tensors of a torch pickle: the calls that would rebuild them, checked against their storages.

Nothing is called. Each known call is taken apart, its storage looked up, and the view that it
describes must lie inside the storage's bytes.
"""

from collections.abc import Callable
from typing import Any, Final

from fpformat.dtypes import DType, tensor_nbytes
from fpformat.errors import FpformatError
from fpformat.limits import MAX_INT, MAX_NDIM
from fpformat_tools.errors import SourceError
from fpformat_tools.formats.torch.types import DTYPE_OF_STORAGE, DTYPE_OF_TORCH
from fpformat_tools.pickles.values import Built, Global, Persistent, Unrepresentable
from fpformat_tools.streams.state import Storage, Tensor

FindStorage = Callable[[str, DType, int], Storage]
"""Takes a storage's key, element type and element count; returns its bytes or raises."""

_UTILS: Final = "torch._utils"
_SIZE: Final = Global("torch", "Size")
_REFUSED: Final = {
    "_rebuild_sparse_tensor": "a sparse tensor",
    "_rebuild_sparse_csr_tensor": "a sparse tensor",
    "_rebuild_qtensor": "a quantized tensor",
    "_rebuild_meta_tensor_no_storage": "a meta tensor, which has no bytes",
    "_rebuild_nested_tensor": "a nested tensor",
    "_rebuild_wrapper_subclass": "a tensor subclass without storage",
    "_rebuild_device_tensor_from_numpy": "a tensor of a device that torch saves as a numpy array",
    "_rebuild_device_tensor_from_cpu_tensor": "a tensor of a device that has no storage",
}
_PLAIN_TENSORS: Final = {
    ("torch", "Tensor"),
    ("torch._tensor", "Tensor"),
    ("torch.nn.parameter", "Parameter"),
}


def _counts(value: Any, what: str) -> tuple[int, ...]:
    if isinstance(value, Built) and value.function == _SIZE:
        value = value.arguments[0] if len(value.arguments) == 1 else None
    if not isinstance(value, tuple | list) or len(value) > MAX_NDIM:
        raise Unrepresentable(f"a tensor whose {what} is not a list of at most 64 numbers")
    if not all(map(_is_count, value)):
        raise Unrepresentable(f"a tensor whose {what} is not of whole numbers of at least 0")
    return tuple(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INT


class TensorReader:
    """Collects the tensors and storages of one pickle.

    Attributes:
        tensors: In the order in which they were found.
        storages: Those that tensors with elements use.
        warnings: What is lost with some of them.
    """

    def __init__(self, find_storage: FindStorage, *, where: str) -> None:
        self.tensors: list[Tensor] = []
        self.storages: list[Storage] = []
        self.warnings: list[str] = []
        self._find = find_storage
        self._where = where
        self._bases: dict[str, int] = {}
        # The calls are kept, so that no two of them ever have one identity.
        self._known: dict[int, tuple[Built, int]] = {}

    def index_of(self, built: Built) -> int:
        """Return the position of the tensor that a call would rebuild.

        Raises:
            Unrepresentable: It is a kind of tensor without a form.
            SourceError: Its storage is missing or too small.
        """
        if id(built) not in self._known:
            self.tensors.append(self._tensor(built))
            self._known[id(built)] = (built, len(self.tensors) - 1)
        return self._known[id(built)][1]

    def _tensor(self, built: Built) -> Tensor:
        function = built.function
        name = function.name if isinstance(function, Global) else ""
        if name in _REFUSED:
            raise Unrepresentable(_REFUSED[name])
        arguments = built.arguments
        if name == "_rebuild_tensor_v3":
            if len(arguments) < 7 or not isinstance(arguments[6], Global):
                raise Unrepresentable("a tensor rebuilt with unknown arguments")
            dtype = DTYPE_OF_TORCH.get(arguments[6].name)
            if dtype is None:
                raise Unrepresentable(f"a tensor of {arguments[6]}, which has no registered type")
            return self._view(arguments, dtype, metadata=arguments[7:8])
        if len(arguments) < 4 or name not in ("_rebuild_tensor", "_rebuild_tensor_v2"):
            raise Unrepresentable("a tensor rebuilt with unknown arguments")
        return self._view(arguments, None, metadata=arguments[6:7])

    def _view(
        self, arguments: tuple[Any, ...], dtype: DType | None, metadata: tuple[Any, ...]
    ) -> Tensor:
        if metadata and metadata[0]:
            raise Unrepresentable("a tensor with a pending conjugation or negation")
        identity, offset = arguments[0], arguments[1]
        shape, strides = _counts(arguments[2], "shape"), _counts(arguments[3], "stride")
        if not _is_count(offset) or len(shape) != len(strides):
            raise Unrepresentable("a tensor whose offset or strides make no sense")
        base, stored_dtype = self._storage(identity)
        tensor = Tensor(
            base=base, dtype=dtype or stored_dtype, shape=shape, strides=strides, offset=offset
        )
        self._check(tensor)
        return tensor

    def _storage(self, identity: Any) -> tuple[int, DType]:
        parts = identity.identity if isinstance(identity, Persistent) else None
        if not isinstance(parts, tuple) or len(parts) not in (5, 6) or parts[0] != "storage":
            raise SourceError("malformed", self._where, "a tensor refers to no storage")
        _, kind, key, _, count = parts[:5]
        if not isinstance(kind, Global) or not isinstance(key, str) or not _is_count(count):
            raise SourceError("malformed", self._where, "a reference to a storage has wrong types")
        if len(parts) == 6 and parts[5] is not None:
            detail = "is of a variant before torch 0.4 (views of storages): load and save it anew"
            raise SourceError("unsupported", self._where, detail)
        dtype = DTYPE_OF_STORAGE.get(kind.name)
        if dtype is None:
            raise Unrepresentable(f"a tensor in a {kind}, which has no registered type")
        if key not in self._bases:
            self.storages.append(self._find(key, dtype, count))
            self._bases[key] = len(self.storages) - 1
        return self._bases[key], dtype

    def _check(self, tensor: Tensor) -> None:
        try:
            tensor_nbytes(tensor.dtype, tensor.shape, where="shape")
        except FpformatError as error:
            detail = f"a tensor is too large: {error}"
            raise SourceError("malformed", self._where, detail) from error
        held = self.storages[tensor.base].nbytes
        if not tensor.is_empty and tensor.reach[1] > held:
            detail = f"a tensor of shape {list(tensor.shape)} reaches byte {tensor.reach[1]:,}"
            raise SourceError("malformed", self._where, f"{detail} of a storage of {held:,}")


def is_tensor_call(value: Any) -> bool:
    """Whether a value is a call that rebuilds a tensor, known or not."""
    return (
        isinstance(value, Built)
        and isinstance(value.function, Global)
        and value.function.module == _UTILS
        and (value.function.name.startswith("_rebuild_tensor") or value.function.name in _REFUSED)
    )


def is_plain_tensor_type(value: Any) -> bool:
    """Whether a name stands for torch's own tensor or parameter class."""
    return isinstance(value, Global) and (value.module, value.name) in _PLAIN_TENSORS
