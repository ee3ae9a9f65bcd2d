"""Rebuilding nested values bottom up without recursion.

`fold` visits a value; the visitor answers with a result, or with a `Branch`: the children to
visit first and the function that makes the result out of theirs. Everything that turns a nested
state into something else (flatten, renumber, select, restore) is a visitor.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from fpformat.names import Path, PathElement
from fpformat.records.nodes import CounterNode, FlattenedNode, Node, OrderedNode, children_of

Results: TypeAlias = list[Any]


@dataclass(frozen=True, slots=True)
class Branch:
    """A value whose result depends on the results of its children, in their order."""

    children: Iterable[tuple[PathElement, Any]]
    build: Callable[[Results], Any]


Visitor: TypeAlias = Callable[[Any, Path], Any]


class _Frame:
    """A branch that waits for the results of its children."""

    __slots__ = ("build", "children", "path", "results")

    def __init__(self, branch: Branch, path: Path) -> None:
        self.build = branch.build
        self.children: Iterator[tuple[PathElement, Any]] = iter(branch.children)
        self.path = path
        self.results: Results = []


def fold(root: Any, visit: Visitor) -> Any:
    """Return the result of `root`.

    Args:
        root: Any value that `visit` understands.
        visit: Called with each value and its path, parents before their children. Returns the
            result, or a `Branch`.
    """
    answer = visit(root, ())
    if not isinstance(answer, Branch):
        return answer
    stack = [_Frame(answer, ())]
    while True:
        frame = stack[-1]
        for element, child in frame.children:
            path = (*frame.path, element)
            answer = visit(child, path)
            if isinstance(answer, Branch):
                stack.append(_Frame(answer, path))
                break
            frame.results.append(answer)
        else:
            stack.pop()
            answer = frame.build(frame.results)
            if not stack:
                return answer
            stack[-1].results.append(answer)


def _ordered(node: OrderedNode, results: Results) -> OrderedNode:
    count = len(node.items)
    attributes = dict(zip(node.attributes, results[count:], strict=True))
    return OrderedNode(dict(zip(node.items, results[:count], strict=True)), attributes)


def _flattened(node: FlattenedNode, results: Results) -> FlattenedNode:
    parts = dict(zip(node.parts, results[1:], strict=True))
    return FlattenedNode(node.label, results[0], parts)


_REBUILD: Final[dict[type, Callable[[Any, Results], Node]]] = {
    list: lambda _, results: results,
    tuple: lambda _, results: tuple(results),
    dict: lambda node, results: dict(zip(node, results, strict=True)),
    OrderedNode: _ordered,
    CounterNode: lambda node, results: CounterNode(dict(zip(node.items, results, strict=True))),
    FlattenedNode: _flattened,
}


def map_leaves(root: Node, change: Callable[[Node], Node]) -> Node:
    """Return a copy of a tree with every node that has no children replaced."""

    def visit(node: Node, path: Path) -> Any:
        children = children_of(node)
        if children is None:
            return change(node)
        rebuild = _REBUILD[type(node)]
        return Branch(children, lambda results: rebuild(node, results))

    changed: Node = fold(root, visit)
    return changed


def zip_dict(keys: Sequence[Any]) -> Callable[[Results], dict[Any, Any]]:
    """Return the function that makes a dict of `keys` out of the results of its values."""
    return lambda results: dict(zip(keys, results, strict=True))
