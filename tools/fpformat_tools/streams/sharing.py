"""The entries of a checkpoint that store a converted state with its ties.

What shares what is decided by `fpformat.rules.ties`, by the same rules as for live memory.
"""

from dataclasses import dataclass, field

from fpformat.names import name_of
from fpformat.records.model import TensorEntry, TensorKey
from fpformat.records.nodes import walk_tensors
from fpformat.rules.ties import Footprint, HiddenBase, find_ties
from fpformat_tools.streams.gather import TensorSource, source_of
from fpformat_tools.streams.state import State, Tensor
from fpformat_tools.text import listed


@dataclass(slots=True, kw_only=True)
class Shared:
    """Entries and where their bytes come from."""

    entries: list[TensorEntry] = field(default_factory=list)
    sources: dict[TensorKey, TensorSource] = field(default_factory=dict)


def named_tensors(state: State) -> list[tuple[str, Tensor]]:
    """Return every tensor of the tree with its name, in the order of the tree.

    Raises:
        PlanError: A name is longer than 65,535 bytes.
    """
    return [(name_of(path), state.tensors[ref.index]) for path, ref in walk_tensors(state.node)]


def footprint(state: State, name: str, tensor: Tensor) -> Footprint:
    """Return where the elements of a tensor lie; it has some."""
    return Footprint(
        name=name,
        dtype=tensor.dtype,
        space=tensor.base,
        start=tensor.reach[0],
        shape=tensor.shape,
        strides=tensor.strides,
        room=(0, state.storages[tensor.base].nbytes),
    )


def share(state: State) -> Shared:
    """Return the entries that store a state with its ties; warn of ties that are lost."""
    named = dict(named_tensors(state))
    ties = find_ties(
        footprint(state, name, tensor) for name, tensor in named.items() if not tensor.is_empty
    )
    if ties.untied:
        text = "shared bytes that lie too far apart are stored separately"
        state.warnings.append(f"{state.where}: {text}: {listed(ties.untied)}")
    shared = Shared()
    for name, tensor in named.items():
        alias = ties.aliases.get(name)
        shared.entries.append(
            TensorEntry(name=name, dtype=tensor.dtype, shape=tensor.shape, alias=alias)
        )
        if alias is None and not tensor.is_empty:
            shared.sources[name, None] = source_of(state, tensor)
    for base in ties.bases:
        tensor = _base_tensor(base, named[base.holder])
        shared.entries.append(
            TensorEntry(name=base.name, dtype=base.dtype, shape=base.shape, hidden=True)
        )
        shared.sources[base.name, None] = source_of(state, tensor)
    return shared


def _base_tensor(base: HiddenBase, holder: Tensor) -> Tensor:
    return Tensor(
        base=holder.base,
        dtype=base.dtype,
        shape=base.shape,
        strides=(1,),
        offset=base.start // base.dtype.nbytes,
    )
