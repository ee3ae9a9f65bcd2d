"""Loading into a state that exists: tensors filled in place, other values replaced.

Everything is compared first, then read and verified into host memory of its own, and only then
copied, so a load that fails leaves the template as it was. The price is host memory for the bytes
that are loaded, until the call returns.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any, Final

import numpy as np
import torch

from fpformat.arguments import check_kind, checked_flag, checked_int, checked_path
from fpformat.dtypes import DType, from_numpy
from fpformat.errors import PlanError
from fpformat.limits import MAX_TREE_DEPTH
from fpformat.names import HIDDEN_PREFIX, Path, PathElement, name_of
from fpformat.read.reader import Checkpoint, open_checkpoint
from fpformat.records.fold import Branch, Results, fold
from fpformat.records.model import TensorEntry, TensorKey, View
from fpformat.records.nodes import ArrayRef, Node, ParameterRef, TensorRef, walk_leaves
from fpformat_io.read.select import node_at
from fpformat_io.torch.api import state_tree
from fpformat_io.torch.compare import parts_of, relative, shared_names
from fpformat_io.torch.dtypes import fill, from_torch
from fpformat_io.torch.flatten import path_text, tensor_problem
from fpformat_io.torch.restore import Restore, TensorReader
from fpformat_io.torch.subclasses import is_flattenable, take_apart

_HOST: Final = torch.device("cpu")
_IGNORED: Final = frozenset({"attr", "context"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load into a template did.

    Attributes:
        loaded: Names that were filled or replaced.
        missing: Names of the template that the checkpoint lacks; they kept their values.
        unexpected: Names of the checkpoint that the template lacks.
        mismatched: Names on both sides that do not fit, each with the reason; not loaded.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A leaf of the template; it is replaceable when a dict or list holds it."""

    value: Any
    is_replaceable: bool


def load_into(
    path: "str | PathLike[str]",
    template: Any,
    *,
    strict: bool = True,
    key: str | None = None,
    rank: int = 0,
) -> LoadReport:
    """Load a checkpoint into a state that exists.

    Tensors and numpy arrays are filled in place, on whatever device they are; other values in
    dicts and lists are replaced, tuples around them rebuilt. Nothing is cast. Attributes of an
    OrderedDict, the context of a tensor subclass and ``requires_grad`` stay those of the template.
    The template is untouched when this raises; for that, all that is loaded is held in host
    memory once.

    Args:
        path: The checkpoint.
        template: Nested dicts, lists and tuples such as ``model.state_dict()``.
        strict: Whether any difference in names, shapes, data types or kinds is an error. If not,
            what fits is loaded and the rest reported.
        key: Name of the part of the checkpoint that the template stands for, such as ``"model"``;
            None for the whole.
        rank: Whose state, when the ranks of a run saved different ones.

    Returns:
        The names loaded, missing, unexpected and mismatched.

    Raises:
        PlanError: `strict`, and template and checkpoint differ; all differences are listed, a
            part that is wholly on one side in one line. `key` names nothing, or an argument is of
            a wrong kind.
        FormatError: The first fault found in the checkpoint, with its clause.
    """
    path = checked_path(path)
    strict = checked_flag("strict", strict)
    rank = checked_int("rank", rank, least=0)
    if key is not None:
        check_kind("key", key, str, "a str or None")
    if isinstance(template, torch.nn.Module | torch.optim.Optimizer):
        kind = type(template).__name__
        raise PlanError(f"template is a {kind}; give its state_dict(), which shares its tensors")
    places = _places(template)
    with open_checkpoint(path) as checkpoint:
        node, table = state_tree(checkpoint, rank)
        prefix, node = ("", node) if key is None else node_at(node, key)
        stored = dict(_stored_leaves(node))
        match = _Match(checkpoint, table, places, stored, prefix)
        if strict:
            match.check_equal()
        tensors, values = match.read()
    with torch.no_grad():
        for target, source in tensors:
            if isinstance(target, np.ndarray):
                np.copyto(target, source)
            else:
                fill(target, source)
    _replace(template, values)
    return LoadReport(
        loaded=tuple(match.fitting),
        missing=tuple(match.missing),
        unexpected=tuple(match.unexpected),
        mismatched=tuple(match.mismatched),
    )


def _children(value: Any) -> Iterator[tuple[PathElement, Any]] | None:
    """Return the children of a container of the template, None for a leaf."""
    kind = type(value)
    if kind in (dict, OrderedDict, Counter):
        return ((("key", key), child) for key, child in value.items())
    if kind in (list, tuple):
        return ((("index", index), child) for index, child in enumerate(value))
    if isinstance(value, torch.Tensor) and _is_subclass(value):
        return ((("part", name), part) for name, part in take_apart(value)[0].items())
    return None


