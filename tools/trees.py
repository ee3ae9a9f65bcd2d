"""Changes to state trees: renumbering references, selecting a part, listing leaves."""

from collections.abc import Callable
from typing import Any

from fpformat.names import Path, PathElement
from fpformat.nodes import (
    ArrayRef,
    CounterNode,
    Node,
    OrderedNode,
    ParameterRef,
    TensorRef,
    children_of,
)
from fpformat_io.fold import Branch, fold, map_leaves
from fpformat_tools.errors import UsageError
from fpformat_tools.text import listed, shown


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


def pairs_of(node: Node) -> dict[Any, Node] | None:
    """Return keys and values of a dictionary of any kind, None when it is none."""
    if isinstance(node, dict):
        return node
    return node.items if isinstance(node, OrderedNode | CounterNode) else None


def _children(node: Node) -> dict[str, tuple[PathElement, Node]]:
    """Return the children that a key can name, by the text of the name."""
    pairs = pairs_of(node)
    if pairs is not None:
        return {str(key): (("key", key), child) for key, child in pairs.items()}
    if isinstance(node, list | tuple):
        return {str(index): (("index", index), child) for index, child in enumerate(node)}
    return {}


def select(node: Node, key: str) -> tuple[Node, Path]:
    """Return the part of a state that `key` names, and its path.

    A key is keys joined by dots. One that contains dots itself is found too; the longest match
    counts. Integer keys and list positions are written as numbers.

    Raises:
        UsageError: There is no such part.
    """
    words = key.split(".")
    path: Path = ()
    while words:
        children = _children(node)
        for count in range(len(words), 0, -1):
            found = children.get(".".join(words[:count]))
            if found is not None:
                break
        else:
            hint = f"there are {listed(children)}" if children else "there are no keys"
            place = f"--key {shown(key)}: nothing is called {shown('.'.join(words))}"
            raise UsageError(f"{place}; {hint}")
        words = words[count:]
        path, node = (*path, found[0]), found[1]
    if children_of(node) is None and not isinstance(node, TensorRef | ParameterRef | ArrayRef):
        raise UsageError(f"--key {shown(key)}: this is a {type(node).__name__}, not a state")
    return node, path


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
