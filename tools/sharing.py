"""Which tensors of a state share bytes, and the entries of a checkpoint that keep it so.

The rules are those of saving from live memory. Tensors of one storage whose ranges meet form a
cluster; inside one, tensors that only interlace (two columns) are told apart. Tensors of one
geometry become aliases. Others become views: of a member that covers all the rest, or of a hidden
base, unless that would take more than four times what they take apart.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from fpformat.dtypes import by_name
from fpformat.limits import MAX_NAME_NBYTES
from fpformat.model import TensorEntry, TensorKey, View
from fpformat.names import HIDDEN_PREFIX, name_of
from fpformat.nodes import walk_tensors
from fpformat_tools.gather import TensorSource, source_of
from fpformat_tools.state import State, Tensor

MAX_BASE_RATIO: Final = 4
_MAX_EXACT: Final = 64
_MAX_WORK: Final = 10_000
# Any address above zero will do: the memory is never touched.
_ADDRESS: Final = 1 << 40
_U8: Final = by_name("U8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tensors of exactly one geometry, by names in byte order."""

    names: tuple[str, ...]
    tensor: Tensor

    @property
    def start(self) -> int:
        """First byte of the storage that is used."""
        return self.tensor.reach[0]

    @property
    def stop(self) -> int:
        """The byte after the last that is used."""
        return self.tensor.reach[1]

    def view(self, target: str, *, base: int) -> View | None:
        """Return how this looks at a target that begins at byte `base` of the storage."""
        offset, rest = divmod(self.start - base, self.tensor.dtype.nbytes)
        if rest:
            return None
        return View(target=(target, None), strides=self.tensor.strides, offset=offset)


@dataclass(slots=True, kw_only=True)
class Shared:
    """Entries and where their bytes come from.

    Attributes:
        untied: Names that shared bytes and will not any more.
    """

    entries: list[TensorEntry] = field(default_factory=list)
    sources: dict[TensorKey, TensorSource] = field(default_factory=dict)
    untied: list[str] = field(default_factory=list)


def named_tensors(state: State) -> list[tuple[str, Tensor]]:
    """Return every tensor of the tree with its name, in the order of the tree.

    Raises:
        PlanError: A name is longer than 65,535 bytes.
    """
    return [(name_of(path), state.tensors[ref.index]) for path, ref in walk_tensors(state.node)]