def _is_subclass(value: torch.Tensor) -> bool:
    plain = (torch.Tensor, torch.nn.Parameter)
    return type(value) not in plain and not value.is_nested and is_flattenable(type(value))


def _places(template: Any) -> dict[str, _Place]:
    """Return the leaves of the template by name, in order.

    Raises:
        PlanError: It is too deep, contains itself, or a key of it has no name.
    """
    found: dict[str, _Place] = {}
    is_open: set[int] = set()
    held: dict[Path, bool] = {(): False}

    def visit(value: Any, path: Path) -> Any:
        if len(path) > MAX_TREE_DEPTH or id(value) in is_open:
            raise PlanError(f"template: {path_text(path)} is too deep or contains itself")
        children = _children(value)
        if children is None:
            found[name_of(path)] = _Place(value=value, is_replaceable=held[path])
            return None
        is_open.add(id(value))
        inner = held[path] if type(value) is tuple else True

        def entered() -> Iterator[tuple[PathElement, Any]]:
            for element, child in children:
                below = (*path, element)
                held[below] = inner
                yield element, child
            is_open.discard(id(value))

        return Branch(entered(), lambda results: None)

    fold(template, visit)
    return found


def _stored_leaves(root: Node) -> Iterator[tuple[str, Node]]:
    for path, node in walk_leaves(root):
        if not any(kind in _IGNORED for kind, _ in path):
            yield name_of(path), node


