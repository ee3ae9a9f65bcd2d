"""Which tensors share memory, and how the checkpoint keeps that.

Tensors are sorted by address; those whose address ranges meet form a cluster, and inside one an
exact test separates what only interlaces, such as two columns. Tensors of one geometry become
plain aliases. Others become views: of a member that covers all of them, or of a hidden base that
stands for the memory they cover, unless that is more than four times what they take apart.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from fpformat.dtypes import DType, by_name
from fpformat.limits import MAX_NAME_NBYTES
from fpformat.model import TensorKey, View
from fpformat.names import HIDDEN_PREFIX
from fpformat_io.torch.flatten import Slot

MAX_BASE_RATIO: Final = 4
_MAX_EXACT: Final = 256
_MAX_WORK: Any = 10_000
_U8: Final = by_name("U8")


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenBase:
    """A 1-d tensor that no tree holds: the memory below views."""

    name: str
    dtype: DType
    tensor: torch.Tensor


@dataclass(slots=True)
class Ties:
    """What was found: alias of a name, hidden bases, and names that lose their tie."""

    aliases: dict[str, TensorKey | View]
    bases: list[HiddenBase]
    untied: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Tensors of exactly one geometry, by names in byte order."""

    names: tuple[str, ...]
    tensor: torch.Tensor
    dtype: DType
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return int(self.tensor.nbytes)

    @property
    def is_lazy(self) -> bool:
        """Whether the memory holds something else than the values: conjugate or negative."""
        return self.tensor.is_conj() or self.tensor.is_neg()

    @property
    def is_dense(self) -> bool:
        return self.stop - self.start == self.nbytes and not self.is_lazy

    def view(self, target: str, base: int) -> View | None:
        """Return how this looks at a target that begins at address `base`."""
        offset, rest = divmod(self.start - base, self.dtype.nbytes)
        if rest:
            return None
        return View(target=(target, None), strides=tuple(self.tensor.stride()), offset=offset)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    last = sum((dim - 1) * step for dim, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.dtype.itemsize


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    strides = tuple(step if dim > 1 else 0 for dim, step in steps)
    lazy = (tensor.is_conj(), tensor.is_neg())
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), strides, lazy)


def find_ties(slots: Sequence[Slot]) -> Ties:
    """Find the tensors that share memory.

    Args:
        slots: The tensors and arrays of a state; arrays and empty tensors are never tied.

    Returns:
        Aliases and bases. Whatever is in none of them is stored apart.
    """
    ties = Ties({}, [], [])
    for cluster in _clusters(slots):
        groups = _group(cluster)
        for component in _components(groups):
            _tie(component, ties)
    ties.untied.sort(key=str.encode)
    return ties


def _clusters(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Yield the slots, two or more, whose address ranges overlap one after the other."""
    by_device: dict[torch.device, list[tuple[int, int, int]]] = defaultdict(list)
    for index, slot in enumerate(slots):
        if isinstance(slot.value, torch.Tensor) and slot.value.numel():
            by_device[slot.value.device].append((*_span(slot.value), index))
    for spans in by_device.values():
        spans.sort()
        cluster: list[Slot] = []
        end = -1
        for start, stop, index in spans:
            if start >= end:
                if len(cluster) > 1:
                    yield cluster
                cluster = []
            cluster.append(slots[index])
            end = max(end, stop)
        if len(cluster) > 1:
            yield cluster


def _group(cluster: Iterable[Slot]) -> list[_Group]:
    by_geometry: dict[tuple[Any, ...], list[Slot]] = defaultdict(list)
    for slot in cluster:
        assert isinstance(slot.value, torch.Tensor)
        by_geometry[_geometry(slot.value)].append(slot)
    groups = []
    for alike in by_geometry.values():
        names = tuple(sorted((slot.name for slot in alike), key=str.encode))
        tensor = alike[0].value
        assert isinstance(tensor, torch.Tensor)
        start, stop = _span(tensor)
        group = _Group(names=names, tensor=tensor, dtype=alike[0].dtype, start=start, stop=stop)
        groups.append(group)
    return sorted(groups, key=lambda group: group.names[0].encode())


def _components(groups: list[_Group]) -> Iterable[list[_Group]]:
    """Return the groups that share bytes, directly or through others."""
    if len(groups) > _MAX_EXACT or all(group.is_dense for group in groups):
        return [groups]
    leader = list(range(len(groups)))

    def find(index: int) -> int:
        while leader[index] != index:
            index = leader[index]
        return index

    for second in range(len(groups)):
        for first in range(second):
            if find(first) != find(second) and _shares_bytes(groups[first], groups[second]):
                leader[max(find(first), find(second))] = min(find(first), find(second))
    components: dict[int, list[_Group]] = defaultdict(list)
    for index, group in enumerate(groups):
        components[find(index)].append(group)
    return components.values()


class _Footprint:
    """The addresses of a tensor, as numpy sees them; the memory is never touched."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.dtype.itemsize
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
        }


