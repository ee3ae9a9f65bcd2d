"""Digests of what a checkpoint holds, whatever its files look like.

Two checkpoints of the same state differ in times, ids, segments, alignment, pieces and compression.
The digests here differ only where the state does: `StateDigest.tensors` over all named tensors,
`StateDigest.state` over the trees and objects as well. The annex of the specification defines both
byte by byte. Tensors are read front to back in steps; a view is gathered from its target in blocks,
so memory is bounded however large a tensor is and however far apart its elements lie.
"""

import hashlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np

from fpformat.arguments import check_kind, checked_int, wrong
from fpformat.errors import fault
from fpformat.limits import NONE
from fpformat.read.reader import DEFAULT_VIEW_LIMIT_NBYTES, Checkpoint
from fpformat.read.segment import Segment
from fpformat.records.index import OBJECT_TREE, Array
from fpformat.records.model import Box, TensorEntry, TensorKey, View
from fpformat.records.tree import dump_tree, parse_tree

_STEP_NBYTES: Final = 16 * 1024 * 1024
_TENSOR_MARK: Final = b"fpformat.tensor.1\n"
_TENSORS_MARK: Final = b"fpformat.tensors.1\n"
_STATE_MARK: Final = b"fpformat.state.1\n"
_SHAPE: Final = struct.Struct("<HB")
_OBJECT: Final = struct.Struct("<II")

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDigest:
    """What names a state without its files; 64 hexadecimal digits each.

    Attributes:
        tensors: Of names, scopes, data types, shapes and elements of all tensors.
        state: Of the tensors, and of every state tree and object.
    """

    tensors: str
    state: str


def state_digest(
    checkpoint: Checkpoint,
    *,
    view_limit_nbytes: int = DEFAULT_VIEW_LIMIT_NBYTES,
    progress: Progress | None = None,
) -> StateDigest:
    """Return the digests of the state of an open checkpoint; every tensor of it is read.

    spec: DIG-1

    Args:
        checkpoint: From `open_checkpoint`.
        view_limit_nbytes: Largest view, in bytes, that is read when it has more bytes than its
            target; 1 GiB by default.
        progress: Called with the number of bytes of elements just hashed.

    Raises:
        FormatError: SUM-2 for damage; SEG-1, DIR-7; ALI-6 for a view above the limit.
        PlanError: An argument is of a wrong kind.
    """
    check_kind("checkpoint", checkpoint, Checkpoint, "an open Checkpoint")
    checked_int("view_limit_nbytes", view_limit_nbytes, least=0)
    if progress is not None and not callable(progress):
        raise wrong("progress", progress, "a callable or None")
    contents = _Contents(checkpoint, view_limit_nbytes, progress or _ignore)
    tensors = hashlib.sha256(_TENSORS_MARK)
    for key in checkpoint.keys():  # noqa: SIM118
        entry = checkpoint.entry(key)
        if not entry.hidden:
            tensors.update(_named(*key) + contents.of(entry))
    state = hashlib.sha256(_STATE_MARK + tensors.digest())
    for record in sorted(_objects(checkpoint), key=lambda record: record.place):
        state.update(record.header + hashlib.sha256(record.content()).digest())
    return StateDigest(tensors=tensors.hexdigest(), state=state.hexdigest())


def _ignore(nbytes: int) -> None:
    """Take no notice of progress."""


def _named(name: str, scope: int | None) -> bytes:
    raw = name.encode()
    return struct.pack("<I", len(raw)) + raw + struct.pack("<I", NONE if scope is None else scope)


