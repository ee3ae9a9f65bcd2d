"""Which tensors share memory, and how a checkpoint keeps that.

Tensors are given as footprints: where their elements lie, in memory or in a file. Those whose
ranges meet form a cluster, and inside one an exact test separates what only interlaces, such as
two columns. Tensors of one geometry become plain aliases. Others become views: of a member that
covers all of them, or of a hidden base that stands for the bytes they cover, unless that is more
than four times what they take apart.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import numpy as np

from fpformat.dtypes import DType, by_name
from fpformat.limits import MAX_NAME_NBYTES
from fpformat.names import HIDDEN_PREFIX
from fpformat.records.layout import c_strides
from fpformat.records.model import Shape, TensorKey, View

MAX_BASE_RATIO: Final = 4
_MAX_EXACT: Final = 256
# The types of numpy know only two special values of `max_work`; any number is allowed.
_MAX_WORK: Final[Any] = 10_000
_U8: Final = by_name("U8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Where the elements of a tensor lie. Only tensors with elements have one.

    Attributes:
        name: The tensor's name.
        dtype: Its data type.
        space: What addresses count in: a device, or a file. Spaces share nothing.
        start: Address of the first element, in bytes.
        shape: Its shape.
        strides: Elements from one index to the next, per dimension; none is negative.
        room: Half-open range of addresses that may be read around it: its storage.
        is_plain: Whether the bytes there are the values; not so for conjugate views.
    """

    name: str
    dtype: DType
    space: Hashable
    start: int
    shape: Shape
    strides: Shape
    room: tuple[int, int]
    is_plain: bool = True

    @property
    def nbytes(self) -> int:
        """Logical size in bytes."""
        return prod(self.shape) * self.dtype.nbytes

    @property
    def stop(self) -> int:
        """Address after the last byte of the last element."""
        steps = zip(self.shape, self.strides, strict=True)
        last = sum((dim - 1) * stride for dim, stride in steps)
        return self.start + (last + 1) * self.dtype.nbytes

    @property
    def geometry(self) -> tuple[Any, ...]:
        """What is equal for two footprints exactly when they are the same elements and shape."""
        return (self.start, self.dtype.code, self.shape, self._steps, self.is_plain)

    @property
    def _steps(self) -> Shape:
        """The strides, 0 where a dimension has one index and the stride means nothing."""
        steps = zip(self.shape, self.strides, strict=True)
        return tuple(stride if dim > 1 else 0 for dim, stride in steps)

    @property
    def is_contiguous(self) -> bool:
        """Whether the bytes from start to stop are the tensor in C order."""
        ordered = zip(self.shape, c_strides(self.shape), self.strides, strict=True)
        return self.is_plain and all(dim == 1 or due == stride for dim, due, stride in ordered)


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenBase:
    """A 1-d tensor that no tree holds: the bytes below views.

    Attributes:
        holder: Name of a tensor whose storage has the whole range.
        start: Address of its first byte.
        stop: Address after its last byte.
    """

    name: str
    dtype: DType
    holder: str
    start: int
    stop: int

    @property
    def shape(self) -> Shape:
        """Its one dimension, in elements."""
        return ((self.stop - self.start) // self.dtype.nbytes,)


@dataclass(slots=True)
class Ties:
    """What was found: aliases by name, hidden bases, and names that lose their tie."""

    aliases: dict[str, TensorKey | View] = field(default_factory=dict)
    bases: list[HiddenBase] = field(default_factory=list)
    untied: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Tensors of one geometry, by names in byte order."""

    names: tuple[str, ...]
    shared: Footprint
    stop: int

    @property
    def start(self) -> int:
        return self.shared.start

    @property
    def nbytes(self) -> int:
        return self.shared.nbytes

    @property
    def is_dense(self) -> bool:
        return self.stop - self.start == self.nbytes and self.shared.is_plain

    def view(self, target: str, base: int) -> View | None:
        """Return how this looks at a target that begins at address `base`."""
        offset, rest = divmod(self.start - base, self.shared.dtype.nbytes)
        if rest:
            return None
        return View(target=(target, None), strides=self.shared.strides, offset=offset)


def find_ties(footprints: Iterable[Footprint]) -> Ties:
    """Find the tensors that share bytes; whatever is not in the result is stored apart."""
    ties = Ties()
    spaces: dict[Hashable, list[Footprint]] = defaultdict(list)
    for footprint in footprints:
        spaces[footprint.space].append(footprint)
    for members in spaces.values():
        for cluster in _clusters(members):
            for component in _components(_groups(cluster)):
                _tie(component, ties)
    ties.untied.sort(key=str.encode)
    return ties


def _clusters(footprints: Iterable[Footprint]) -> Iterator[list[Footprint]]:
    """Yield the footprints whose address ranges overlap one after the other.

    One alone is left out, unless its own elements overlap, as those of an expanded tensor do.
    """
    spans = sorted(((one.start, one.stop, one) for one in footprints), key=lambda span: span[:2])
    cluster: list[Footprint] = []
    end = -1
    for start, stop, footprint in spans:
        if start >= end:
            if _is_worth_tying(cluster):
                yield cluster
            cluster = []
        cluster.append(footprint)
        end = max(end, stop)
    if _is_worth_tying(cluster):
        yield cluster


def _is_worth_tying(cluster: Sequence[Footprint]) -> bool:
    return len(cluster) > 1 or any(_overlaps_itself(one) for one in cluster)


def _overlaps_itself(footprint: Footprint) -> bool:
    """Return whether two indices may be one element: the smaller strides reach the next larger."""
    reached = -1
    steps = zip(footprint.strides, footprint.shape, strict=True)
    for stride, dim in sorted((stride, dim) for stride, dim in steps if dim > 1):
        if stride <= max(reached, 0):
            return True
        reached = max(reached, 0) + (dim - 1) * stride
    return False


def _groups(cluster: Iterable[Footprint]) -> list[_Group]:
    alike: dict[tuple[Any, ...], list[Footprint]] = defaultdict(list)
    for footprint in cluster:
        alike[footprint.geometry].append(footprint)
    groups = [
        _Group(
            names=tuple(sorted((one.name for one in members), key=str.encode)),
            shared=members[0],
            stop=members[0].stop,
        )
        for members in alike.values()
    ]
    return sorted(groups, key=lambda group: group.names[0].encode())


def _components(groups: list[_Group]) -> Iterable[list[_Group]]:
    """Return the groups that share bytes, directly or through others."""
    if len(groups) > _MAX_EXACT or all(group.is_dense for group in groups):
        return [groups]
    parts: list[list[_Group]] = []
    for group in groups:
        touched = [part for part in parts if any(_shares_bytes(group, other) for other in part)]
        parts = [part for part in parts if part not in touched]
        parts.append([member for part in touched for member in part] + [group])
    return [sorted(part, key=lambda group: group.names[0].encode()) for part in parts]


class _Addresses:
    """The addresses of a footprint, as numpy sees them; the memory is never touched."""

    def __init__(self, footprint: Footprint, *, origin: int) -> None:
        size = footprint.dtype.nbytes
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "data": (footprint.start - origin, True),
            "shape": footprint.shape,
            "strides": tuple(step * size for step in footprint.strides),
        }


def _shares_bytes(first: _Group, second: _Group) -> bool:
    if first.stop <= second.start or second.stop <= first.start:
        return False
    if first.is_dense and second.is_dense:
        return True
    # Any address above zero will do.
    origin = min(first.start, second.start) - (1 << 40)
    one, other = (np.asarray(_Addresses(group.shared, origin=origin)) for group in (first, second))
    try:
        return bool(np.shares_memory(one, other, max_work=_MAX_WORK))
    except (RuntimeError, OverflowError):
        # Too hard to tell: taken for shared, which costs nothing but a common base.
        return True


def _tie(groups: Sequence[_Group], ties: Ties) -> None:
    """Decide how the tensors of one component keep their bytes in common."""
    plain = [group for group in groups if group.shared.is_plain]
    others = [group for group in groups if not group.shared.is_plain]
    _store_apart(others, ties, is_tied=len(groups) > 1)
    if not plain or (len(groups) == 1 and not _overlaps_itself(plain[0].shared)):
        _store_apart(plain, ties, is_tied=False)
        return
    cover = _cover(plain)
    if cover and all(group.view("", cover.start) for group in plain):
        _store_views([group for group in plain if group is not cover], cover, ties)
        _store_apart([cover], ties, is_tied=False)
        return
    base = _hidden_base(plain)
    if base is None:
        _store_apart(plain, ties, is_tied=len(groups) > 1)
        return
    ties.bases.append(base)
    _store_views(plain, base, ties)


def _store_views(groups: Iterable[_Group], target: "_Group | HiddenBase", ties: Ties) -> None:
    name = target.name if isinstance(target, HiddenBase) else target.names[0]
    for group in groups:
        view = group.view(name, target.start)
        assert view is not None
        ties.aliases.update(dict.fromkeys(group.names, view))


def _store_apart(groups: Iterable[_Group], ties: Ties, *, is_tied: bool) -> None:
    """Store the first of each group, the others as its aliases."""
    for group in groups:
        first, *others = group.names
        ties.aliases.update(dict.fromkeys(others, (first, None)))
        if is_tied:
            ties.untied += group.names


def _cover(groups: Sequence[_Group]) -> _Group | None:
    """Return a contiguous member whose bytes are all the bytes of the component."""
    start = min(group.start for group in groups)
    stop = max(group.stop for group in groups)
    for group in groups:
        if (group.start, group.stop) == (start, stop) and group.shared.is_contiguous:
            return group
    return None


def _hidden_base(groups: Sequence[_Group]) -> HiddenBase | None:
    """Return a base for all groups; None when it is too large or cannot be."""
    name = HIDDEN_PREFIX + groups[0].names[0]
    start = min(group.start for group in groups)
    stop = max(group.stop for group in groups)
    holder = _holder(groups, start, stop)
    if holder is None or len(name.encode()) > MAX_NAME_NBYTES:
        return None
    widest = max(group.shared.dtype.nbytes for group in groups)
    start -= (start - holder.room[0]) % widest
    is_aligned = all(group.view("", start) for group in groups)
    if not is_aligned or stop - start > MAX_BASE_RATIO * sum(group.nbytes for group in groups):
        return None
    is_common = len({group.shared.dtype.code for group in groups}) == 1
    dtype = groups[0].shared.dtype if is_common and (stop - start) % widest == 0 else _U8
    return HiddenBase(name=name, dtype=dtype, holder=holder.name, start=start, stop=stop)


def _holder(groups: Sequence[_Group], start: int, stop: int) -> Footprint | None:
    """Return a member whose storage has the whole range."""
    for group in groups:
        if group.shared.room[0] <= start and stop <= group.shared.room[1]:
            return group.shared
    return None
