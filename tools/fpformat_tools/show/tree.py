"""A state tree drawn as text, folded where it would be longer than anybody reads."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from fpformat.names import PathElement, element_text
from fpformat.records.model import TensorEntry, View
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
    children_of,
)
from fpformat_tools.streams.trees import number_of
from fpformat_tools.text import count_text, nbytes_text, plain, shape_text

_BRANCH: Final = ("├─ ", "└─ ", "│  ", "   ")
_ASCII_BRANCH: Final = ("|- ", "`- ", "|  ", "   ")
_WIDE: Final = 16
_NARROW: Final = 7
_LINES: Final = 120
_VALUE_LIMIT: Final = 48
_INLINE_COUNT: Final = 12
_INLINE_LIMIT: Final = 60
_PLAIN: Final = (type(None), bool, int, float, complex, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Folding:
    """How much of a tree is shown: children at the root, children below, lines in all."""

    root_count: int = _WIDE
    child_count: int = _NARROW
    line_count: int = _LINES


UNFOLDED: Final = Folding(root_count=1 << 60, child_count=1 << 60, line_count=1 << 60)


def element_label(element: PathElement) -> str:
    """Return an element as it stands in a name."""
    return plain(element_text(element))


def key_label(element: PathElement) -> str:
    """Return an element that is a whole name already."""
    return plain(str(element[1]))


@dataclass(slots=True)
class TreeDrawing:
    """Draws trees whose references are looked up with `entry`.

    Attributes:
        entry: Returns the table's entry of a reference.
        nbytes: Returns the logical bytes of a reference.
        ascii: Whether only ASCII may be used.
        label: Returns what stands before a child.
    """

    entry: Callable[[Reference], TensorEntry]
    nbytes: Callable[[Reference], int]
    ascii: bool = False
    folding: Folding = field(default_factory=Folding)
    label: Callable[[PathElement], str] = element_label
    _lines: int = 0

    def draw(self, node: Node, title: str) -> Iterator[str]:
        """Yield the lines of a tree below a line with its title."""
        self._lines = 0
        yield self._line(title, node)
        yield from self._below(node, "", self.folding.root_count)

    def _line(self, label: str, node: Node) -> str:
        self._lines += 1
        if isinstance(node, TensorRef | ParameterRef | ArrayRef):
            return f"{label}  {self._tensor(node)}"
        return f"{label}: {self._described(node)}"

    def _below(self, node: Node, margin: str, limit: int) -> Iterator[str]:
        children = list(children_of(node) or ())
        kept = children if len(children) <= limit + 1 else children[:limit]
        rest = children[len(kept) :]
        marks = _ASCII_BRANCH if self.ascii else _BRANCH
        for position, (element, child) in enumerate(kept):
            last = position == len(kept) - 1 and not rest
            yield margin + marks[last] + self._line(self.label(element), child)
            if self._lines < self.folding.line_count and not _inline(child):
                deeper = margin + marks[2 + last]
                yield from self._below(child, deeper, self.folding.child_count)
        if rest:
            more = count_text(len(rest), "more entry", "more entries")
            dots = "..." if self.ascii else "…"
            total = self._total([child for _, child in rest])
            yield f"{margin}{marks[1]}{dots} {more}{f', {total}' if total else ''}"
            self._lines += 1

    def _total(self, nodes: list[Node]) -> str:
        count = nbytes = 0
        pending = nodes
        while pending:
            node = pending.pop()
            if isinstance(node, TensorRef | ParameterRef | ArrayRef):
                count += 1
                nbytes += self.nbytes(node)
            pending.extend(child for _, child in children_of(node) or ())
        return f"{count_text(count, 'tensor')}, {nbytes_text(nbytes)}" if count else ""

    def _described(self, node: Node) -> str:
        children = children_of(node)
        if children is None:
            return leaf_text(node)
        inline = _inline(node)
        if inline:
            return inline
        count = sum(1 for _ in children)
        total = self._total([node])
        return f"{_kind(node)} of {count:,}{f' ({total})' if total else ''}"

    def _tensor(self, ref: Reference) -> str:
        entry = self.entry(ref)
        text = f"{entry.dtype.name} {shape_text(entry.shape)}"
        if isinstance(entry.alias, View):
            target = plain(entry.alias.target[0])
            text += f" -> {target} (view, offset {entry.alias.offset:,})"
        elif entry.alias is not None:
            text += f" -> {plain(entry.alias[0])}"
        else:
            text += f"  {nbytes_text(self.nbytes(ref))}"
        if entry.scope is not None:
            text += f"  of rank {entry.scope}"
        if isinstance(ref, ParameterRef):
            text += "  parameter" if ref.requires_grad else "  parameter, frozen"
        return text + ("  numpy" if isinstance(ref, ArrayRef) else "")


def _inline(node: Node) -> str:
    """Return a small container of plain values on one line, nothing for any other."""
    if not isinstance(node, list | tuple | dict) or len(node) > _INLINE_COUNT:
        return ""
    pairs = list(children_of(node) or ())
    leaves = [child for _, child in pairs if isinstance(child, _PLAIN)]
    if len(leaves) < len(pairs):
        return ""
    words = [leaf_text(leaf) for leaf in leaves]
    if isinstance(node, dict):
        labels = [element_label(element) for element, _ in pairs]
        text = ", ".join(f"{one}: {two}" for one, two in zip(labels, words, strict=True))
        text = f"{{{text}}}"
    else:
        text = ", ".join(words)
        text = f"[{text}]" if isinstance(node, list) else f"({text}{',' * (len(words) == 1)})"
    return text if len(text) <= _INLINE_LIMIT else ""


def _kind(node: Node) -> str:
    if isinstance(node, OrderedNode):
        return "OrderedDict"
    if isinstance(node, CounterNode):
        return "Counter"
    if isinstance(node, FlattenedNode):
        return f"{plain(node.label)}, in parts,"
    return type(node).__name__


def leaf_text(node: Node, *, limit: int = _VALUE_LIMIT) -> str:
    """Return a value without children, on one line; text of more than `limit` only counted."""
    if isinstance(node, str):
        text = repr(node)
        return text if len(text) <= limit else f"str of {len(node):,} characters"
    if isinstance(node, bytes):
        return f"bytes of length {len(node):,}"
    if isinstance(node, bool) or not isinstance(node, int):
        return _record_text(node)
    return str(node) if node.bit_length() < 128 else f"int of {node.bit_length():,} bits"


def _record_text(node: Node) -> str:
    if isinstance(node, NumpyScalar):
        number = number_of(node)
        value = f"bytes {node.raw.hex()}" if number is None else repr(number)
        return f"{value} (numpy {node.dtype.name})"
    if isinstance(node, SizeNode):
        return f"torch.Size {list(node.dims)}"
    if isinstance(node, DtypeNode):
        return f"torch dtype {node.dtype.name}"
    if isinstance(node, NumpyDtypeNode):
        return f"numpy dtype {node.dtype.name}"
    if isinstance(node, DeviceNode):
        return f"torch device {plain(node.text)}"
    return repr(node)
