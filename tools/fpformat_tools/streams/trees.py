"""Changes to state trees: renumbering references, selecting a part, listing leaves."""

from collections.abc import Callable
from typing import Any

import numpy as np

from fpformat.dtypes import numpy_dtype
from fpformat.names import Path, PathElement, element_text
from fpformat.records.fold import Branch, fold, map_leaves
from fpformat.records.nodes import (
    ArrayRef,
    CounterNode,
    Node,
    NumpyScalar,
    OrderedNode,
    ParameterRef,
    TensorRef,
    children_of,
)
from fpformat_tools.errors import UsageError
from fpformat_tools.streams.lookup import find, unknown_text
from fpformat_tools.text import kind_text, listed, path_text


def renumber(node: Node, number: Callable[[int], int]) -> Node:
    """Return a tree whose references carry ``number(index)``, asked for in the tree's order."""

    def change(leaf: Node) -> Node:
        if isinstance(leaf, TensorRef):
            return TensorRef(number(leaf.index))
        if isinstance(leaf, ParameterRef):
            return ParameterRef(number(leaf.index), leaf.requires_grad)
        if isinstance(leaf, ArrayRef):
            return ArrayRef(number(leaf.index))
        return leaf

    return map_leaves(node, change)


def numpy_as_plain(node: Node) -> Node:
    """Return a tree with tensors for numpy arrays, and Python's numbers for numpy scalars."""

    def change(leaf: Node) -> Node:
        if isinstance(leaf, ArrayRef):
            return TensorRef(leaf.index)
        if isinstance(leaf, NumpyScalar):
            number = number_of(leaf)
            return leaf if number is None else number
        return leaf

    return map_leaves(node, change)


def number_of(scalar: NumpyScalar) -> bool | int | float | complex | None:
    """Return the value of a numpy scalar, None when numpy has no such type."""
    numpy_type = numpy_dtype(scalar.dtype)
    if numpy_type is None:
        return None
    number: bool | int | float | complex = np.frombuffer(scalar.raw, numpy_type)[0].item()
    return number


def select(node: Node, key: str) -> tuple[Node, Path]:
    """Return the part of a state that `key` names, and its path.

    Raises:
        UsageError: There is no such part, or it is a value.
    """
    found = find(node, key)
    if found is None:
        children = [element_text(element) for element, _ in children_of(node) or ()]
        hint = f"there are {listed(children)}" if children else "there are no keys"
        raise UsageError(f"--key: {unknown_text([node], key)}; {hint}")
    path, part = found
    if children_of(part) is None and not isinstance(part, TensorRef | ParameterRef | ArrayRef):
        raise UsageError(f"--key: {path_text(path)} is {kind_text(part)}, not a state")
    return part, path


class LeftOut:
    """Stands where a node was that the output cannot hold."""


LEFT_OUT = LeftOut()


def prune(node: Node, refuse: Callable[[Node], str | None]) -> tuple[Node, list[tuple[Path, str]]]:
    """Return a tree without the nodes that `refuse` gives a reason for, and those with reasons.

    In a dictionary the key goes too; in a list or tuple None takes the place.
    """
    problems: list[tuple[Path, str]] = []

    def visit(value: Any, path: Path) -> Any:
        reason = refuse(value)
        if reason is not None:
            problems.append((path, reason))
            return LEFT_OUT
        children = children_of(value)
        if children is None:
            return value
        elements = list(children)

        def build(results: list[Any]) -> Node:
            return _rebuild(value, [element for element, _ in elements], results)

        return Branch(elements, build)

    kept = fold(node, visit)
    return (None if isinstance(kept, LeftOut) else kept), problems


def _rebuild(node: Node, elements: list[PathElement], results: list[Any]) -> Node:
    if isinstance(node, list | tuple):
        kept = [None if isinstance(child, LeftOut) else child for child in results]
        return kept if isinstance(node, list) else tuple(kept)
    pairs: dict[str, dict[Any, Node]] = {"key": {}, "attr": {}}
    for (kind, value), child in zip(elements, results, strict=True):
        if not isinstance(child, LeftOut):
            pairs[kind][value] = child
    if isinstance(node, OrderedNode):
        return OrderedNode(pairs["key"], pairs["attr"])
    return CounterNode(pairs["key"]) if isinstance(node, CounterNode) else pairs["key"]
