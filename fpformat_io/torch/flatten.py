"""State -> tree, and the list of its tensors.

Types are matched exactly, through one table. Everything that has no representation is collected
with its path, and all of it is refused in one error; the caller's state is only looked at. Tensors
are numbered in the order of the walk here and renumbered once their table is known.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from fpformat.dtypes import DType, from_numpy
from fpformat.errors import PlanError
from fpformat.limits import KEY_INTS, MAX_TREE_DEPTH
from fpformat.names import Path, PathElement, element_text, name_of
from fpformat.records.fold import Branch, Results, fold, zip_dict
from fpformat.records.nodes import (
    ArrayRef,
    CounterNode,
    DeviceNode,
    DtypeNode,
    FlattenedNode,
    Node,
    NumpyDtypeNode,
    NumpyScalar,
    OrderedNode,
    ParameterRef,
    SizeNode,
    TensorRef,
)
from fpformat_io.torch.dtypes import from_torch
from fpformat_io.torch.subclasses import is_flattenable, label_of, take_apart

_KEY_TYPES: Final = frozenset({str, int, bool, type(None)})
_MAX_U32: Final = 2**32 - 1
# Python turns no longer integers into digits, of which a name consists.
_SHARDED: Final = "torch.distributed."
_SURROGATE: Final = "has a lone surrogate, so no UTF-8 form"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A tensor or array of the state, to be stored under `name`."""

    name: str
    value: "torch.Tensor | np.ndarray[Any, Any]"
    dtype: DType


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatState:
    """A state taken apart: references in `node` are numbers into `slots`."""

    node: Node
    slots: tuple[Slot, ...]


def flatten(state: Any) -> FlatState:
    """Take a state apart.

    Raises:
        PlanError: Parts of it have no representation; all are listed (TRE-10).
    """
    walk = _Walk()
    node = fold(state, walk.visit)
    if walk.problems:
        count = len(walk.problems)
        raise PlanError(f"{count} value(s) of the state cannot be stored (TRE-10):", *walk.problems)
    return FlatState(node=node, slots=tuple(walk.slots))


def path_text(path: Path) -> str:
    """Return a path for people: its name, with what cannot be printed escaped."""
    text = "/".join(map(element_text, path))
    if len(text) > 200:
        text = f"{text[:200]}..."
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text) or "''"


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _depth(path: Path) -> int:
    """Return the depth of the node at `path`; attributes lie in a dict of their own."""
    return 1 + sum(2 if kind == "attr" else 1 for kind, _ in path)


def _key_problem(key: Any) -> str | None:
    if type(key) not in _KEY_TYPES:
        return f"key {key!r} is a {_kind(key)}; only str, int, bool and None can be keys"
    if type(key) is int and key not in KEY_INTS:
        return f"an int key has {key.bit_length()} bits and does not fit 64 with its sign"
    if type(key) is str and _has_surrogate(key):
        return f"key {key!r} {_SURROGATE}"
    return None


def _kind(value: Any) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else label_of(cls)


def tensor_problem(tensor: torch.Tensor) -> str | None:
    """Return why a plain tensor cannot be stored."""
    if tensor.is_nested:
        return "is a nested tensor"
    if tensor.layout != torch.strided:
        return f"has layout {tensor.layout}; only dense tensors can be stored"
    if tensor.device.type == "meta":
        return "is on the meta device, so it has no data"
    if tensor.is_quantized or from_torch(tensor.dtype) is None:
        return f"has dtype {tensor.dtype}, which is not registered"
    # Only releases of torch before 2.13 have named dimensions.
    if any(name is not None for name in getattr(tensor, "names", ())):
        return "has named dimensions"
    try:
        stored = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return "has no storage, as one inside a torch.func transform has none"
    if tensor.numel() and stored < _needed_nbytes(tensor):
        return f"needs {_needed_nbytes(tensor)} bytes, its storage has {stored} (was it freed?)"
    if tensor.numel() and not _has_memory(tensor):
        kinds = "a functional or fake tensor, as torch.func and torch.compile make them"
        return f"has no memory behind its storage: it is {kinds}"
    return None


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:
        return False