def geometry_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what is equal for two tensors exactly when they are the same bytes and shape."""
    steps = zip(tensor.shape, tensor.strides, strict=True)
    strides = tuple(step if dim > 1 else 0 for dim, step in steps)
    return (tensor.base, tensor.dtype.code, tensor.offset, tensor.shape, strides)


def share(state: State) -> Shared:
    """Return the entries that store a state with its ties."""
    shared = Shared()
    by_base: dict[int, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in named_tensors(state):
        if tensor.is_empty:
            shared.entries.append(_entry(name, tensor))
        else:
            by_base[tensor.base].append((name, tensor))
    for named in by_base.values():
        for cluster in _clusters(named):
            for component in _components(_groups(cluster)):
                _store(component, state, shared)
    shared.untied.sort(key=str.encode)
    return shared


def _entry(name: str, tensor: Tensor, alias: TensorKey | View | None = None) -> TensorEntry:
    return TensorEntry(name=name, dtype=tensor.dtype, shape=tensor.shape, alias=alias)


def _clusters(named: list[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    cluster: list[tuple[str, Tensor]] = []
    end = -1
    for start, stop, position in sorted(
        (*tensor.reach, position) for position, (_, tensor) in enumerate(named)
    ):
        if start >= end and cluster:
            yield cluster
            cluster = []
        cluster.append(named[position])
        end = max(end, stop)
    yield cluster


def _groups(cluster: Iterable[tuple[str, Tensor]]) -> list[Group]:
    alike: dict[tuple[Any, ...], list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in cluster:
        alike[geometry_of(tensor)].append((name, tensor))
    groups = [
        Group(
            names=tuple(sorted((name for name, _ in members), key=str.encode)),
            tensor=members[0][1],
        )
        for members in alike.values()
    ]
    return sorted(groups, key=lambda group: group.names[0].encode())


def _is_dense(group: Group) -> bool:
    return group.stop - group.start == group.tensor.nbytes


def _components(groups: list[Group]) -> Iterable[list[Group]]:
    """Return the groups that share bytes, directly or through others."""
    if len(groups) > _MAX_EXACT or all(map(_is_dense, groups)):
        return [groups]
    parts: list[list[Group]] = []
    for group in groups:
        touched = [part for part in parts if any(_shares_bytes(group, other) for other in part)]
        parts = [part for part in parts if part not in touched]
        parts.append([member for part in touched for member in part] + [group])
    return parts


class _Footprint:
    """The place of a tensor, as numpy sees it; the memory is never touched."""

    def __init__(self, tensor: Tensor) -> None:
        itemsize = tensor.dtype.nbytes
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{itemsize}",
            "data": (_ADDRESS + tensor.reach[0], True),
            "shape": tensor.shape,
            "strides": tuple(step * itemsize for step in tensor.strides),
        }


def _shares_bytes(one: Group, two: Group) -> bool:
    if one.stop <= two.start or two.stop <= one.start:
        return False
    if _is_dense(one) and _is_dense(two):
        return True
    first, second = (np.asarray(_Footprint(group.tensor)) for group in (one, two))
    try:
        # The types of numpy know only two special values of `max_work`; any number is allowed.
        work: Any = _MAX_WORK
        return np.shares_memory(first, second, max_work=work)
    except (RuntimeError, OverflowError):
        # Too hard to tell: taken for shared, which costs nothing but a common base.
        return True


def _store(groups: list[Group], state: State, shared: Shared) -> None:
    groups = sorted(groups, key=lambda group: group.names[0].encode())
    if len(groups) == 1 and groups[0].tensor.nbytes <= groups[0].stop - groups[0].start:
        _store_apart(groups, state, shared)
        return
    cover = _cover(groups)
    if cover and all(group.view("", base=cover.start) for group in groups):
        _store_apart([cover], state, shared)
        others = [group for group in groups if group is not cover]
        _store_views(others, cover.names[0], cover.start, shared)
        return
    start, stop, tensor = _base_of(groups, state)
    name = HIDDEN_PREFIX + groups[0].names[0]
    apart = sum(group.tensor.nbytes for group in groups)
    aligned = all(group.view("", base=start) for group in groups)
    if not aligned or stop - start > MAX_BASE_RATIO * apart or len(name.encode()) > MAX_NAME_NBYTES:
        _store_apart(groups, state, shared)
        if len(groups) > 1:
            shared.untied += [name for group in groups for name in group.names]
        return
    shared.entries.append(
        TensorEntry(name=name, dtype=tensor.dtype, shape=tensor.shape, hidden=True)
    )
    shared.sources[name, None] = source_of(state, tensor)
    _store_views(groups, name, start, shared)


def _store_views(groups: Iterable[Group], target: str, base: int, shared: Shared) -> None:
    for group in groups:
        view = group.view(target, base=base)
        shared.entries += [_entry(name, group.tensor, view) for name in group.names]


def _store_apart(groups: Iterable[Group], state: State, shared: Shared) -> None:
    for group in groups:
        first, *others = group.names
        shared.entries.append(_entry(first, group.tensor))
        shared.entries += [_entry(name, group.tensor, (first, None)) for name in others]
        shared.sources[first, None] = source_of(state, group.tensor)


def _cover(groups: list[Group]) -> Group | None:
    """Return a contiguous member whose bytes are all the bytes of the component."""
    start = min(group.start for group in groups)
    stop = max(group.stop for group in groups)
    for group in groups:
        if (group.start, group.stop) == (start, stop) and group.tensor.is_contiguous:
            return group
    return None


def _base_of(groups: list[Group], state: State) -> tuple[int, int, Tensor]:
    """Return the range that a hidden base for all groups would take, and the base itself."""
    widest = max(group.tensor.dtype.nbytes for group in groups)
    start = min(group.start for group in groups) // widest * widest
    stop = max(group.stop for group in groups)
    common = len({group.tensor.dtype.code for group in groups}) == 1
    dtype = groups[0].tensor.dtype if common else _U8
    tensor = Tensor(
        base=groups[0].tensor.base,
        dtype=dtype,
        shape=((stop - start) // dtype.nbytes,),
        strides=(1,),
        offset=start // dtype.nbytes,
    )
    return start, stop, tensor