def _shares_bytes(first: _Group, second: _Group) -> bool:
    if first.stop <= second.start or second.stop <= first.start:
        return False
    if first.is_dense and second.is_dense:
        return True
    one, other = (np.asarray(_Footprint(group.tensor)) for group in (first, second))
    try:
        return bool(np.shares_memory(one, other, max_work=_MAX_WORK))
    except (RuntimeError, OverflowError):
        # Too hard to tell: taken for shared, which costs nothing but a common base.
        return True


def _tie(groups: list[_Group], ties: Ties) -> None:
    """Decide how the tensors of one component keep their memory in common."""
    plain = [group for group in groups if not group.is_lazy]
    if len(groups) == 1 or not plain:
        _store_apart(groups, ties, tied=len(groups) > 1)
        return
    _store_apart([group for group in groups if group.is_lazy], ties, tied=True)
    cover = _cover(plain)
    if cover and all(group.view("", cover.start) for group in plain):
        _store_views([group for group in plain if group is not cover], cover.names[0], cover, ties)
        _alias(cover, ties)
        return
    base = _hidden_base(plain)
    if base is None:
        _store_apart(plain, ties, tied=len(groups) > 1)
        return
    hidden, start = base
    ties.bases.append(hidden)
    for group in plain:
        for name in group.names:
            view = group.view(hidden.name, start)
            assert view is not None
            ties.aliases[name] = view


def _store_views(groups: list[_Group], target: str, cover: _Group, ties: Ties) -> None:
    for group in groups:
        view = group.view(target, cover.start)
        assert view is not None
        ties.aliases.update(dict.fromkeys(group.names, view))


def _alias(group: _Group, ties: Ties) -> None:
    first, *others = group.names
    ties.aliases.update(dict.fromkeys(others, (first, None)))


def _store_apart(groups: list[_Group], ties: Ties, *, tied: bool) -> None:
    for group in groups:
        _alias(group, ties)
        if tied:
            ties.untied += group.names


def _cover(groups: list[_Group]) -> _Group | None:
    """Return a contiguous member whose bytes are all the bytes of the component."""
    start = min(group.start for group in groups)
    stop = max(group.stop for group in groups)
    for group in groups:
        if (group.start, group.stop) == (start, stop) and group.tensor.is_contiguous():
            return group
    return None


def _hidden_base(groups: list[_Group]) -> tuple[HiddenBase, int] | None:
    """Return a base for all groups with its address; None when it is too large or impossible."""
    name = HIDDEN_PREFIX + groups[0].names[0]
    widest = max(group.dtype.nbytes for group in groups)
    start = min(group.start for group in groups)
    stop = max(group.stop for group in groups)
    storage = _storage_of(groups, start, stop)
    if storage is None or len(name.encode()) > MAX_NAME_NBYTES:
        return None
    start -= (start - storage.data_ptr()) % widest
    dtypes = {group.dtype.code: group for group in groups}
    aligned = all(group.view("", start) for group in groups)
    if not aligned or stop - start > MAX_BASE_RATIO * sum(group.nbytes for group in groups):
        return None
    common = len(dtypes) == 1 and (stop - start) % widest == 0
    offset = start - storage.data_ptr()
    tensor = torch.empty(0, dtype=torch.uint8, device=storage.device)
    tensor = tensor.set_(storage, offset, (stop - start,), (1,))
    if common:
        only = groups[0]
        tensor = torch.empty(0, dtype=only.tensor.dtype, device=storage.device)
        tensor = tensor.set_(storage, offset // widest, ((stop - start) // widest,), (1,))
    return HiddenBase(name=name, dtype=groups[0].dtype if common else _U8, tensor=tensor), start


def _storage_of(groups: list[_Group], start: int, stop: int) -> torch.UntypedStorage | None:
    """Return the storage of a member that holds the whole range."""
    for group in groups:
        storage = group.tensor.untyped_storage()
        first = storage.data_ptr()
        if first <= start and stop <= first + storage.nbytes():
            return storage
    return None
