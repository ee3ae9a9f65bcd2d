"""The state tree: nodes <-> bytes.

Owns the tags of the state tree. `parse_tree` and `dump_tree` keep an explicit stack instead of
recursing: the depth that a document claims costs list entries, not C stack. A parser's frame
collects the children of one container; the table of tags says how many children that is and
how the node is built from them. Every count is compared with the bytes left before anything is
collected, because each node takes at least one byte. What a reference means, and whether the
tensor exists, is for the caller to check.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any, Final

from fpformat.errors import PlanError
from fpformat.limits import KEY_INTS, MAX_TREE_DEPTH
from fpformat.names import Key
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
    walk_tensors,
)
from fpformat.records.wire import Cursor

__all__ = [
    "ArrayRef",
    "CounterNode",
    "DeviceNode",
    "DtypeNode",
    "FlattenedNode",
    "Node",
    "NumpyDtypeNode",
    "NumpyScalar",
    "OrderedNode",
    "ParameterRef",
    "Reference",
    "SizeNode",
    "TensorRef",
    "dump_tree",
    "parse_tree",
    "walk_tensors",
]

_U32: Final = struct.Struct("<I")
_U16: Final = struct.Struct("<H")
_I64: Final = struct.Struct("<q")
_F64: Final = struct.Struct("<d")
_C128: Final = struct.Struct("<dd")
_MIN_I64: Final = -(2**63)
_MAX_I64: Final = 2**63 - 1
_MAX_U32: Final = 2**32 - 1
_KEY_TYPES: Final = frozenset({str, int, bool, type(None)})


def _parse_big_int(cursor: Cursor) -> int:
    raw = cursor.take(cursor.u32())
    value = int.from_bytes(raw, "little", signed=True)
    if _MIN_I64 <= value <= _MAX_I64:
        cursor.fail("TRE-3", f"the integer {value} has the long form but fits into 64 bits")
    if len(raw) != _int_nbytes(value):
        cursor.fail("TRE-3", f"an integer takes {len(raw)} bytes, {_int_nbytes(value)} suffice")
    return value


def _parse_parameter(cursor: Cursor) -> ParameterRef:
    index = cursor.u32()
    (flag,) = cursor.take(1)
    if flag > 1:
        cursor.fail("TRE-2", f"requires_grad is {flag}, expected 0 or 1")
    return ParameterRef(index, flag == 1)


def _parse_scalar(cursor: Cursor) -> NumpyScalar:
    dtype = cursor.numpy_type()
    return NumpyScalar(dtype, cursor.take(dtype.nbytes))


def _parse_size(cursor: Cursor) -> SizeNode:
    count = cursor.count(each=8)
    return SizeNode(struct.unpack(f"<{count}q", cursor.take(8 * count)))


_LEAF_PARSERS: Final[dict[int, Callable[[Cursor], Node]]] = {
    0: lambda cursor: None,
    1: lambda cursor: False,
    2: lambda cursor: True,
    3: lambda cursor: int.from_bytes(cursor.take(8), "little", signed=True),
    4: _parse_big_int,
    5: lambda cursor: float(_F64.unpack(cursor.take(8))[0]),
    6: lambda cursor: complex(*_C128.unpack(cursor.take(16))),
    7: Cursor.text,
    8: lambda cursor: cursor.take(cursor.u32()),
    12: lambda cursor: TensorRef(cursor.u32()),
    13: _parse_parameter,
    14: lambda cursor: ArrayRef(cursor.u32()),
    15: _parse_scalar,
    16: _parse_size,
    17: lambda cursor: DtypeNode(cursor.dtype()),
    18: lambda cursor: DeviceNode(cursor.text()),
    21: lambda cursor: NumpyDtypeNode(cursor.numpy_type()),
}


class _Frame:
    """A container whose children are being read; `count` of them are known to follow."""

    __slots__ = ("build", "children", "count", "has_late_count")

    def __init__(
        self, count: int, build: Callable[[list[Node], Cursor], Node], late: bool = False
    ) -> None:
        self.count = count
        self.build = build
        self.children: list[Node] = []
        self.has_late_count = late

    def is_complete(self, cursor: Cursor) -> bool:
        """Return whether all children are here; reads the count that follows a context."""
        if len(self.children) < self.count:
            return False
        if not self.has_late_count:
            return True
        self.has_late_count = False
        self.count += 2 * cursor.count(each=2)
        return len(self.children) == self.count


def _build_dict(children: list[Node], cursor: Cursor) -> dict[Key, Node]:
    """Pair keys and values; equality of Python is the rule of TRE-5: False is 0, True is 1."""
    keys: list[Any] = children[::2]
    for key in keys:
        if type(key) not in _KEY_TYPES:
            kind = type(key).__name__
            cursor.fail("TRE-5", f"a key is a {kind}, expected str, int, bool or None")
        if type(key) is int and key not in KEY_INTS:
            cursor.fail("TRE-5", "an int key does not fit 64 bits")
    built: dict[Key, Node] = dict(zip(keys, children[1::2], strict=True))
    if len(built) != len(keys):
        cursor.fail("TRE-5", f"a dict has {len(keys)} keys, only {len(built)} of them different")
    return built


def _build_counter(children: list[Node], cursor: Cursor) -> CounterNode:
    return CounterNode(_build_dict(children, cursor))


def _build_ordered(children: list[Node], cursor: Cursor) -> OrderedNode:
    attributes = children.pop()
    if type(attributes) is not dict:
        cursor.fail("TRE-1", "the attributes of an ordered dict are no dict (tag 11)")
    if any(type(name) is not str for name in attributes):
        cursor.fail("TRE-5", "an attribute of an ordered dict has a name that is no str")
    return OrderedNode(_build_dict(children, cursor), attributes)


def _open_flattened(cursor: Cursor) -> _Frame:
    label = cursor.text()

    def build(children: list[Node], cursor: Cursor) -> Node:
        context, *pairs = children
        if any(type(name) is not str for name in pairs[::2]):
            cursor.fail("TRE-5", f"a part of {label!r} has a name that is no str")
        parts: dict[Any, Node] = _build_dict(pairs, cursor)
        return FlattenedNode(label, context, parts)

    return _Frame(1, build, late=True)


_OPENERS: Final[dict[int, Callable[[Cursor], _Frame]]] = {
    9: lambda cursor: _Frame(cursor.count(each=1), lambda children, _: children),
    10: lambda cursor: _Frame(cursor.count(each=1), lambda children, _: tuple(children)),
    11: lambda cursor: _Frame(2 * cursor.count(each=2), _build_dict),
    19: lambda cursor: _Frame(2 * cursor.count(each=2) + 1, _build_ordered),
    20: _open_flattened,
    22: lambda cursor: _Frame(2 * cursor.count(each=2), _build_counter),
}


def _parse_node(cursor: Cursor, *, depth: int) -> tuple[Node, _Frame | None]:
    """Return the next node, or the frame of a container that has children."""
    if depth > MAX_TREE_DEPTH:
        cursor.fail("TRE-4", f"a node is deeper than {MAX_TREE_DEPTH}")
    (tag,) = cursor.take(1)
    parse = _LEAF_PARSERS.get(tag)
    if parse:
        return parse(cursor), None
    if tag not in _OPENERS:
        cursor.fail("TRE-1", f"tag {tag} is not known")
    frame = _OPENERS[tag](cursor)
    if frame.is_complete(cursor):
        return frame.build(frame.children, cursor), None
    return None, frame


def parse_tree(document: bytes, where: str) -> Node:
    """Parse a state tree.

    Args:
        document: The whole object.
        where: Name of the segment and object, for messages.

    Returns:
        The root node. References are not compared with a tensor table (TRE-6).

    Raises:
        FormatError: The first fault found, one of TRE-1 to TRE-5, TRE-7, TRE-9.
    """
    cursor = Cursor(document, where)
    stack: list[_Frame] = []
    while True:
        node, frame = _parse_node(cursor, depth=len(stack) + 1)
        if frame is not None:
            stack.append(frame)
            continue
        while stack:
            frame = stack[-1]
            frame.children.append(node)
            if len(frame.children) < frame.count or not frame.is_complete(cursor):
                break
            stack.pop()
            node = frame.build(frame.children, cursor)
        if not stack:
            break
    if cursor.position != len(document):
        cursor.fail("TRE-2", f"{len(document) - cursor.position} bytes follow the root node")
    return node


def _int_nbytes(value: int) -> int:
    """Return the size of the shortest two's complement form."""
    return (value if value >= 0 else ~value).bit_length() // 8 + 1