class _Match:
    """Compares a template with what a checkpoint holds."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        table: list[TensorKey],
        places: dict[str, _Place],
        stored: dict[str, Node],
        prefix: str,
    ) -> None:
        self._checkpoint = checkpoint
        self._table = table
        self._places = places
        self._stored = stored
        self._prefix = prefix
        self.missing = [name for name in places if name not in stored]
        self.unexpected = [name for name in stored if name not in places]
        self.fitting: list[str] = []
        self.mismatched: list[str] = []
        shared = shared_names({name: place.value for name, place in places.items()})
        for name, place in places.items():
            if name in stored:
                problem = self._problem(place, stored[name])
                if problem is None and name in shared:
                    problem = self._sharing_problem(name, shared[name])
                if problem is None:
                    self.fitting.append(name)
                else:
                    self.mismatched.append(f"{name}: {problem}")

    def check_equal(self) -> None:
        """Raise PlanError when anything differs."""
        problems = [
            f"missing in the checkpoint: {part}" for part in parts_of(self.missing, self._stored)
        ]
        problems += [
            f"unexpected in the checkpoint: {part}"
            for part in parts_of(self.unexpected, self._places)
        ]
        problems += self.mismatched
        if problems:
            where = self._checkpoint.path
            raise PlanError(f"{where}: does not fit the template; nothing was changed:", *problems)

    def read(self) -> tuple[list[tuple[Any, Any]], dict[str, Any]]:
        """Read what fits; return pairs of target and source, and the values to replace."""
        keys = {name: self._key(self._stored[name]) for name in self.fitting}
        wanted = list(dict.fromkeys(key for key in keys.values() if key))
        reader = TensorReader(self._checkpoint, _HOST, wanted)
        restore = Restore(reader, self._table, self._checkpoint.path)
        pairs: list[tuple[Any, Any]] = []
        values: dict[str, Any] = {}
        for name, key in keys.items():
            if key is None:
                values[name] = restore.visit(self._stored[name], ())
            elif isinstance(self._places[name].value, np.ndarray):
                pairs.append((self._places[name].value, reader.array(key)))
            else:
                pairs.append((self._places[name].value, reader.tensor(key)))
        return pairs, values

    def _key(self, node: Node) -> TensorKey | None:
        if isinstance(node, TensorRef | ParameterRef | ArrayRef):
            return self._table[node.index]
        return None

    def _problem(self, place: _Place, node: Node) -> str | None:
        """Return why a stored node cannot go to its place."""
        key = self._key(node)
        kind = type(place.value).__name__
        if key is None:
            if isinstance(place.value, torch.Tensor | np.ndarray):
                return f"is a {kind} in the template, but a plain value in the checkpoint"
            return self._value_problem(place, node)
        entry = self._checkpoint.entry(key)
        if isinstance(node, ArrayRef) and type(place.value) is np.ndarray:
            return _array_problem(place.value, entry)
        if not isinstance(node, ArrayRef) and isinstance(place.value, torch.Tensor):
            return _fill_problem(place.value, entry)
        stored = "a numpy array" if isinstance(node, ArrayRef) else "a tensor"
        return f"is {stored} in the checkpoint, but a {kind} in the template"

    def _sharing_problem(self, name: str, alias: "TensorKey | View") -> str | None:
        """Return why a tensor that shares memory in the template cannot have its own values."""
        key = self._key(self._stored[name])
        assert key is not None
        stored = self._checkpoint.entry(key).alias
        if relative(stored, self._prefix) == relative(alias, ""):
            return None
        target = alias.target[0] if isinstance(alias, View) else alias[0]
        if not isinstance(alias, View) and self._is_equal(key, target):
            return None
        if target.startswith(HIDDEN_PREFIX):
            return "overlaps itself or others in the template, but not in the checkpoint"
        return f"shares memory with {target!r} in the template, but not in the checkpoint"

    def _is_equal(self, key: TensorKey, other: str) -> bool:
        """Return whether two stored tensors have the same bytes; read only when they were tied."""
        node = self._stored.get(other)
        other_key = None if node is None else self._key(node)
        if other_key is None:
            return False
        one, two = self._checkpoint.entry(key), self._checkpoint.entry(other_key)
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            return False
        return bool(np.array_equal(self._checkpoint.read(key), self._checkpoint.read(other_key)))

    def _value_problem(self, place: _Place, node: Node) -> str | None:
        if place.is_replaceable or (type(node) is type(place.value) and node == place.value):
            return None
        return "differs, and no dict or list holds it, so it cannot be replaced"


def _shape_problem(shape: tuple[int, ...], dtype: DType | None, entry: TensorEntry) -> str | None:
    problems = []
    if shape != entry.shape:
        problems.append(f"shape {entry.shape} in the checkpoint, {shape} in the template")
    if dtype != entry.dtype:
        mine = dtype.name if dtype else "an unregistered type"
        problems.append(f"dtype {entry.dtype.name} in the checkpoint, {mine} in the template")
    return "; ".join(problems) or None


def _fill_problem(target: torch.Tensor, entry: TensorEntry) -> str | None:
    problem = _shape_problem(tuple(target.shape), from_torch(target.dtype), entry)
    if problem:
        return problem
    if problem := tensor_problem(target):
        return f"the template's tensor {problem}"
    steps = zip(target.shape, target.stride(), strict=True)
    if any(step == 0 and dim > 1 for dim, step in steps):
        return "the template's tensor repeats its own memory, so it cannot be filled"
    if target.is_inference() and not torch.is_inference_mode_enabled():
        return "the template's tensor was made in inference mode, so it cannot be filled"
    return None


def _array_problem(target: "np.ndarray[Any, Any]", entry: TensorEntry) -> str | None:
    problem = _shape_problem(target.shape, from_numpy(target.dtype), entry)
    if problem is None and not target.flags.writeable:
        return "the template's array is read-only"
    steps = zip(target.shape, target.strides, strict=True)
    if problem is None and any(step == 0 and dim > 1 for dim, step in steps):
        return "the template's array repeats its own memory, so it cannot be filled"
    return problem


def _replace(template: Any, values: dict[str, Any]) -> None:
    """Put new values into the dicts and lists of the template; tuples on the way are rebuilt."""

    def visit(value: Any, path: Path) -> Any:
        children = _children(value)
        if children is None:
            return values.get(name_of(path), value) if values else value
        if isinstance(value, torch.Tensor):
            return value
        return Branch(children, _REPLACE[type(value)](value))

    fold(template, visit)


def _into_dict(target: Any) -> Callable[[Results], Any]:
    def build(results: Results) -> Any:
        for key, result in zip(list(target), results, strict=True):
            if result is not target[key]:
                target[key] = result
        return target

    return build


def _into_list(target: list[Any]) -> Callable[[Results], Any]:
    def build(results: Results) -> Any:
        for index, result in enumerate(results):
            if result is not target[index]:
                target[index] = result
        return target

    return build


def _into_tuple(target: tuple[Any, ...]) -> Callable[[Results], Any]:
    def build(results: Results) -> Any:
        pairs = zip(target, results, strict=True)
        return target if all(old is new for old, new in pairs) else tuple(results)

    return build


_REPLACE: Final[dict[type, Callable[[Any], Callable[[Results], Any]]]] = {
    dict: _into_dict,
    OrderedDict: _into_dict,
    Counter: _into_dict,
    list: _into_list,
    tuple: _into_tuple,
}
