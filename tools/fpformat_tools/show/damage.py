"""What the faults of a checkpoint mean for its tensors.

`fpformat.read.verify` reports faults as they are found. Here they are laid to every name whose
bytes they touch, ties included, and the tensors are counted that could not be checked because their
segment could not be opened. The index of such a segment is often sound, and then says which.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from fpformat.errors import FormatError, Problem
from fpformat.limits import HEADER_NBYTES, NONE
from fpformat.names import segment_name
from fpformat.read.segment import Segment, SegmentPlace
from fpformat.read.source import CheckpointDirectory, read_exact
from fpformat.read.verify import VerifyReport
from fpformat.records.index import FLAG_HIDDEN, OWNER_OBJECT, SegmentIndex, parse_index
from fpformat.records.manifest import feature_words
from fpformat.records.model import Geometry, Manifest, TensorKey
from fpformat.records.wire import Footer, Header, parse_header
from fpformat.rules.index import check_index

# Faults that do not keep the rest of a segment from being checked.
_LOCAL_CLAUSES = frozenset({"SUM-2", "SUM-4", "SEG-5"})
# Faults of an extent that end the check of its segment.
_ENDING_CLAUSES = frozenset({"SEG-1", "DIR-7", "ZST-1", "ZST-3"})


@dataclass(slots=True, kw_only=True)
class Damage:
    """What is known of the tensors of a checkpoint with faults.

    Attributes:
        names: Every tensor in an index that could be read; no hidden bases.
        damaged: Those of which a byte cannot be trusted.
        sharers: Other names of a damaged tensor's bytes, by the tensor that owns them.
        unread: Segments that could not be checked, each with its tensors, None for unknown ones.
        is_local: Whether every byte outside the faults was checked and is good.
    """

    names: set[TensorKey] = field(default_factory=set)
    damaged: dict[TensorKey, None] = field(default_factory=dict)
    sharers: dict[TensorKey, list[TensorKey]] = field(default_factory=dict)
    unread: dict[str, set[TensorKey] | None] = field(default_factory=dict)
    is_local: bool = False

    @property
    def unverified_count(self) -> int | None:
        """Number of tensors that could not be checked, None when it is unknown."""
        unverified: set[TensorKey] = set()
        for keys in self.unread.values():
            if keys is None:
                return None
            unverified |= keys
        return len(unverified - set(self.damaged))


def segment_of(problem: Problem, manifest: Manifest | None) -> int | None:
    """Return the segment that a problem lies in, None for a problem of the whole."""
    for ordinal in range(len(manifest.segments) if manifest else 0):
        name = segment_name(ordinal)
        if problem.where.endswith(name) or f"{name}: " in problem.where:
            return ordinal
    return None


def assess(path: str, report: VerifyReport) -> Damage:
    """Return what the faults in a report mean; only indexes are read again."""
    damage = Damage()
    manifest = report.manifest
    if manifest is None:
        return damage
    wanted = set(report.damaged)
    for ordinal, (index, is_open) in enumerate(_indexes(path, manifest)):
        ended = any(
            problem.clause in _ENDING_CLAUSES and segment_of(problem, manifest) == ordinal
            for problem in report.problems
        )
        if index is not None:
            keys = _Keys(index)
            damage.names.update(keys.visible())
            for owner, key in keys.ties():
                if owner in wanted:
                    damage.sharers.setdefault(owner, []).append(key)
        if ended or not is_open:
            stored = None if index is None else set(_Keys(index).stored())
            damage.unread[segment_name(ordinal)] = stored
    for owner in report.damaged:
        if owner in damage.names:
            damage.damaged[owner] = None
        damage.damaged.update(dict.fromkeys(damage.sharers.get(owner, ())))
    clauses = {problem.clause for problem in report.problems}
    damage.is_local = not damage.unread and clauses <= _LOCAL_CLAUSES
    return damage


class _Keys:
    """The tensors of one segment's index by key."""

    def __init__(self, index: SegmentIndex) -> None:
        self._tables = index.tables
        scopes = index.tables.tensors["scope"].tolist()
        self._keys: list[TensorKey] = [
            (name, None if scope == NONE else scope)
            for name, scope in zip(index.names, scopes, strict=True)
        ]
        self._hidden = index.tables.tensors["flags"] & FLAG_HIDDEN != 0

    def _at(self, rows: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> list[TensorKey]:
        return [self._keys[row] for row in np.flatnonzero(rows & ~self._hidden).tolist()]

    def visible(self) -> Sequence[TensorKey]:
        """Return the tensors that are not hidden."""
        return self._at(~self._hidden)

    def ties(self) -> Iterator[tuple[TensorKey, TensorKey]]:
        """Yield the owner and the name of each tensor without bytes of its own."""
        target = self._tables.tensors["target"]
        for row in np.flatnonzero(target != NONE).tolist():
            yield self._keys[int(target[row])], self._keys[row]

    def stored(self) -> Sequence[TensorKey]:
        """Return the tensors that have bytes in this segment, be it through a tie."""
        extents, target = self._tables.extents, self._tables.tensors["target"]
        owners = np.zeros(len(self._keys) + 1, dtype=np.bool_)
        owners[extents["owner"][extents["owner_kind"] != OWNER_OBJECT]] = True
        tied = owners[np.where(target == NONE, len(self._keys), target)]
        return self._at(owners[:-1] | tied)


def _indexes(path: str, manifest: Manifest) -> Iterator[tuple[SegmentIndex | None, bool]]:
    """Yield `_index_of` for every segment; nothing is known when the directory is gone by now."""
    count = len(manifest.segments)
    try:
        directory = CheckpointDirectory(path)
    except FormatError:
        yield from [(None, False)] * count
        return
    with directory:
        for ordinal in range(count):
            yield _index_of(directory, ordinal, manifest)


def _index_of(
    directory: CheckpointDirectory, ordinal: int, manifest: Manifest
) -> tuple[SegmentIndex | None, bool]:
    """Return the index of a segment if it can be trusted, and whether the whole segment can."""
    place = SegmentPlace(directory, ordinal, save_id=manifest.save_id, keep_open=False)
    try:
        return Segment(place, manifest).index, True
    except FormatError:
        return _index_alone(place, manifest), False


def _index_alone(place: SegmentPlace, manifest: Manifest) -> SegmentIndex | None:
    """Read the index where the manifest says it lies; its digest stands in the manifest too."""
    record = manifest.segments[place.ordinal]
    footer = Footer(
        index_offset=record.index_offset,
        index_nbytes=record.index_nbytes,
        index_sha256=record.index_sha256,
        save_id=manifest.save_id,
        segment_nbytes=record.nbytes,
        ordinal=place.ordinal,
    )
    try:
        with place.open() as (descriptor, _):
            head = bytearray(HEADER_NBYTES)
            read_exact(descriptor, head, offset=0, where=place.where)
            region = bytearray(record.index_nbytes)
            read_exact(descriptor, region, offset=record.index_offset, where=place.where)
        header = _header_of(bytes(head), place, manifest)
        tables = parse_index(memoryview(region), header=header, footer=footer, where=place.where)
        return check_index(
            tables,
            header=header,
            footer=footer,
            world_size=manifest.world_size,
            where=place.where,
        )
    except FormatError:
        return None


def _header_of(head: bytes, place: SegmentPlace, manifest: Manifest) -> Header:
    try:
        return parse_header(head, place.where)
    except FormatError:
        # Most writers take the default; with another geometry the index is refused.
        incompat, _, _ = feature_words(manifest.features)
        return Header(
            ordinal=place.ordinal,
            save_id=manifest.save_id,
            geometry=Geometry(),
            incompat=incompat,
        )
