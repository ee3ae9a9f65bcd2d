"""A plain, synchronous, complete reader.

Opening checks everything but the data: manifest, headers, footers, indexes, and the rules across
segments. Reading a tensor, or a box of one, reads the pieces that hold it and verifies each before
a byte of it is returned.
"""

import os
from collections.abc import Sequence
from functools import cached_property
from heapq import merge
from numbers import Integral
from types import TracebackType
from typing import Any, Final

import numpy as np

from fpformat.arguments import check_all, check_kind, checked_int, wrong
from fpformat.dtypes import numpy_dtype, tensor_nbytes
from fpformat.errors import PlanError, fault
from fpformat.limits import NONE
from fpformat.names import MANIFEST_NAME
from fpformat.read.segment import Segment, SegmentPlace
from fpformat.read.source import CheckpointDirectory
from fpformat.read.trees import StateTree, StateTrees
from fpformat.records.index import Array
from fpformat.records.layout import plan_runs
from fpformat.records.manifest import parse_manifest
from fpformat.records.model import Box, Manifest, TensorEntry, TensorKey, View
from fpformat.rules.checkpoint import check_segments, extent_box

KEPT_OPEN: Final = 256
DEFAULT_VIEW_LIMIT_NBYTES: Final = 1 << 30


class Checkpoint:
    """An open checkpoint. Use it as a context manager, or close it.

    Attributes:
        path: The directory as the caller named it.
        manifest: The commit record.
        checkpoint_id: SHA-256 that names the whole state, 64 hex digits.
        segments: The open segments, by ordinal.
    """

    def __init__(
        self,
        path: "str | os.PathLike[str]",
        *,
        volumes: Sequence[str] = (),
        follow_symlinks: bool = False,
        view_limit_nbytes: int = DEFAULT_VIEW_LIMIT_NBYTES,
    ) -> None:
        """See `open_checkpoint`."""
        view_limit_nbytes = checked_int("view_limit_nbytes", view_limit_nbytes, least=0)
        self._view_limit_nbytes = view_limit_nbytes
        self.segments: list[Segment] = []
        self._directory = CheckpointDirectory(
            path, volumes=volumes, follow_symlinks=follow_symlinks
        )
        self.path = self._directory.path
        try:
            self.manifest: Manifest
            self.manifest, self.checkpoint_id = parse_manifest(
                self._directory.read_manifest(), os.path.join(self.path, MANIFEST_NAME)
            )
            self._open_segments()
        except BaseException:
            self.close()
            raise

    def _open_segments(self) -> None:
        count = len(self.manifest.segments)
        for ordinal in range(count):
            place = SegmentPlace(
                self._directory,
                ordinal,
                save_id=self.manifest.save_id,
                keep_open=count <= KEPT_OPEN,
            )
            self._add(place)
        check_segments(
            [segment.index for segment in self.segments],
            world_size=self.manifest.world_size,
            where=self.path,
        )

    def _add(self, place: SegmentPlace) -> None:
        try:
            self.segments.append(Segment(place, self.manifest))
        except BaseException:
            place.close()
            raise

    def __enter__(self) -> "Checkpoint":
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Close all files; nothing can be read any more."""
        for segment in self.segments:
            segment.place.close()
        self._directory.close()

    def is_in_place(self) -> bool:
        """Return whether its path still leads to the directory that was opened.

        What was opened stays readable after it was renamed or, on a local file system, removed;
        only with more than 256 segments they are opened when they are read.
        """
        return self._directory.is_in_place()

    def keys(self) -> list[TensorKey]:
        """Return the keys of all tensors in table order, hidden bases included."""
        if len(self.segments) == 1:
            return self.segments[0].keys
        ordered = merge(
            *(zip(segment.index.names, segment.scopes, strict=True) for segment in self.segments)
        )
        return [(name, None if scope == NONE else scope) for name, scope in dict.fromkeys(ordered)]

    def _places(self, key: TensorKey) -> list[tuple[Segment, int]]:
        rows = [(segment, segment.find(key)) for segment in self.segments]
        return [(segment, row) for segment, row in rows if row is not None]

    def entry(self, key: "TensorKey | str") -> TensorEntry:
        """Return what the tables say of a tensor.

        Args:
            key: Name and scope, or the name alone for a global tensor.

        Raises:
            PlanError: There is no such tensor, or `key` is none.
        """
        key = _checked_key(key)
        for segment, row in self._places(key):
            return segment.entry(row)
        scope = "" if key[1] is None else f" of rank {key[1]}"
        raise PlanError(f"{self.path}: there is no tensor {key[0]!r}{scope}")

    def read(self, key: "TensorKey | str", *, box: Box | None = None) -> Array:
        """Return the bytes of a tensor, or of a box of it, in C order.

        Args:
            key: Name and scope, or the name alone for a global tensor.
            box: The part wanted; None for the whole tensor.

        Returns:
            A one-dimensional uint8 array; every piece that it came from was verified.

        Raises:
            PlanError: No such tensor, or the box does not lie inside it.
            FormatError: SUM-2 for damage; SEG-1, DIR-7; ALI-6 for a view above the limit.
        """
        entry = self.entry(key)
        box = self._wanted(entry, box)
        nbytes = tensor_nbytes(entry.dtype, box.shape, where=repr(entry.name))
        if isinstance(entry.alias, View):
            return self._read_view(entry, entry.alias, box)
        out = np.empty(nbytes, dtype=np.uint8)
        self._read_owned(self._owner(entry), box, out)
        return out

    def read_into(self, key: "TensorKey | str", out: Any, *, box: Box | None = None) -> None:
        """Read like `read`, into a writable contiguous buffer of exactly the right size.

        Raises:
            PlanError: `out` is no such buffer, and what `read` raises.
            FormatError: See `read`.
        """
        entry = self.entry(key)
        box = self._wanted(entry, box)
        nbytes = tensor_nbytes(entry.dtype, box.shape, where=repr(entry.name))
        target = _target_of(out)
        if len(target) != nbytes:
            raise PlanError(f"{entry.name!r} needs {nbytes} bytes, the buffer has {len(target)}")
        if isinstance(entry.alias, View):
            target[:] = self._read_view(entry, entry.alias, box)
        else:
            self._read_owned(self._owner(entry), box, target)

    def read_array(self, key: "TensorKey | str", *, box: Box | None = None) -> Array:
        """Read like `read`, as a numpy array of the tensor's type and shape.

        Raises:
            PlanError: numpy has no such type (BF16, the 8-bit floats, C32): use `read`.
        """
        entry = self.entry(key)
        numpy_type = numpy_dtype(entry.dtype)
        if numpy_type is None:
            raise PlanError(f"{entry.name!r}: numpy has no type for {entry.dtype.name}; use read()")
        stored = self.read(key, box=box)
        return stored.view(numpy_type).reshape(entry.shape if box is None else box.shape)

    def _wanted(self, entry: TensorEntry, box: Box | None) -> Box:
        if box is None:
            return Box(start=(0,) * len(entry.shape), shape=entry.shape)
        check_kind("box", box, Box, "a Box or None")
        check_all("box.start", box.start, Integral, "an int")
        check_all("box.shape", box.shape, Integral, "an int")
        inside = len(box.start) == len(box.shape) == len(entry.shape) and all(
            start >= 0 and length >= 0 and start + length <= dim
            for start, length, dim in zip(box.start, box.shape, entry.shape, strict=True)
        )
        if not inside:
            detail = f"{box.start}+{box.shape} is not a box of its shape {entry.shape}"
            raise PlanError(f"{entry.name!r}: {detail}")
        return box

    def _owner(self, entry: TensorEntry) -> TensorEntry:
        return entry if entry.target is None else self.entry(entry.target)

    def _read_owned(self, owner: TensorEntry, wanted: Box, out: Array) -> None:
        if not len(out):
            return
        itemsize = owner.dtype.nbytes
        whole = Box(start=(0,) * len(owner.shape), shape=owner.shape)
        for segment, row in self._places(owner.key):
            for extent in segment.extents_of(row):
                boxed = segment.index.tables.extents["dims_index"][extent] != NONE
                shard = extent_box(segment.index, extent) if boxed else whole
                runs = plan_runs(shard, wanted, itemsize=itemsize)
                if runs is not None:
                    segment.copy_runs(extent, runs, out)

    def _read_view(self, entry: TensorEntry, view: View, box: Box) -> Array:
        """Gather a box of a view from its target, which is read whole.

        spec: ALI-6
        """
        itemsize = entry.dtype.nbytes
        nbytes = tensor_nbytes(entry.dtype, box.shape, where=repr(entry.name))
        if nbytes > max(self._view_limit_nbytes, self.entry(view.target).nbytes):
            detail = f"the view repeats bytes up to {nbytes}, limit {self._view_limit_nbytes}"
            raise fault("ALI-6", f"{self.path}: tensor {entry.name!r}", detail)
        if not nbytes:
            return np.empty(0, dtype=np.uint8)
        offset = view.offset + sum(
            start * stride for start, stride in zip(box.start, view.strides, strict=True)
        )
        elements: Array = np.ndarray(
            box.shape,
            dtype=f"V{itemsize}",
            buffer=self.read(view.target).data,
            offset=offset * itemsize,
            strides=tuple(stride * itemsize for stride in view.strides),
        )
        return np.ascontiguousarray(elements).reshape(-1).view(np.uint8)

    def objects(self) -> list[tuple[str, int | None]]:
        """Return name and scope of every object, trees included."""
        return [
            (name, None if scope == NONE else int(scope))
            for segment in self.segments
            for name, scope in zip(
                segment.index.object_names, segment.index.tables.objects["scope"], strict=True
            )
        ]

    def read_object(self, name: str, scope: int | None = None) -> bytes:
        """Return the bytes of an object, verified.

        Raises:
            PlanError: There is no such object, or an argument is of a wrong kind.
            FormatError: SUM-2 for damage; SEG-1, DIR-7.
        """
        check_kind("name", name, str, "a str")
        wanted = NONE if scope is None else checked_int("scope", scope, least=0)
        for segment in self.segments:
            for row, record in enumerate(segment.index.tables.objects):
                if segment.index.object_names[row] == name and record["scope"] == wanted:
                    extent = int(record["extent"])
                    return b"" if extent == NONE else bytes(segment.read_extent(extent))
        raise PlanError(f"{self.path}: there is no object {name!r} (scope {scope})")

    @cached_property
    def _trees(self) -> StateTrees:
        return StateTrees(self.segments, world_size=self.manifest.world_size)

    def tree_ranks(self) -> list[int]:
        """Return the lowest rank of each tree; empty when the checkpoint has none."""
        return self._trees.ranks()

    def tree(self, rank: int = 0) -> StateTree | None:
        """Return the state tree of a rank, or None when the checkpoint has no trees.

        Raises:
            PlanError: There was no such rank at save time.
            FormatError: TRE-1 to TRE-9 or NAM-3; SUM-2 for damage.
        """
        world_size = self.manifest.world_size
        if checked_int("rank", rank, least=0) >= world_size:
            detail = f"rank={rank!r}: expected an int below the world size {world_size}"
            raise PlanError(f"{self.path}: {detail}")
        return self._trees.of(rank)

    def check_trees(self) -> None:
        """Check that trees together reach every tensor that is not hidden.

        Raises:
            FormatError: TRE-8, or what `tree` raises.
        """
        self._trees.check()


def _checked_key(key: Any) -> TensorKey:
    """Return name and scope; PlanError for what is neither a name nor both."""
    if isinstance(key, str):
        return key, None
    is_key = isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str)
    if not is_key or not isinstance(key[1], int | None):
        raise wrong("key", key, "a str, or a tuple of a str and a scope (int or None)")
    return key[0], key[1]


def _target_of(out: Any) -> Array:
    """Return the bytes of a buffer to read into."""
    expected = "a writable C-contiguous buffer"
    try:
        view = memoryview(out)
        if view.readonly or not view.c_contiguous:
            raise PlanError(f"out is not writable or not C-contiguous, expected {expected}")
        target: Array = np.frombuffer(view, dtype=np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise wrong("out", out, expected) from error
    return target


def open_checkpoint(
    path: "str | os.PathLike[str]",
    *,
    volumes: Sequence[str] = (),
    follow_symlinks: bool = False,
    view_limit_nbytes: int = DEFAULT_VIEW_LIMIT_NBYTES,
) -> Checkpoint:
    """Open a checkpoint and check all of it but the data.

    Args:
        path: The checkpoint's directory.
        volumes: Roots of further volumes on which segments may lie.
        follow_symlinks: Whether manifest and segments may be symbolic links.
        view_limit_nbytes: Largest view, in bytes, that `Checkpoint.read` materialises when it has
            more bytes than its target; 1 GiB by default.

    Raises:
        PlanError: An argument is of a wrong kind.
        FormatError: The first broken clause, with file and place.
    """
    return Checkpoint(
        path,
        volumes=volumes,
        follow_symlinks=follow_symlinks,
        view_limit_nbytes=view_limit_nbytes,
    )
