"""From the inert values of a torch pickle to a state tree.

Only what is listed here has a form; everything else is a problem with its path, and all problems
are collected. Containers that a pickle shares are written out at each place, so the tree may be
larger than the pickle; how much larger is bounded. Cycles are problems.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any, Final

from fpformat.limits import KEY_INTS, MAX_TREE_DEPTH
from fpformat.names import Key, Path, PathElement
from fpformat.records.nodes import (
    ArrayRef,
    CounterNode,
    DeviceNode,
    DtypeNode,
    Node,
    NumpyDtypeNode,
    NumpyScalar,
    OrderedNode,
    ParameterRef,
    SizeNode,
    TensorRef,
)
from fpformat_tools.errors import SourceError
from fpformat_tools.formats.torch.tensors import (
    TensorReader,
    is_plain_tensor_type,
    is_tensor_call,
)
from fpformat_tools.formats.torch.types import DTYPE_OF_TORCH
from fpformat_tools.pickles import numpy_values
from fpformat_tools.pickles.values import (
    Built,
    Global,
    Members,
    OddKey,
    Persistent,
    Unrepresentable,
    runs_code,
)
from fpformat_tools.streams.ranges import HeldRange
from fpformat_tools.streams.state import whole
from fpformat_tools.text import listed, path_text, shown

MORE_NODES: Final = 1 << 20
MORE_TEXT_NBYTES: Final = 1 << 28
MORE_NAMES_NBYTES: Final = 1 << 26
MAX_MEMORY_NBYTES: Final = 400 * 1024 * 1024
MAX_PROBLEMS: Final = 100_000
# What nodes take, rounded up; a container's slots for them included.
_LEAF_NBYTES: Final = 16
_CONTAINER_NBYTES: Final = 128
_ENTRY_NBYTES: Final = 96
_TENSOR_NBYTES: Final = 400
# As torch keeps it: a signed byte.
_DEVICE_INDEXES: Final = range(128)
_DEVICE: Final = re.compile(r"[a-z][a-z0-9_]*(:[0-9]{1,3})?")
_BUILTINS: Final = ("__builtin__", "builtins")
_PARAMETERS: Final = (
    Global("torch._utils", "_rebuild_parameter"),
    Global("torch._utils", "_rebuild_parameter_with_state"),
)


class _LeftOut:
    """Stands where a value was that has no form."""


_LEFT_OUT: Final = _LeftOut()


class ObjectReader:
    """Turns values into nodes.

    Attributes:
        problems: For each value without a form: its path and what it is.
        warnings: What changed on the way, although it has a form.
    """

    def __init__(self, tensors: TensorReader, *, pickle_nbytes: int, where: str) -> None:
        # Every value takes a byte of the pickle; what is beyond comes from sharing.
        self._node_limit = pickle_nbytes + MORE_NODES
        self._text_limit_nbytes = pickle_nbytes + MORE_TEXT_NBYTES
        self._names_limit_nbytes = pickle_nbytes + MORE_NAMES_NBYTES
        self.problems: list[tuple[Path, str]] = []
        self.warnings: list[str] = []
        self._tensors = tensors
        self._where = where
        self._active: set[int] = set()
        self._nodes = 0
        self._text_nbytes = 0
        self._names_nbytes = 0
        self._memory_nbytes = 0

    def read(self, value: Any) -> Node:
        """Return the tree of a whole state; None when the root itself has no form."""
        node = self._node(value, ())
        return None if isinstance(node, _LeftOut) else node

    def _node(self, value: Any, path: Path) -> Any:
        leaf = _LEAVES.get(type(value))
        self._count(1, memory_nbytes=_LEAF_NBYTES if leaf else _CONTAINER_NBYTES)
        try:
            if leaf is not None:
                return leaf(self, value)
            self._enter(value, path)
            try:
                return self._composite(value, path)
            finally:
                self._active.discard(id(value))
        except Unrepresentable as error:
            self._problem(path, str(error))
            return _LEFT_OUT

    def _count(self, nodes: int, *, memory_nbytes: int = 0) -> None:
        """Count values that are looked at, and what their nodes take of memory."""
        self._nodes += nodes
        self._memory_nbytes += memory_nbytes
        if self._nodes > self._node_limit:
            raise self._swollen()
        if self._memory_nbytes > MAX_MEMORY_NBYTES:
            detail = f"its state takes more than {MAX_MEMORY_NBYTES:,} bytes beside its tensors"
            raise SourceError("limit", self._where, detail)

    def charge(self, nbytes: int) -> None:
        """Count bytes of text or arrays that are about to be copied."""
        self._text_nbytes += nbytes
        if self._text_nbytes > self._text_limit_nbytes:
            raise self._swollen()

    def _name(self, path: Path, text: str = "") -> None:
        """Count what will be written of a path, of which many may share a long key."""
        keys = sum(len(value) for _, value in path if isinstance(value, str))
        self._names_nbytes += keys + len(text)
        if self._names_nbytes > self._names_limit_nbytes:
            raise self._swollen()

    def _swollen(self) -> SourceError:
        detail = "its state is far larger than its pickle, which shares the same values often"
        return SourceError("limit", self._where, detail)

    def _problem(self, path: Path, reason: str) -> None:
        self._name(path, reason)
        self.problems.append((path, reason))
        self._bound(len(self.problems), "values have no form in fpformat")

    def _warn(self, path: Path, text: str) -> None:
        self._name(path, text)
        self.warnings.append(f"{path_text(path)}: {text}")
        self._bound(len(self.warnings), "values have lost something")

    def _bound(self, number: int, what: str) -> None:
        if number > MAX_PROBLEMS:
            raise SourceError("limit", self._where, f"more than {MAX_PROBLEMS:,} of its {what}")

    def _tensor(self, built: Built, path: Path) -> int:
        self._count(0, memory_nbytes=_TENSOR_NBYTES)
        self._name(path)
        return self._tensors.index_of(built)

    def _enter(self, value: Any, path: Path) -> None:
        # The attributes of an ordered dictionary lie in a dictionary of their own.
        depth = 1 + len(path) + sum(kind == "attr" for kind, _ in path)
        if depth >= MAX_TREE_DEPTH or id(value) in self._active:
            raise Unrepresentable("a value that contains itself, or is nested 128 deep")
        self._active.add(id(value))

    def _composite(self, value: Any, path: Path) -> Any:
        if isinstance(value, dict):
            return self._pairs(value.items(), path)
        if isinstance(value, list):
            return self._sequence(value, path)
        if isinstance(value, tuple):
            return tuple(self._sequence(value, path))
        if isinstance(value, Built):
            return self._built(value, path)
        if isinstance(value, Global):
            return self._global(value)
        if isinstance(value, Members):
            raise Unrepresentable(f"a {value.kind}")
        if isinstance(value, Persistent):
            raise Unrepresentable("a storage outside of any tensor")
        raise Unrepresentable(f"a {type(value).__name__}")

    def text(self, text: str) -> str:
        """Return text that has a UTF-8 form."""
        self.charge(len(text))
        try:
            self.charge(len(text.encode()) - len(text))
        except UnicodeEncodeError as error:
            raise Unrepresentable("text with a lone surrogate") from error
        return text

    def held(self, raw: bytes) -> bytes:
        """Return bytes and count them."""
        self.charge(len(raw))
        return raw

    def _sequence(self, values: "list[Any] | tuple[Any, ...]", path: Path) -> list[Node]:
        nodes = [self._node(value, (*path, ("index", i))) for i, value in enumerate(values)]
        # A place that is left out keeps the others at theirs.
        return [None if isinstance(node, _LeftOut) else node for node in nodes]

    def _pairs(
        self, pairs: Iterable[tuple[Any, Any]], path: Path, *, kind: str = "key"
    ) -> dict[Key, Node]:
        nodes: dict[Key, Node] = {}
        for key, value in pairs:
            self._count(0, memory_nbytes=_ENTRY_NBYTES)
            problem = _key_problem(key, kind)
            if problem:
                odd: Path = (*path, ("key", f"<a key of type {_kind_of(key)}>"))
                self._problem(odd, problem)
                continue
            try:
                checked: Key = self.text(key) if isinstance(key, str) else key
            except Unrepresentable as error:
                self._problem((*path, ("key", "<a key>")), f"is {error}")
                continue
            element: PathElement = ("attr", str(checked)) if kind == "attr" else ("key", checked)
            node = self._node(value, (*path, element))
            if not isinstance(node, _LeftOut):
                nodes[checked] = node
        return nodes

    def _global(self, value: Global) -> Node:
        if value.module == "torch" and value.name in DTYPE_OF_TORCH:
            return DtypeNode(DTYPE_OF_TORCH[value.name])
        if runs_code(value):
            raise Unrepresentable(f"refuses to run code: {value}")
        raise Unrepresentable(f"a reference to {value}")

    def _built(self, built: Built, path: Path) -> Any:
        if is_tensor_call(built):
            return TensorRef(self._tensor(built, path))
        if numpy_values.is_array(built):
            return self._array(built, path)
        if numpy_values.is_scalar(built):
            return NumpyScalar(*numpy_values.scalar_of(built, self.charge))
        if numpy_values.is_dtype(built):
            return NumpyDtypeNode(numpy_values.dtype_of(built)[0])
        function = built.function
        if isinstance(function, Global):
            known = _CALLS.get((function.module, function.name))
            if known is not None:
                return known(self, built, path)
            if runs_code(function):
                raise Unrepresentable(f"refuses to run code: {function}")
        raise Unrepresentable(f"an object built by {built.caller}, which is not called")

    def _array(self, built: Built, path: Path) -> ArrayRef:
        self._count(0, memory_nbytes=_TENSOR_NBYTES)
        self._name(path)
        dtype, shape, raw = numpy_values.array_of(built, self.charge)
        reader = self._tensors
        reader.storages.append(HeldRange(raw))
        reader.tensors.append(whole(base=len(reader.storages) - 1, dtype=dtype, shape=shape))
        return ArrayRef(len(reader.tensors) - 1)

    def ordered(self, built: Built, path: Path) -> Node:
        """Return an ordered dictionary with its attributes."""
        pairs = list(built.pairs)
        if built.arguments:
            given = built.arguments[0]
            if len(built.arguments) > 1 or not isinstance(given, list):
                raise Unrepresentable("an ordered dictionary built in an unknown way")
            self._count(len(given))
            if any(not isinstance(pair, list | tuple) or len(pair) != 2 for pair in given):
                raise Unrepresentable("an ordered dictionary built in an unknown way")
            pairs = [tuple(pair) for pair in given] + pairs
        # Two dictionaries, and the node that holds them.
        self._count(0, memory_nbytes=2 * _CONTAINER_NBYTES)
        attributes: dict[Key, Node] = {}
        for state in built.states:
            if not isinstance(state, dict):
                raise Unrepresentable("an ordered dictionary with a state that is no dictionary")
            attributes.update(self._pairs(state.items(), path, kind="attr"))
        return OrderedNode(self._pairs(pairs, path), attributes)

    def counter(self, built: Built, path: Path) -> Node:
        """Return a counter."""
        given = built.arguments[0] if built.arguments else {}
        if not isinstance(given, dict) or built.states:
            raise Unrepresentable("a counter built in an unknown way")
        return CounterNode(self._pairs((*given.items(), *built.pairs), path))

    def default(self, built: Built, path: Path) -> Node:
        """Return a dictionary in place of one with a default, and say so."""
        if built.states:
            raise Unrepresentable("a defaultdict with a state")
        self._warn(path, "a defaultdict, kept as a plain dict")
        return self._pairs(built.pairs, path)

    def size(self, built: Built, path: Path) -> Node:
        """Return a shape."""
        given = built.arguments[0] if len(built.arguments) == 1 else ()
        if isinstance(given, tuple | list):
            self._count(len(given), memory_nbytes=_LEAF_NBYTES * len(given))
        if not isinstance(given, tuple | list) or any(
            type(dim) is not int or abs(dim) >= 1 << 63 for dim in given
        ):
            raise Unrepresentable("a torch.Size that is not of whole numbers")
        return SizeNode(tuple(given))

    def device(self, built: Built, path: Path) -> Node:
        """Return a device."""
        parts = built.arguments
        if not 1 <= len(parts) <= 2 or not isinstance(parts[0], str):
            raise Unrepresentable("a torch.device built in an unknown way")
        kind, _, written = parts[0].partition(":")
        if not _DEVICE.fullmatch(parts[0]) or (written and len(parts) > 1):
            raise Unrepresentable(f"a torch.device called {shown(parts[0])}")
        if len(parts) == 1 and not written:
            return DeviceNode(kind)
        index = int(written) if written else parts[1]
        if type(index) is not int or index not in _DEVICE_INDEXES:
            raise Unrepresentable("a torch.device whose index is no whole number from 0 to 127")
        return DeviceNode(f"{kind}:{index}")

    def parameter(self, built: Built, path: Path) -> Node:
        """Return a parameter; attributes that were set on it are lost with a warning."""
        parts = built.arguments
        if len(parts) < 2 or not isinstance(parts[1], bool):
            raise Unrepresentable("a parameter built in an unknown way")
        if not is_tensor_call(parts[0]):
            raise Unrepresentable("a parameter of something else than a plain tensor")
        index = self._tensor(parts[0], path)
        self._lost(parts[3] if len(parts) > 3 else None, path)
        return ParameterRef(index, parts[1])

    def typed(self, built: Built, path: Path) -> Node:
        """Return a tensor that carries attributes, if it is of a class of torch itself."""
        parts = built.arguments
        if len(parts) != 4 or not isinstance(parts[2], tuple):
            raise Unrepresentable("a tensor subclass built in an unknown way")
        if not is_plain_tensor_type(parts[1]):
            named = str(parts[1]) if isinstance(parts[1], Global) else "of an unknown name"
            raise Unrepresentable(f"a tensor of the class {named}")
        inner = Built(parts[0], parts[2])
        if is_tensor_call(inner):
            node: Node = TensorRef(self._tensor(inner, path))
        elif inner.function in _PARAMETERS:
            node = self.parameter(inner, path)
        else:
            raise Unrepresentable(f"a tensor rebuilt by {inner.caller}")
        self._lost(parts[3], path)
        return node

    def _lost(self, state: Any, path: Path) -> None:
        if isinstance(state, dict) and state:
            self._count(len(state))
            names = listed(key for key in state if isinstance(key, str))
            self._warn(path, f"attributes of the tensor are lost: {names}")
        elif state is not None and not isinstance(state, dict):
            self._warn(path, "attributes of the tensor are lost")


def _key_problem(key: Any, kind: str) -> str | None:
    if kind == "attr" and type(key) is not str:
        return "names of attributes are text"
    # A key that is odd although it is an integer is beyond the range; a range compares what is none
    # with each of its numbers.
    if type(key) is int and key in KEY_INTS:
        return None
    if type(key) is int or (isinstance(key, OddKey) and type(key.value) is int):
        return "a key that is an integer fits 64 bits with its sign"
    if key is not None and type(key) not in (str, bool):
        return "keys are str, int, bool or None"
    return None


def _kind_of(key: Any) -> str:
    value = key.value if isinstance(key, OddKey) else key
    return value.caller if isinstance(value, Built) else type(value).__name__


def _complex(reader: ObjectReader, built: Built, path: Path) -> Node:
    parts = built.arguments
    if len(parts) != 2 or any(type(part) not in (int, float) for part in parts):
        raise Unrepresentable("a complex number built in an unknown way")
    try:
        return complex(*parts)
    except OverflowError as error:
        raise Unrepresentable("a complex number too large for its type") from error


def _bytes(reader: ObjectReader, built: Built, path: Path) -> Node:
    return numpy_values.bytes_of(built, reader.charge)


_LEAVES: Final[dict[type, Callable[[ObjectReader, Any], Node]]] = {
    type(None): lambda _, value: value,
    bool: lambda _, value: value,
    int: lambda _, value: value,
    float: lambda _, value: value,
    complex: lambda _, value: value,
    str: lambda reader, value: reader.text(value),
    bytes: lambda reader, value: reader.held(value),
}
_CALLS: Final[dict[tuple[str, str], Callable[[ObjectReader, Built, Path], Any]]] = {
    ("collections", "OrderedDict"): ObjectReader.ordered,
    ("collections", "Counter"): ObjectReader.counter,
    ("collections", "defaultdict"): ObjectReader.default,
    ("torch", "Size"): ObjectReader.size,
    ("torch", "device"): ObjectReader.device,
    ("torch._utils", "_rebuild_parameter"): ObjectReader.parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): ObjectReader.parameter,
    ("torch.nn.parameter", "Parameter"): ObjectReader.parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): ObjectReader.typed,
    ("_codecs", "encode"): _bytes,
    **{(module, "complex"): _complex for module in _BUILTINS},
    **{(module, "bytes"): _bytes for module in _BUILTINS},
}
