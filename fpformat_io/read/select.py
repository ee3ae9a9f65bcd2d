"""Choosing a part of a state tree by names."""

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, Final

from fpformat.arguments import wrong
from fpformat.errors import PlanError
from fpformat.names import Path, element_text
from fpformat.records.fold import Branch, Results, fold
from fpformat.records.nodes import CounterNode, FlattenedNode, Node, OrderedNode, children_of

_ABSENT: Final = object()


class Selection:
    """A set of names and of name prefixes that end at an element of a path."""

    def __init__(self, keys: Iterable[str]) -> None:
        keys = checked_keys(keys)
        self._unused = set(keys)
        self._prefixes = {tuple(key.split("/")): key for key in keys}
        self._longest = max(map(len, self._prefixes), default=0)

    def matches(self, elements: tuple[str, ...]) -> bool:
        """Return whether the elements of a name are, or lie below, one of the keys.

        In a key, a plain number also stands for an int key and for a position.
        """
        found = False
        elements = elements or ("",)
        plain = tuple(map(plain_text, elements))
        for count in range(1, min(len(elements), self._longest) + 1):
            for spelling in {elements[:count], plain[:count]}:
                key = self._prefixes.get(spelling)
                if key is not None:
                    self._unused.discard(key)
                    found = True
        return found

    def check_used(self, names: Iterable[str]) -> None:
        """Raise PlanError for the keys that are no name, with similar ones."""
        if not self._unused:
            return
        known = set(names)
        problems = []
        for key in sorted(self._unused - known):
            close = difflib.get_close_matches(key, known, n=3)
            hint = f"; close: {', '.join(map(repr, close))}" if close else ""
            problems.append(f"{key!r} is not in the checkpoint{hint}")
        if problems:
            raise PlanError("unknown keys:", *problems)


def checked_keys(keys: Any) -> tuple[str, ...]:
    """Return names as a tuple; a single one may stand for itself.

    Raises:
        PlanError: They are no names.
    """
    if isinstance(keys, str):
        return (keys,)
    expected = "names, that is an iterable of str"
    if isinstance(keys, bytes):
        raise wrong("keys", keys, expected)
    try:
        each = iter(keys)
    except TypeError as error:
        raise wrong("keys", keys, expected) from error
    names = tuple(each)
    problems = [f"{key!r} is a {type(key).__name__}" for key in names if type(key) is not str]
    if problems:
        raise PlanError("keys must be names, that is str:", *problems)
    return names


def plain_text(element: str) -> str:
    """Return the element of a name as people write it: an int key or a position as a number."""
    return element[2:] if element[:2] in ("~i", "~l") else element


def node_at(root: Node, key: str) -> tuple[str, Node]:
    """Return the node that a key names, with its name as it is stored.

    Raises:
        PlanError: There is none, or more than one.
    """
    found: list[tuple[str, Node]] = [("", root)]
    for element in key.split("/"):
        found = [
            (f"{name}/{text}" if name else text, child)
            for name, node in found
            for text, child in _named_children(node)
            if element in (text, plain_text(text))
        ]
    if len(found) != 1:
        raise PlanError(f"key={key!r} names {len(found) or 'no'} parts of the checkpoint")
    return found[0]


def _named_children(node: Node) -> Iterator[tuple[str, Node]]:
    for part, child in children_of(node) or ():
        yield element_text(part), child


def _names(node: Node) -> Iterator[str]:
    """Yield the name of every node, containers included."""
    stack: list[tuple[str, Node]] = [("", node)]
    while stack:
        prefix, node = stack.pop()
        for element, child in children_of(node) or ():
            name = f"{prefix}{element_text(element)}"
            yield name
            stack.append((f"{name}/", child))


def _keep_items(node_items: Iterable[Any], results: Results) -> dict[Any, Any]:
    pairs = zip(node_items, results, strict=True)
    return {key: result for key, result in pairs if result is not _ABSENT}


def _keep_places(results: Results) -> Results:
    return [None if result is _ABSENT else result for result in results]


def _build(node: Node, results: Results) -> Any:
    """Rebuild a container from the chosen children.

    Members of a dict that were not chosen are left out, places in a list hold None. An ordered
    dict keeps its attributes, which torch needs to load a part of a model.
    """
    if all(result is _ABSENT for result in results):
        return _ABSENT
    if isinstance(node, OrderedNode):
        return OrderedNode(_keep_items(node.items, results), node.attributes)
    if isinstance(node, CounterNode):
        return CounterNode(_keep_items(node.items, results))
    if isinstance(node, dict):
        return _keep_items(node, results)
    return tuple(_keep_places(results)) if isinstance(node, tuple) else _keep_places(results)


def select_nodes(root: Node, keys: Iterable[str]) -> Node:
    """Return the part of a tree that `keys` name, with the containers on the way to it.

    Args:
        root: The whole tree.
        keys: Names, or prefixes of names that end at an element.

    Raises:
        PlanError: A key names nothing; similar names are in the message.
    """
    selection = Selection(keys)

    def visit(node: Node, path: Path) -> Any:
        children = children_of(node)
        is_named = bool(path) or children is None
        if is_named and selection.matches(tuple(map(element_text, path))):
            return node
        if children is None or isinstance(node, FlattenedNode):
            return _ABSENT
        if isinstance(node, OrderedNode):
            children = ((("key", key), child) for key, child in node.items.items())
        return Branch(children, lambda results: _build(node, results))

    selected = fold(root, visit)
    selection.check_used(_names(root))
    return {} if selected is _ABSENT else selected
