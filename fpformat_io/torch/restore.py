"""Tree -> state: tensors read and verified, ties restored, every type as it was saved."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from fpformat.dtypes import DType, numpy_dtype
from fpformat.errors import fault
from fpformat.names import Path
from fpformat.read.reader import Checkpoint
from fpformat.records.fold import Branch, Results, fold, zip_dict
from fpformat.records.layout import c_strides
from fpformat.records.model import TensorEntry, TensorKey, View
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
    Reference,
    SizeNode,
    TensorRef,
    children_of,
    walk_tensors,
)
from fpformat_io.torch.dtypes import to_torch
from fpformat_io.torch.forked import without_pool
from fpformat_io.torch.subclasses import put_together

_META: Final = "meta"


class TensorReader:
    """Reads tensors of one checkpoint onto one device, each stored byte once.

    Tensors that share an owner share its storage. A view that is wanted alone is read alone, so
    that it does not drag in the memory of others.
    """

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, wanted: "list[TensorKey]"
    ) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._entries = {key: checkpoint.entry(key) for key in wanted}
        self._storages: dict[TensorKey, torch.UntypedStorage] = {}
        self._parameters: dict[tuple[TensorKey, bool], torch.nn.Parameter] = {}
        self._referents: Counter[TensorKey] = Counter(
            entry.target or entry.key for entry in self._entries.values()
        )

    def tensor(self, key: TensorKey) -> torch.Tensor:
        """Return a tensor; tied ones share a storage.

        Raises:
            FormatError: Damage, or a data type that this torch lacks.
        """
        entry = self._entries[key]
        dtype = to_torch(entry.dtype, where=f"{self._checkpoint.path}: tensor {entry.name!r}")
        tensor = torch.empty(0, dtype=dtype, device=self._device)
        view = entry.alias if isinstance(entry.alias, View) else None
        if view and (self._referents[view.target] > 1 or self._is_larger(entry, view)):
            storage = self._storage(view.target)
            return tensor.set_(storage, view.offset, entry.shape, view.strides)
        owner = key if view else entry.target or key
        return tensor.set_(self._storage(owner), 0, entry.shape, c_strides(entry.shape))

    def parameter(self, key: TensorKey, *, requires_grad: bool) -> torch.nn.Parameter:
        """Return a parameter; the same object for names that were one tensor."""
        entry = self._entries[key]
        owner = entry.alias if isinstance(entry.alias, tuple) else key
        same = (owner, requires_grad)
        if same not in self._parameters:
            tensor = self.tensor(key)
            self._parameters[same] = torch.nn.Parameter(tensor, requires_grad=requires_grad)
        return self._parameters[same]

    def array(self, key: TensorKey) -> "np.ndarray[Any, Any]":
        """Return a numpy array, little-endian and in C order.

        Raises:
            FormatError: Damage, or a data type that numpy lacks.
        """
        entry = self._entries[key]
        dtype = _numpy_type(entry.dtype, f"{self._checkpoint.path}: array {entry.name!r}")
        return self._checkpoint.read(key).view(dtype).reshape(entry.shape)

    def _is_larger(self, entry: TensorEntry, view: View) -> bool:
        """Return whether a view repeats bytes, so that reading it apart would take more."""
        target = self._checkpoint.entry(view.target)
        return entry.nbytes > target.nbytes

    @without_pool
    def _storage(self, key: TensorKey) -> torch.UntypedStorage:
        if key not in self._storages:
            nbytes = self._checkpoint.entry(key).nbytes
            on_host = torch.empty(nbytes, dtype=torch.uint8, device=self._host())
            if nbytes and self._device.type != _META:
                self._checkpoint.read_into(key, on_host.numpy())
            self._storages[key] = on_host.to(self._device).untyped_storage()
        return self._storages[key]

    def _host(self) -> str:
        return _META if self._device.type == _META else "cpu"


def _numpy_type(dtype: DType, where: str) -> "np.dtype[Any]":
    found = numpy_dtype(dtype)
    if found is None:
        raise fault("TRE-9", where, f"numpy has no type {dtype.name}")
    return found


class Restore:
    """The visitor that turns nodes into the caller's objects."""

    def __init__(self, reader: TensorReader, keys: Any, where: str) -> None:
        self.reader = reader
        self.keys = keys
        self.where = where

    def visit(self, node: Any, path: Path) -> Any:
        """Return the object of a leaf, or the branch of a container."""
        leaf = _LEAVES.get(type(node))
        if leaf is not None:
            return leaf(self, node)
        build = _BUILDERS.get(type(node))
        children = children_of(node)
        if build is None or children is None:
            return node
        return Branch(children, lambda results: build(node, results))

    def device(self, node: DeviceNode) -> torch.device:
        """Return a device that the text names."""
        with suppress(RuntimeError):
            device = torch.device(node.text)
            # An index that is too large for torch comes back as another one.
            if str(device) == node.text:
                return device
        detail = f"torch {torch.__version__} knows no device {node.text!r}"
        raise fault("TRE-9", self.where, detail)

    def scalar(self, node: NumpyScalar) -> Any:
        """Return a numpy scalar."""
        return np.frombuffer(node.raw, dtype=_numpy_type(node.dtype, self.where))[0]

    def key(self, ref: Reference) -> TensorKey:
        """Return the key of the tensor that a reference names."""
        key: TensorKey = self.keys[ref.index]
        return key


