"""The pickle of a torch file, written by hand: protocol 2, only what `weights_only` accepts."""

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fpformat.dtypes import DType
from fpformat.names import Path, name_of
from fpformat.records.nodes import (
    CounterNode,
    DeviceNode,
    DtypeNode,
    Node,
    OrderedNode,
    ParameterRef,
    SizeNode,
    TensorRef,
)
from fpformat_tools.formats.torch.types import STORAGE_OF_DTYPE, TORCH_OF_DTYPE
from fpformat_tools.text import kind_text

MAX_LONG_NBYTES: Final = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of the output: its storage there, and how it looks at it.

    Attributes:
        key: Name of the storage in the archive.
        storage_nbytes: Length of the storage.
        dtype: Of the tensor.
        typed: Whether the storage carries the type; if not, the tensor does.
        offset: In elements, as are the strides.
    """

    key: str
    storage_nbytes: int
    dtype: DType
    typed: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class TorchPickle:
    """Appends opcodes; each method leaves exactly one value on the reader's stack."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._tensors = tensors
        self._out = bytearray(b"\x80\x02")
        self._memo: dict[str, int] = {}

    def dump(self, node: Node) -> bytes:
        """Return the pickle of a whole tree."""
        self._node(node, ())
        return bytes(self._out + b".")

    def _node(self, node: Node, path: Path) -> None:
        _WRITERS[type(node)](self, node, path)

    def name(self, module: str, name: str) -> None:
        """Write a name to import; the second time only a reference to the first."""
        both = f"{module}\n{name}"
        position = self._memo.get(both)
        if position is None:
            position = self._memo[both] = len(self._memo)
            self._out += b"c" + both.encode() + b"\nr" + struct.pack("<I", position)
        else:
            self._out += b"j" + struct.pack("<I", position)

    def text(self, text: str) -> None:
        """Write text."""
        raw = text.encode()
        self._out += b"X" + struct.pack("<I", len(raw)) + raw

    def integer(self, value: int) -> None:
        """Write a whole number."""
        if 0 <= value < 256:
            self._out += b"K" + bytes((value,))
        elif -(1 << 31) <= value < 1 << 31:
            self._out += b"J" + struct.pack("<i", value)
        else:
            nbytes = long_nbytes(value)
            self._out += b"\x8a" + bytes((nbytes,)) + value.to_bytes(nbytes, "little", signed=True)

    def counts(self, values: Iterable[int]) -> None:
        """Write a tuple of whole numbers."""
        self._out += b"("
        for value in values:
            self.integer(value)
        self._out += b"t"

    def real(self, value: float) -> None:
        """Write a floating-point number."""
        self._out += b"G" + struct.pack(">d", value)

    def constant(self, value: bool | None) -> None:
        """Write None, True or False."""
        self._out += b"N" if value is None else b"\x88" if value else b"\x89"

    def raw(self, value: bytes) -> None:
        """Write bytes as protocol 2 does: as text and a call that encodes it."""
        self.name("_codecs", "encode")
        self.text(value.decode("latin-1"))
        self.text("latin1")
        self._out += b"\x86R"

    def complex(self, value: complex) -> None:
        """Write a complex number."""
        self.name("__builtin__", "complex")
        self.real(value.real)
        self.real(value.imag)
        self._out += b"\x86R"

    def sequence(self, nodes: list[Node], path: Path) -> None:
        """Write a list."""
        self._out += b"]("
        for index, node in enumerate(nodes):
            self._node(node, (*path, ("index", index)))
        self._out += b"e"

    def fixed(self, nodes: tuple[Node, ...], path: Path) -> None:
        """Write a tuple."""
        self._out += b"("
        for index, node in enumerate(nodes):
            self._node(node, (*path, ("index", index)))
        self._out += b"t"

    def _pairs(self, pairs: Mapping[Any, Node], path: Path) -> None:
        self._out += b"("
        for key, node in pairs.items():
            self._node(key, path)
            self._node(node, (*path, ("key", key)))
        self._out += b"u"

    def mapping(self, pairs: dict[Any, Node], path: Path) -> None:
        """Write a dictionary."""
        self._out += b"}"
        self._pairs(pairs, path)

    def ordered(self, node: OrderedNode, path: Path) -> None:
        """Write an ordered dictionary and its attributes."""
        self._empty_ordered()
        self._pairs(node.items, path)
        if node.attributes:
            self._out += b"}("
            for name, child in node.attributes.items():
                self.text(str(name))
                self._node(child, (*path, ("attr", str(name))))
            self._out += b"ub"

    def _empty_ordered(self) -> None:
        self.name("collections", "OrderedDict")
        self._out += b")R"

    def counter(self, node: CounterNode, path: Path) -> None:
        """Write a counter."""
        self.name("collections", "Counter")
        self.mapping(node.items, path)
        self._out += b"\x85R"

    def dims(self, node: SizeNode) -> None:
        """Write a shape as a value."""
        self.name("torch", "Size")
        self.counts(node.dims)
        self._out += b"\x85R"

    def device(self, node: DeviceNode) -> None:
        """Write a device."""
        self.name("torch", "device")
        self.text(node.text)
        self._out += b"\x85R"

    def tensor(self, name: str) -> None:
        """Write the call that rebuilds a tensor."""
        stored = self._tensors[name]
        self.name("torch._utils", "_rebuild_tensor_v2" if stored.typed else "_rebuild_tensor_v3")
        self._out += b"(("
        self.text("storage")
        if stored.typed:
            self.name("torch", STORAGE_OF_DTYPE[stored.dtype.name])
        else:
            self.name("torch.storage", "UntypedStorage")
        self.text(stored.key)
        self.text("cpu")
        self.integer(stored.storage_nbytes // (stored.dtype.nbytes if stored.typed else 1))
        self._out += b"tQ"
        self.integer(stored.offset)
        self.counts(stored.shape)
        self.counts(stored.strides)
        self.constant(False)
        self._empty_ordered()
        if not stored.typed:
            self.name("torch", TORCH_OF_DTYPE[stored.dtype.name])
        self._out += b"tR"

    def parameter(self, node: ParameterRef, path: Path) -> None:
        """Write the call that rebuilds a parameter."""
        self.name("torch._utils", "_rebuild_parameter")
        self.tensor(name_of(path))
        self.constant(node.requires_grad)
        self._empty_ordered()
        self._out += b"\x87R"


def long_nbytes(value: int) -> int:
    """Return the length of a whole number in two's complement."""
    return value.bit_length() // 8 + 1


_WRITERS: Final[dict[type, Callable[[TorchPickle, Any, Path], None]]] = {
    type(None): lambda out, node, _: out.constant(node),
    bool: lambda out, node, _: out.constant(node),
    int: lambda out, node, _: out.integer(node),
    float: lambda out, node, _: out.real(node),
    complex: lambda out, node, _: out.complex(node),
    str: lambda out, node, _: out.text(node),
    bytes: lambda out, node, _: out.raw(node),
    list: TorchPickle.sequence,
    tuple: TorchPickle.fixed,
    dict: TorchPickle.mapping,
    OrderedNode: TorchPickle.ordered,
    CounterNode: TorchPickle.counter,
    SizeNode: lambda out, node, _: out.dims(node),
    DtypeNode: lambda out, node, _: out.name("torch", TORCH_OF_DTYPE[node.dtype.name]),
    DeviceNode: lambda out, node, _: out.device(node),
    TensorRef: lambda out, node, path: out.tensor(name_of(path)),
    ParameterRef: TorchPickle.parameter,
}


def reason_to_refuse(node: Node) -> str | None:
    """Return why a node has no place in a file for `weights_only`, None if it has one."""
    if type(node) not in _WRITERS:
        return kind_text(node)
    if isinstance(node, int) and long_nbytes(node) > MAX_LONG_NBYTES:
        return "an integer of more than 255 bytes"
    return None