class _Contents:
    """The content digests of tensors; what several names share is read once."""

    def __init__(self, checkpoint: Checkpoint, view_limit_nbytes: int, progress: Progress) -> None:
        self._checkpoint = checkpoint
        self._view_limit_nbytes = view_limit_nbytes
        self._progress = progress
        self._owners: dict[TensorKey, bytes] = {}

    def of(self, entry: TensorEntry) -> bytes:
        """Return the digest of data type, shape and elements."""
        if isinstance(entry.alias, View):
            return self._digest(entry, self._view(entry, entry.alias))
        owner = entry.alias or entry.key
        if owner not in self._owners:
            # A plain alias has the type and the shape of its target (ALI-2).
            target = self._checkpoint.entry(owner)
            parts = elements(self._checkpoint, target, start=0, stop=prod(target.shape))
            self._owners[owner] = self._digest(target, parts)
        return self._owners[owner]

    def _digest(self, entry: TensorEntry, parts: Iterator[Array]) -> bytes:
        shape = struct.pack(f"<{len(entry.shape)}Q", *entry.shape)
        head = _SHAPE.pack(entry.dtype.code, len(entry.shape))
        digest = hashlib.sha256(_TENSOR_MARK + head + shape)
        for part in parts:
            digest.update(part.data)
            self._progress(len(part))
        return digest.digest()

    def _view(self, entry: TensorEntry, view: View) -> Iterator[Array]:
        target = self._checkpoint.entry(view.target)
        if entry.nbytes > max(self._view_limit_nbytes, target.nbytes):
            detail = f"the view repeats bytes up to {entry.nbytes}"
            where = f"{self._checkpoint.path}: tensor {entry.name!r}"
            raise fault("ALI-6", where, f"{detail}, limit {self._view_limit_nbytes}")
        itemsize = entry.dtype.nbytes
        strides = tuple(stride * itemsize for stride in view.strides)
        for box in blocks(entry.shape, itemsize=itemsize, start=0, stop=prod(entry.shape)):
            offset = view.offset * itemsize
            offset += sum(map(int.__mul__, box.start, strides))
            out = np.empty(box.shape, dtype=f"V{itemsize}")
            self._gather(out, target, strides, offset=offset)
            yield out.reshape(-1).view(np.uint8)

    def _gather(
        self, out: Array, target: TensorEntry, strides: tuple[int, ...], *, offset: int
    ) -> None:
        """Fill a block of a view, in halves while its elements lie too far apart to read at once.

        spec: ALI-8
        """
        pending = [(out, offset)]
        while pending:
            part, offset = pending.pop()
            reach = [(dim - 1) * stride for dim, stride in zip(part.shape, strides, strict=True)]
            span = sum(reach) + part.itemsize
            if span <= _STEP_NBYTES:
                held = self._bytes(target, start=offset, stop=offset + span)
                part[...] = np.ndarray(part.shape, part.dtype, held.data, strides=strides)
                continue
            axis = reach.index(max(reach))
            half = part.shape[axis] // 2
            before = (slice(None),) * axis
            pending.append((part[(*before, slice(half))], offset))
            pending.append((part[(*before, slice(half, None))], offset + half * strides[axis]))

    def _bytes(self, owner: TensorEntry, *, start: int, stop: int) -> Array:
        """Return bytes of a tensor; a view of another type may begin inside an element."""
        itemsize = owner.dtype.nbytes
        first, last = start // itemsize, -(-stop // itemsize)
        parts = list(elements(self._checkpoint, owner, start=first, stop=last))
        begin = start - first * itemsize
        return np.concatenate(parts)[begin : begin + stop - start]


def elements(
    checkpoint: Checkpoint, owner: TensorEntry, *, start: int, stop: int
) -> Iterator[Array]:
    """Yield the bytes of elements of a tensor that has bytes of its own, in C order, in steps."""
    for box in blocks(owner.shape, itemsize=owner.dtype.nbytes, start=start, stop=stop):
        yield checkpoint.read(owner.key, box=box)


def blocks(shape: tuple[int, ...], *, itemsize: int, start: int, stop: int) -> Iterator[Box]:
    """Yield boxes that hold the elements from `start` to `stop`, in C order, each of some rows.

    A row is what lies below one index of an axis; the axis is the first whose rows are no larger
    than a step. The first and the last rows may be wanted in part: they are cut along later axes.
    """
    position = start
    while position < stop:
        axis, row = _axis(shape, itemsize, position, stop)
        count = 1
        if axis < len(shape):
            index = position // row % shape[axis]
            most = max(_STEP_NBYTES // (row * itemsize), 1)
            count = min(shape[axis] - index, (stop - position) // row, most)
        yield _box(shape, axis, position, count)
        position += count * row


def _axis(shape: tuple[int, ...], itemsize: int, position: int, stop: int) -> tuple[int, int]:
    """Return the first axis of which a whole row starts here, and the elements of such a row."""
    row = prod(shape)
    for axis, dim in enumerate(shape):
        row //= dim
        if row * itemsize <= _STEP_NBYTES and position % row == 0 and position + row <= stop:
            return axis, row
    return len(shape), 1


def _box(shape: tuple[int, ...], axis: int, position: int, count: int) -> Box:
    index = []
    for dim in reversed(shape):
        position, place = divmod(position, dim)
        index.append(place)
    lengths = (*(1,) * axis, count, *shape[axis + 1 :])
    return Box(start=tuple(reversed(index)), shape=lengths if shape else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Object:
    """An object, its place in the order, and what stands before its digest."""

    place: tuple[bytes, int]
    header: bytes
    content: Callable[[], bytes]


def _objects(checkpoint: Checkpoint) -> Iterator[_Object]:
    for segment in checkpoint.segments:
        for row, record in enumerate(segment.index.tables.objects):
            name, scope = segment.index.object_names[row], int(record["scope"])
            kind, extent = int(record["kind"]), int(record["extent"])
            ranks = segment.index.tables.object_ranks
            own = ranks[ranks["object"] == row]
            ranges = struct.pack(
                f"<{2 * len(own)}I", *np.stack((own["start"], own["stop"]), 1).flat
            )
            header = _named(name, scope) + _OBJECT.pack(kind, len(own)) + ranges

            def content(
                segment: Segment = segment, kind: int = kind, extent: int = extent
            ) -> bytes:
                return _object_bytes(segment, kind, extent)

            yield _Object(place=(name.encode(), scope), header=header, content=content)


def _object_bytes(segment: Segment, kind: int, extent: int) -> bytes:
    """Return the bytes of an object; in a tree the place in a table gives way to the scope."""
    raw = b"" if extent == NONE else bytes(segment.read_extent(extent))
    if kind != OBJECT_TREE:
        return raw
    # The name of a tensor is its path in the tree (NAM-3), so the scope is all that is missing.
    scopes = segment.scopes
    return dump_tree(parse_tree(raw, f"{segment.where}: tree"), index_of=scopes.__getitem__)