def _counted(tag: int, count: int) -> bytes:
    if count > _MAX_U32:
        raise PlanError(f"state tree: {count} entries or bytes in one node exceed 2^32-1 (TRE-10)")
    return bytes((tag,)) + _U32.pack(count)


def _text(tag: int, text: str) -> bytes:
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:
        raise PlanError(f"state tree: {text!r} has a lone surrogate (TRE-10)") from error
    return _counted(tag, len(raw)) + raw


def _dump_int(value: int) -> bytes:
    if _MIN_I64 <= value <= _MAX_I64:
        return b"\3" + _I64.pack(value)
    nbytes = _int_nbytes(value)
    return _counted(4, nbytes) + value.to_bytes(nbytes, "little", signed=True)


def _dump_scalar(node: NumpyScalar) -> bytes:
    if len(node.raw) != node.dtype.nbytes:
        raise PlanError(f"state tree: {len(node.raw)} bytes for one {node.dtype.name} (TRE-10)")
    return b"\x0f" + _U16.pack(node.dtype.code) + node.raw


def _dump_size(node: SizeNode) -> bytes:
    return _counted(16, len(node.dims)) + struct.pack(f"<{len(node.dims)}q", *node.dims)


_LEAF_DUMPERS: Final[dict[type, Callable[[Any], bytes]]] = {
    type(None): lambda _: b"\0",
    bool: lambda node: b"\2" if node else b"\1",
    int: _dump_int,
    float: lambda node: b"\5" + _F64.pack(node),
    complex: lambda node: b"\6" + _C128.pack(node.real, node.imag),
    str: lambda node: _text(7, node),
    bytes: lambda node: _counted(8, len(node)) + node,
    TensorRef: lambda node: b"\x0c" + _U32.pack(node.index),
    ParameterRef: lambda node: b"\x0d" + _U32.pack(node.index) + bytes((node.requires_grad,)),
    ArrayRef: lambda node: b"\x0e" + _U32.pack(node.index),
    NumpyScalar: _dump_scalar,
    SizeNode: _dump_size,
    DtypeNode: lambda node: b"\x11" + _U16.pack(node.dtype.code),
    DeviceNode: lambda node: _text(18, node.text),
    NumpyDtypeNode: lambda node: b"\x15" + _U16.pack(node.dtype.code),
}


