"""The flat names of safetensors for the tensors of a nested state.

Keys are joined with dots, list positions and other keys as their text: ``optimizer.state.0.step``.
A flat state keeps its names untouched, whatever they hold. A lone tensor is called ``tensor``.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from fpformat.names import Path
from fpformat.records.nodes import Node, ParameterRef, TensorRef, children_of, walk_leaves
from fpformat_tools.errors import TargetError
from fpformat_tools.formats.interface import Problems
from fpformat_tools.formats.safetensors.header import METADATA_NAME
from fpformat_tools.streams.state import State, Tensor
from fpformat_tools.text import count_text, kind_text, path_text, shown

LONE_NAME: Final = "tensor"
# Torch writes this attribute at every module's state and does without it.
_MODULE_VERSIONS: Final = ("attr", "_metadata")


@dataclass(slots=True, kw_only=True)
class Others:
    """What a state holds beside tensors.

    Attributes:
        values: Values and containers of values, with what they are; tensors lie in none of them.
        attributes: Attributes of ordered dictionaries, but not torch's versions of modules.
    """

    values: Problems = field(default_factory=list)
    attributes: list[str] = field(default_factory=list)


def flat_name(path: Path) -> str:
    """Return the flat name of a path."""
    return ".".join(str(value) for _, value in path) if path else LONE_NAME


def others_of(state: State) -> Others:
    """Return what of a state is no tensor; an empty container counts for nothing.

    spec: CNV-20
    """
    others = Others()
    for path, node in _outermost(state.node, ()):
        if path and path[-1] == _MODULE_VERSIONS:
            continue
        if path and path[-1][0] == "attr":
            others.attributes.append(path_text(path))
        else:
            others.values.append((path, _described(node)))
    return others


def _has_tensor(node: Node) -> bool:
    return any(isinstance(leaf, TensorRef | ParameterRef) for _, leaf in walk_leaves(node))


def _outermost(node: Node, path: Path) -> Iterator[tuple[Path, Node]]:
    """Yield the outermost nodes in which there is no tensor but something else."""
    if isinstance(node, TensorRef | ParameterRef):
        return
    children = children_of(node)
    if children is None:
        yield path, node
    elif path and not _has_tensor(node):
        if any(True for _ in walk_leaves(node)):
            yield path, node
    else:
        for element, child in children:
            yield from _outermost(child, (*path, element))


def _described(node: Node) -> str:
    if children_of(node) is not None:
        count = sum(1 for _ in walk_leaves(node))
        return f"{kind_text(node)} with {count_text(count, 'value')} and no tensor"
    if isinstance(node, str | bytes):
        return f"a {type(node).__name__} of length {len(node):,}"
    if isinstance(node, int) and not isinstance(node, bool) and node.bit_length() > 128:
        return "a large int"
    plain = isinstance(node, bool | int | float | complex)
    return f"the {type(node).__name__} {node!r}" if plain else kind_text(node)


def flat_tensors(state: State) -> dict[str, Tensor]:
    """Return every tensor of a state by its flat name, in the order of the tree.

    spec: CNV-13, CNV-14

    Raises:
        TargetError: Two tensors would have one name, or one has the reserved name.
    """
    found: dict[str, Tensor] = {}
    problems = []
    for path, node in walk_leaves(state.node):
        if not isinstance(node, TensorRef | ParameterRef):
            continue
        name = flat_name(path)
        if name == METADATA_NAME:
            problems.append(f"{shown(name)} is reserved in safetensors and cannot name a tensor")
        if name in found:
            problems.append(f"{shown(name)} would name two tensors, one at {path_text(path)}")
        found[name] = state.tensors[node.index]
    if problems:
        detail = f"safetensors cannot hold it: {problems[0]}"
        raise TargetError("invalid", state.where, detail, problems[1:])
    return found
