"""The nodes of a state tree, and the walk over them.

Values of Python itself stand for themselves; whatever belongs to another library is a neutral
record here, so that neither torch nor numpy arrays are needed to hold a tree. The walk keeps an
explicit stack: a deep tree costs list entries, never C stack.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, Union

from fpformat.dtypes import DType
from fpformat.names import Key, Path, PathElement


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor; `index` is its position in the tensor table."""

    index: int


@dataclass(frozen=True, slots=True)
class ParameterRef:
    """A trainable tensor of a model."""

    index: int
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class ArrayRef:
    """A numpy array."""

    index: int


@dataclass(frozen=True, slots=True)
class NumpyScalar:
    """A numpy scalar; `raw` is its little-endian element."""

    dtype: DType
    raw: bytes


@dataclass(frozen=True, slots=True)
class SizeNode:
    """A shape object of torch."""

    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DtypeNode:
    """A data type of torch, as a value."""

    dtype: DType


@dataclass(frozen=True, slots=True)
class NumpyDtypeNode:
    """A data type of numpy, as a value."""

    dtype: DType


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device of torch, as a value; `text` is such as ``cuda:1``."""

    text: str


@dataclass(frozen=True, slots=True)
class OrderedNode:
    """An ordered dictionary and the attributes set on it."""

    items: "dict[Key, Node]"
    attributes: "dict[Key, Node]"


@dataclass(frozen=True, slots=True)
class CounterNode:
    """A `collections.Counter`."""

    items: "dict[Key, Node]"


@dataclass(frozen=True, slots=True)
class FlattenedNode:
    """An object of a class that only its owner can rebuild from named parts and a context."""

    label: str
    context: "Node"
    parts: "dict[str, Node]"


Reference: TypeAlias = TensorRef | ParameterRef | ArrayRef
Node: TypeAlias = Union[
    None,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    "list[Node]",
    "tuple[Node, ...]",
    "dict[Key, Node]",
    Reference,
    NumpyScalar,
    SizeNode,
    DtypeNode,
    NumpyDtypeNode,
    DeviceNode,
    OrderedNode,
    CounterNode,
    FlattenedNode,
]


def _keyed(items: dict[Key, Node]) -> Iterator[tuple[PathElement, Node]]:
    for key, node in items.items():
        yield ("key", key), node


def _indexed(nodes: Iterable[Node]) -> Iterator[tuple[PathElement, Node]]:
    for index, node in enumerate(nodes):
        yield ("index", index), node


def _ordered(node: OrderedNode) -> Iterator[tuple[PathElement, Node]]:
    yield from _keyed(node.items)
    for name, child in node.attributes.items():
        yield ("attr", str(name)), child


def _flattened(node: FlattenedNode) -> Iterator[tuple[PathElement, Node]]:
    yield ("context", None), node.context
    for name, child in node.parts.items():
        yield ("part", name), child


_CHILDREN: Final[dict[type, Callable[[Any], Iterator[tuple[PathElement, Node]]]]] = {
    list: _indexed,
    tuple: _indexed,
    dict: _keyed,
    OrderedNode: _ordered,
    CounterNode: lambda node: _keyed(node.items),
    FlattenedNode: _flattened,
}


def children_of(node: Node) -> Iterator[tuple[PathElement, Node]] | None:
    """Return the path elements and nodes below `node` in order; None when it is a leaf."""
    children = _CHILDREN.get(type(node))
    return children(node) if children else None


def walk_leaves(node: Node) -> Iterator[tuple[Path, Node]]:
    """Yield every node without children, with its path, in the order of the tree.

    An empty container has no leaves.
    """
    stack: list[tuple[Path, Iterator[tuple[PathElement, Node]]]] = []
    children = children_of(node)
    if children is None:
        yield (), node
        return
    stack.append(((), children))
    while stack:
        path, children = stack[-1]
        for element, child in children:
            below = children_of(child)
            if below is not None:
                stack.append(((*path, element), below))
                break
            yield (*path, element), child
        else:
            stack.pop()


def walk_tensors(node: Node) -> Iterator[tuple[Path, Reference]]:
    """Yield every reference to a tensor, with its path, in the order of the tree."""
    for path, leaf in walk_leaves(node):
        if isinstance(leaf, TensorRef | ParameterRef | ArrayRef):
            yield path, leaf