def _needed_nbytes(tensor: torch.Tensor) -> int:
    last = sum((dim - 1) * step for dim, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.dtype.itemsize


class _Walk:
    """One pass over a state; `visit` is the visitor of a fold."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.slots: list[Slot] = []
        self._open: set[int] = set()

    def visit(self, value: Any, path: Path) -> Any:
        """Return the node of a leaf, or the branch of a container."""
        if 2 * len(path) >= MAX_TREE_DEPTH and _depth(path) > MAX_TREE_DEPTH:
            return self.refuse(path, f"is deeper than {MAX_TREE_DEPTH}")
        visit = _VISITORS.get(type(value))
        if visit is not None:
            return visit(self, value, path)
        for cls, visit_family in _FAMILIES:
            if isinstance(value, cls):
                return visit_family(self, value, path)
        return self.refuse(path, f"type {_kind(value)} has no representation")

    def refuse(self, path: Path, reason: str) -> None:
        """Note a problem; the node that stands for it is never used."""
        self.problems.append(f"{path_text(path)}: {reason}")

    def branch(
        self,
        value: Any,
        path: Path,
        children: Iterator[tuple[PathElement, Any]],
        build: Callable[[Results], Node],
    ) -> Any:
        """Return the branch of a container, unless it is inside itself."""
        if id(value) in self._open:
            return self.refuse(path, f"contains itself (a {_kind(value)})")
        self._open.add(id(value))

        def close(results: Results) -> Node:
            self._open.discard(id(value))
            return build(results)

        return Branch(children, close)

    def add(self, path: Path, value: Any, dtype: DType) -> int | None:
        """Add a slot and return its number, None when its path has no name."""
        try:
            name = name_of(path)
        except PlanError as error:
            self.problems.append(str(error))
            return None
        self.slots.append(Slot(name=name, value=value, dtype=dtype))
        return len(self.slots) - 1

    def keys(self, items: Any, path: Path) -> list[Any]:
        """Return the keys of a mapping that can be stored; the others are noted."""
        good = []
        for key in items:
            if problem := _key_problem(key):
                self.refuse(path, problem)
            else:
                good.append(key)
        return good


_Visit: TypeAlias = Callable[[_Walk, Any, Path], Any]


def _plain(walk: _Walk, value: Any, path: Path) -> Any:
    return value


def _str(walk: _Walk, value: str, path: Path) -> Any:
    if _has_surrogate(value):
        return walk.refuse(path, f"the str {_SURROGATE}")
    return value


def _bytes(walk: _Walk, value: bytes, path: Path) -> Any:
    if len(value) > _MAX_U32:
        return walk.refuse(path, f"has {len(value)} bytes; store it as a uint8 tensor")
    return value


def _indexed(values: Any) -> Iterator[tuple[PathElement, Any]]:
    return ((("index", index), child) for index, child in enumerate(values))


def _list(walk: _Walk, value: list[Any], path: Path) -> Any:
    return walk.branch(value, path, _indexed(value), lambda results: results)


def _tuple(walk: _Walk, value: tuple[Any, ...], path: Path) -> Any:
    return walk.branch(value, path, _indexed(value), tuple)


def _keyed(items: Any, keys: list[Any]) -> Iterator[tuple[PathElement, Any]]:
    return ((("key", key), items[key]) for key in keys)


def _dict(walk: _Walk, value: dict[Any, Any], path: Path) -> Any:
    keys = walk.keys(value, path)
    return walk.branch(value, path, _keyed(value, keys), zip_dict(keys))


def _counter(walk: _Walk, value: Any, path: Path) -> Any:
    if vars(value):
        return walk.refuse(path, f"is a Counter with attributes {sorted(vars(value))}")
    keys = walk.keys(value, path)

    def build(results: Results) -> Node:
        return CounterNode(zip_dict(keys)(results))

    return walk.branch(value, path, _keyed(value, keys), build)


def _ordered_dict(walk: _Walk, value: Any, path: Path) -> Any:
    if _depth(path) >= MAX_TREE_DEPTH:
        return walk.refuse(path, f"an OrderedDict at depth {MAX_TREE_DEPTH} is too deep")
    attributes = vars(value)
    if wrong := [name for name in attributes if type(name) is not str]:
        return walk.refuse(path, f"has an attribute whose name {wrong[0]!r} is no str")
    keys = walk.keys(value, path)
    names = walk.keys(attributes, path)

    def children() -> Iterator[tuple[PathElement, Any]]:
        yield from _keyed(value, keys)
        for name in names:
            yield ("attr", name), attributes[name]

    def build(results: Results) -> Node:
        items = zip_dict(keys)(results[: len(keys)])
        return OrderedNode(items, zip_dict(names)(results[len(keys) :]))

    return walk.branch(value, path, children(), build)


def _tensor(walk: _Walk, value: torch.Tensor, path: Path) -> Any:
    dtype = from_torch(value.dtype)
    problem = tensor_problem(value)
    if problem or dtype is None:
        return walk.refuse(path, f"the tensor {problem}")
    index = walk.add(path, value.detach(), dtype)
    return None if index is None else TensorRef(index)


def _parameter(walk: _Walk, value: torch.nn.Parameter, path: Path) -> Any:
    node = _tensor(walk, value, path)
    return ParameterRef(node.index, value.requires_grad) if node else None


def _tensor_subclass(walk: _Walk, value: Any, path: Path) -> Any:
    cls = type(value)
    if cls.__module__.startswith(_SHARDED):
        reason = "sharded tensors are not supported yet; gather it first, as with full_tensor()"
        return walk.refuse(path, f"is a {label_of(cls)}: {reason}")
    if value.is_nested or not is_flattenable(cls):
        return walk.refuse(path, f"is a {label_of(cls)}, which cannot be taken apart")
    try:
        parts, envelope = take_apart(value)
    except Exception as error:  # noqa: BLE001  code of the class, which may raise anything
        return walk.refuse(path, f"is a {label_of(cls)} that cannot be taken apart: {error}")
    names = list(parts)

    def children() -> Iterator[tuple[PathElement, Any]]:
        yield ("context", None), envelope
        for name in names:
            yield ("part", name), parts[name]

    def build(results: Results) -> Node:
        return FlattenedNode(label_of(cls), results[0], zip_dict(names)(results[1:]))

    return walk.branch(value, path, children(), build)


def _array(walk: _Walk, value: "np.ndarray[Any, Any]", path: Path) -> Any:
    dtype = from_numpy(value.dtype)
    if dtype is None:
        return walk.refuse(path, f"the numpy array has dtype {value.dtype}, not registered")
    index = walk.add(path, value, dtype)
    return None if index is None else ArrayRef(index)


def _numpy_scalar(walk: _Walk, value: "np.generic[Any]", path: Path) -> Any:
    dtype = from_numpy(value.dtype)
    if dtype is None or type(value) is not value.dtype.type:
        return walk.refuse(path, f"is a {_kind(value)}, which is not registered")
    return NumpyScalar(dtype, value.astype(value.dtype.newbyteorder("<")).tobytes())


def _numpy_dtype(walk: _Walk, value: "np.dtype[Any]", path: Path) -> Any:
    dtype = from_numpy(value)
    if dtype is None or value != value.newbyteorder("<"):
        return walk.refuse(path, f"is the numpy dtype {value.str}, which is not registered")
    return NumpyDtypeNode(dtype)


def _torch_dtype(walk: _Walk, value: torch.dtype, path: Path) -> Any:
    dtype = from_torch(value)
    return DtypeNode(dtype) if dtype else walk.refuse(path, f"is {value}, not registered")


_VISITORS: Final[dict[type, _Visit]] = {
    **dict.fromkeys((type(None), bool, int, float, complex), _plain),
    str: _str,
    bytes: _bytes,
    list: _list,
    tuple: _tuple,
    dict: _dict,
    OrderedDict: _ordered_dict,
    Counter: _counter,
    torch.Tensor: _tensor,
    torch.nn.Parameter: _parameter,
    torch.Size: lambda walk, value, path: SizeNode(tuple(map(int, value))),
    torch.dtype: _torch_dtype,
    torch.device: lambda walk, value, path: DeviceNode(str(value)),
    np.ndarray: _array,
}
# Families of types that numpy and torch make one by one.
_FAMILIES: Final[tuple[tuple[type, _Visit], ...]] = (
    (torch.Tensor, _tensor_subclass),
    (np.generic, _numpy_scalar),
    (np.dtype, _numpy_dtype),
)