def _ordered_dict(node: OrderedNode, results: Results) -> Any:
    count = len(node.items)
    built: OrderedDict[Any, Any] = OrderedDict(zip(node.items, results[:count], strict=True))
    vars(built).update(zip(map(str, node.attributes), results[count:], strict=True))
    return built


def _subclass(node: FlattenedNode, results: Results) -> Any:
    return put_together(node.label, results[0], zip_dict(list(node.parts))(results[1:]))


_Leaf: TypeAlias = Callable[[Restore, Any], Any]
_LEAVES: Final[dict[type, _Leaf]] = {
    TensorRef: lambda restore, node: restore.reader.tensor(restore.key(node)),
    ParameterRef: lambda restore, node: restore.reader.parameter(
        restore.key(node), requires_grad=node.requires_grad
    ),
    ArrayRef: lambda restore, node: restore.reader.array(restore.key(node)),
    NumpyScalar: lambda restore, node: restore.scalar(node),
    SizeNode: lambda restore, node: torch.Size(node.dims),
    DtypeNode: lambda restore, node: to_torch(node.dtype, where=restore.where),
    NumpyDtypeNode: lambda restore, node: _numpy_type(node.dtype, restore.where),
    DeviceNode: lambda restore, node: restore.device(node),
}
_BUILDERS: Final[dict[type, Callable[[Any, Results], Any]]] = {
    list: lambda _, results: results,
    tuple: lambda _, results: tuple(results),
    dict: lambda node, results: zip_dict(list(node))(results),
    CounterNode: lambda node, results: Counter(zip_dict(list(node.items))(results)),
    OrderedNode: _ordered_dict,
    FlattenedNode: _subclass,
}


def restore(checkpoint: Checkpoint, node: Node, keys: Any, device: torch.device) -> Any:
    """Return the state that a tree describes.

    Args:
        checkpoint: Where the tensors lie.
        node: The tree, or a part of it.
        keys: The key of each number in the tree.
        device: Where tensors go; on ``meta`` none of their bytes are read.

    Raises:
        FormatError: Damage in a tensor, or a type that torch or numpy lack here.
        PlanError: A tensor subclass that is not registered.
    """
    wanted = list(dict.fromkeys(keys[ref.index] for _, ref in walk_tensors(node)))
    reader = TensorReader(checkpoint, device, wanted)
    with torch.no_grad():
        return fold(node, Restore(reader, keys, checkpoint.path).visit)
