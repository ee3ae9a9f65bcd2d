"""Finding a part of a state by what people type: its name in the format's notation.

The elements of a path are joined by ``/``, as in ``optimizer/state/~i0/exp_avg``. In what is typed
a plain number also stands for an int key and for a position, unless a str key is spelled like it.
Where nothing is found, similar names are looked for, level by level so that a large state costs
little.
"""

import difflib
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, NamedTuple

from fpformat.names import Path, PathElement, element_text
from fpformat.records.nodes import Node, children_of
from fpformat_io.read.select import plain_text
from fpformat_tools.text import path_text, shown

_CLOSE_COUNT: Final = 3
# Comparing with more keys than this would take longer than a person waits.
_COMPARED_LIMIT: Final = 20_000


class Found(NamedTuple):
    """A part of a state and where it lies."""

    path: Path
    node: Node


def _child(node: Node, word: str) -> tuple[PathElement, Node] | None:
    """Return the child that one typed element names."""
    children = list(children_of(node) or ())
    for spelling in (element_text, _plain_element):
        for element, child in children:
            if spelling(element) == word:
                return element, child
    return None


def _plain_element(element: PathElement) -> str:
    return plain_text(element_text(element))


def _follow(root: Node, words: list[str]) -> tuple[Found, int]:
    """Return what lies where words stop naming something, and how many did."""
    path: Path = ()
    node = root
    for count, word in enumerate(words):
        found = _child(node, word)
        if found is None:
            return Found(path, node), count
        path, node = (*path, found[0]), found[1]
    return Found(path, node), len(words)


def find(root: Node, name: str) -> Found | None:
    """Return the part of a state that a name means, None when it means nothing.

    A key of the root may also be typed as it is, with ``/`` or ``~`` unescaped.
    """
    words = name.split("/")
    found, count = _follow(root, words)
    if count == len(words):
        return found
    for element, child in children_of(root) or ():
        if element == ("key", name):
            return Found((element,), child)
    return None


def _dotted(root: Node, name: str) -> Found | None:
    """Return what keys joined by dots mean; the longest keys that exist are taken."""
    words = re.split(r"[./]", name)
    path: Path = ()
    node = root
    while words:
        for count in range(len(words), 0, -1):
            found = _child(node, ".".join(words[:count]))
            if found is not None:
                break
        else:
            return None
        words = words[count:]
        path, node = (*path, found[0]), found[1]
    return Found(path, node)


def _ending_with(root: Node, word: str) -> Iterator[Path]:
    """Yield the paths whose last element is a word."""
    pending: list[Found] = [Found((), root)]
    while pending:
        path, node = pending.pop()
        for element, child in children_of(node) or ():
            if element_text(element) == word:
                yield (*path, element)
            pending.append(Found((*path, element), child))


def _similar(root: Node, name: str) -> Iterator[Path]:
    dotted = _dotted(root, name)
    if dotted is not None:
        yield dotted.path
    words = name.split("/")
    (path, node), count = _follow(root, words)
    children = islice(children_of(node) or (), _COMPARED_LIMIT)
    spelled = {element_text(element): element for element, _ in children}
    for text in difflib.get_close_matches(words[count], spelled, n=_CLOSE_COUNT):
        yield (*path, spelled[text])
    yield from islice(_ending_with(root, words[-1]), _CLOSE_COUNT)
    if path:
        for element in islice(spelled.values(), _CLOSE_COUNT):
            yield (*path, element)


def similar_names(roots: Iterable[Node], name: str) -> list[str]:
    """Return up to three names of states that are close to one that is in none of them."""
    paths = (path for root in roots for path in islice(_similar(root, name), 2 * _CLOSE_COUNT))
    return list(dict.fromkeys(map(path_text, paths)))[:_CLOSE_COUNT]


def unknown_text(roots: Iterable[Node], name: str) -> str:
    """Return the sentence that a name is unknown, with the ones that come close."""
    close = similar_names(roots, name)
    hint = f"; close: {', '.join(close)}" if close else ""
    return f"{shown(name)} is not in it{hint}"
