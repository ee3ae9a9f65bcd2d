"""How the commands print names, sizes and lists: always one line, never raw control characters."""

from collections.abc import Iterable, Sequence
from typing import Final

from fpformat.names import Path, element_text
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
    SizeNode,
)

_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")
_SHOWN_LIMIT: Final = 100
_KINDS: Final[dict[type, str]] = {
    ArrayRef: "a numpy array",
    CounterNode: "a Counter",
    DeviceNode: "a torch.device",
    DtypeNode: "a torch.dtype",
    FlattenedNode: "a tensor subclass in parts",
    NumpyDtypeNode: "a numpy dtype",
    NumpyScalar: "a numpy scalar",
    OrderedNode: "an OrderedDict",
    SizeNode: "a torch.Size",
    int: "an int",
    type(None): "None",
}


def shown(name: str) -> str:
    """Return a name quoted, its control characters escaped, cut in the middle if long."""
    quoted = repr(name)
    if len(quoted) <= _SHOWN_LIMIT:
        return quoted
    return f"{quoted[:60]}...{quoted[-20:]} ({len(name)} characters)"


def plain(text: str) -> str:
    """Return text as it is where it is printable and has no spaces, else quoted."""
    return text if text and text.isprintable() and " " not in text else shown(text)


def nbytes_text(nbytes: int) -> str:
    """Return a size in decimal units, such as ``90.9 MB``."""
    amount = float(nbytes)
    for unit in _UNITS:
        if amount < 999.5 or unit == _UNITS[-1]:
            break
        amount /= 1000
    if unit == "B":
        return f"{nbytes} B"
    return f"{amount:.3g} {unit}"


def count_text(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count and its noun, such as ``3 tensors``."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def listed(names: Iterable[str], *, limit: int = 8) -> str:
    """Return quoted names separated by commas, those beyond `limit` only counted."""
    every = list(names)
    head = ", ".join(map(shown, every[:limit]))
    rest = len(every) - limit
    return f"{head} and {rest:,} more" if rest > 0 else head


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape such as ``[384, 384]``."""
    return "[" + ", ".join(map(str, shape)) + "]"


def path_text(path: Path) -> str:
    """Return a path as its name in the format's notation, such as ``optimizer/state/~i0/step``."""
    return plain("/".join(map(element_text, path))) if path else "<the whole state>"


def verb_text(count: int, singular: str, plural: str) -> str:
    """Return the form of a verb that goes with a count."""
    return singular if count == 1 else plural


def kind_text(node: Node) -> str:
    """Return what kind of value a node of a state tree is."""
    return _KINDS.get(type(node)) or f"a {type(node).__name__}"