class _Count:
    """A count that stands between two children of one node."""

    __slots__ = ("count",)

    def __init__(self, count: int) -> None:
        self.count = count


def _named(items: dict[Any, Node]) -> dict[Any, Node]:
    """Return attributes or parts, whose names have to be str."""
    for name in items:
        if type(name) is not str:
            raise PlanError(f"state tree: the name {name!r} is no str; see TRE-5 (TRE-10)")
    return items


def _pairs(items: dict[Key, Node]) -> Iterator[Any]:
    for key in items:
        if type(key) not in _KEY_TYPES:
            kind = type(key).__name__
            raise PlanError(f"state tree: key {key!r} is a {kind}; see TRE-5 (TRE-10)")
        if type(key) is int and key not in KEY_INTS:
            raise PlanError("state tree: an int key does not fit 64 bits; see TRE-5 (TRE-10)")
    return chain.from_iterable(items.items())


_CONTAINER_DUMPERS: Final[dict[type, Callable[[Any], tuple[bytes, Iterable[Any]]]]] = {
    list: lambda node: (_counted(9, len(node)), node),
    tuple: lambda node: (_counted(10, len(node)), node),
    dict: lambda node: (_counted(11, len(node)), _pairs(node)),
    OrderedNode: lambda node: (
        _counted(19, len(node.items)),
        chain(_pairs(node.items), (_named(node.attributes),)),
    ),
    FlattenedNode: lambda node: (
        _text(20, node.label),
        chain((node.context, _Count(len(node.parts))), _pairs(_named(node.parts))),
    ),
    CounterNode: lambda node: (_counted(22, len(node.items)), _pairs(node.items)),
}


def dump_tree(node: Node, *, index_of: Callable[[int], int] | None = None) -> bytes:
    """Return the bytes of a state tree.

    Args:
        node: The root.
        index_of: Returns what is written in the place of a reference's index; the index by default.

    Raises:
        PlanError: The tree holds something without a tag, a key of another type, text without a
            UTF-8 form, or is deeper than 128 (TRE-10).
    """
    out = bytearray()
    stack: list[Iterator[Any]] = [iter((node,))]
    while stack:
        for child in stack[-1]:
            if len(stack) > MAX_TREE_DEPTH:
                raise PlanError(f"state tree: deeper than {MAX_TREE_DEPTH} (TRE-10)")
            kind = type(child)
            if index_of is not None and isinstance(child, Reference):
                child = replace(child, index=index_of(child.index))
            if kind in _LEAF_DUMPERS:
                out += _LEAF_DUMPERS[kind](child)
            elif kind in _CONTAINER_DUMPERS:
                head, children = _CONTAINER_DUMPERS[kind](child)
                out += head
                stack.append(iter(children))
                break
            elif kind is _Count:
                out += _U32.pack(child.count)
            else:
                raise PlanError(f"state tree: a {kind.__name__} has no tag (TRE-10)")
        else:
            stack.pop()
    return bytes(out)
