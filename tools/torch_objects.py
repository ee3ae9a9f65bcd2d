"""From the inert values of a torch pickle to a state tree.

Only what is listed here has a form; everything else is a problem with its path, and all problems
are collected. Containers that a pickle shares are written out at each place, so the tree may be
larger than the pickle; how much larger is bounded. Cycles are problems.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

from fpformat.limits import KEY_INTS, MAX_TREE_DEPTH
from fpformat.names import Key, Path, PathElement
from fpformat.nodes import (
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
from fpformat_tools import numpy_values
from fpformat_tools.errors import SourceError
from fpformat_tools.pickle_values import Built, Global, Members, OddKey, Persistent
from fpformat_tools.ranges import HeldRange
from fpformat_tools.state import whole
from fpformat_tools.text import listed, path_text
from fpformat_tools.torch_tensors import (
    TensorReader,
    Unrepresentable,
    is_plain_tensor_type,
    is_tensor_call,
)
from fpformat_tools.torch_types import DTYPE_OF_TORCH

MORE_NODES: Final = 1 << 20
MORE_TEXT_NBYTES: Final = 1 << 28
_BUILTINS: Final = ("__builtin__", "builtins")


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
        self.problems: list[tuple[Path, str]] = []
        self.warnings: list[str] = []
        self._tensors = tensors
        self._where = where
        self._active: set[int] = set()
        self._nodes = 0
        self._text_nbytes = 0

    def read(self, value: Any) -> Node:
        """Return the tree of a whole state; None when the root itself has no form."""
        node = self._node(value, ())
        return None if isinstance(node, _LeftOut) else node

    def _node(self, value: Any, path: Path) -> Any:
        self._nodes += 1
        if self._nodes > self._node_limit or self._text_nbytes > self._text_limit_nbytes:
            detail = "its state is far larger than its pickle, which shares the same values often"
            raise SourceError("limit", self._where, detail)
        leaf = _LEAVES.get(type(value))
        try:
            if leaf is not None:
                return leaf(self, value)
            self._enter(value, path)
            try:
                return self._composite(value, path)
            finally:
                self._active.discard(id(value))
        except Unrepresentable as error:
            self.problems.append((path, str(error)))
            return _LEFT_OUT

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
        try:
            self._text_nbytes += len(text.encode())
        except UnicodeEncodeError as error:
            raise Unrepresentable("text with a lone surrogate") from error
        return text

    def held(self, raw: bytes) -> bytes:
        """Return bytes and count them."""
        self._text_nbytes += len(raw)
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
            problem = _key_problem(key, kind)
            if problem:
                odd: Path = (*path, ("key", f"<a key of type {_kind_of(key)}>"))
                self.problems.append((odd, problem))
                continue
            try:
                checked: Key = self.text(key) if isinstance(key, str) else key
            except Unrepresentable as error:
                self.problems.append(((*path, ("key", "<a key>")), f"is {error}"))
                continue
            element: PathElement = ("attr", str(checked)) if kind == "attr" else ("key", checked)
            node = self._node(value, (*path, element))
            if not isinstance(node, _LeftOut):
                nodes[checked] = node
        return nodes

    def _global(self, value: Global) -> Node:
        if value.module == "torch" and value.name in DTYPE_OF_TORCH:
            return DtypeNode(DTYPE_OF_TORCH[value.name])
        raise Unrepresentable(f"a reference to {value}")

    def _built(self, built: Built, path: Path) -> Any:
        if is_tensor_call(built):
            return TensorRef(self._tensors.index_of(built))
        if numpy_values.is_array(built):
            return self._array(built)
        if numpy_values.is_scalar(built):
            return NumpyScalar(*numpy_values.scalar_of(built))
        if numpy_values.is_dtype(built):
            return NumpyDtypeNode(numpy_values.dtype_of(built)[0])
        function = built.function
        if isinstance(function, Global):
            known = _CALLS.get((function.module, function.name))
            if known is not None:
                return known(self, built, path)
        raise Unrepresentable(f"an object built by {built.caller}, which is not called")

    def _array(self, built: Built) -> ArrayRef:
        dtype, shape, raw = numpy_values.array_of(built)
        self.held(raw)
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
            if any(not isinstance(pair, list | tuple) or len(pair) != 2 for pair in given):
                raise Unrepresentable("an ordered dictionary built in an unknown way")
            pairs = [tuple(pair) for pair in given] + pairs
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
        self.warnings.append(f"{path_text(path)}: a defaultdict, kept as a plain dict")
        return self._pairs(built.pairs, path)

    def size(self, built: Built, path: Path) -> Node:
        """Return a shape."""
        given = built.arguments[0] if len(built.arguments) == 1 else ()
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
        return DeviceNode(self.text(":".join(map(str, parts))))

    def parameter(self, built: Built, path: Path) -> Node:
        """Return a parameter; attributes that were set on it are lost with a warning."""
        parts = built.arguments
        if len(parts) < 2 or not isinstance(parts[1], bool):
            raise Unrepresentable("a parameter built in an unknown way")
        if not is_tensor_call(parts[0]):
            raise Unrepresentable("a parameter of something else than a plain tensor")
        index = self._tensors.index_of(parts[0])
        self._lost(parts[3] if len(parts) > 3 else None, path)
        return ParameterRef(index, parts[1])

    def typed(self, built: Built, path: Path) -> Node:
        """Return a tensor that carries attributes, if it is of a class of torch itself."""
        parts = built.arguments
        if len(parts) != 4 or not isinstance(parts[2], tuple):
            raise Unrepresentable("a tensor subclass built in an unknown way")
        if not is_plain_tensor_type(parts[1]):
            raise Unrepresentable(f"a tensor of the class {parts[1]}")
        inner = Built(parts[0], parts[2])
        if is_tensor_call(inner):
            node: Node = TensorRef(self._tensors.index_of(inner))
        elif str(inner.function).startswith("torch._utils._rebuild_parameter"):
            node = self.parameter(inner, path)
        else:
            raise Unrepresentable(f"a tensor rebuilt by {inner.caller}")
        self._lost(parts[3], path)
        return node

    def _lost(self, state: Any, path: Path) -> None:
        if isinstance(state, dict) and state:
            names = listed(map(str, (key for key in state if isinstance(key, str))))
            self.warnings.append(f"{path_text(path)}: attributes of the tensor are lost: {names}")
        elif state is not None and not isinstance(state, dict):
            self.warnings.append(f"{path_text(path)}: attributes of the tensor are lost")


def _key_problem(key: Any, kind: str) -> str | None:
    if kind == "attr" and type(key) is not str:
        return "names of attributes are text"
    if key is not None and type(key) not in (str, int, bool):
        return "keys are str, int, bool or None"
    if type(key) is int and key not in KEY_INTS:
        return "a key that is an integer fits 64 bits with its sign"
    return None


def _kind_of(key: Any) -> str:
    value = key.value if isinstance(key, OddKey) else key
    return value.caller if isinstance(value, Built) else type(value).__name__


def _complex(reader: ObjectReader, built: Built, path: Path) -> Node:
    parts = built.arguments
    if len(parts) != 2 or any(type(part) not in (int, float) for part in parts):
        raise Unrepresentable("a complex number built in an unknown way")
    return complex(*parts)


def _bytes(reader: ObjectReader, built: Built, path: Path) -> Node:
    return reader.held(numpy_values.bytes_of(built))


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
