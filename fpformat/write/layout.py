"""A save before its first byte: where everything will lie, checked as a reader will check it.

What is left for the writer is to move the bytes and take their checksums; from those follow index,
footer and manifest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fpformat.arguments import check_kind, checked_int
from fpformat.errors import FormatError, PlanError
from fpformat.limits import HEADER_NBYTES, MAX_INT, SAVE_ID_NBYTES
from fpformat.names import MANIFEST_NAME, segment_name
from fpformat.records.index import OBJECT_TREE, SegmentIndex, parse_index
from fpformat.records.layout import place_extents
from fpformat.records.manifest import dump_manifest, feature_words, parse_manifest
from fpformat.records.model import (
    Features,
    Geometry,
    Manifest,
    ObjectEntry,
    SavePlan,
    SegmentPlan,
    SegmentRecord,
    ShardKey,
    ShardSource,
)
from fpformat.records.tree import parse_tree
from fpformat.records.wire import Footer, Header, dump_footer, dump_header, parse_header
from fpformat.rules.checkpoint import check_segments
from fpformat.rules.index import check_index
from fpformat.write.tables import IndexAssembly

_NO_SAVE_ID = bytes(SAVE_ID_NBYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentEnd:
    """What stands behind the extents of a segment.

    Attributes:
        index: The index region.
        footer: The footer block.
        nbytes: Size of the whole segment.
    """

    index: bytes
    footer: bytes
    index_offset: int
    index_sha256: bytes
    nbytes: int

    def record(self, crc32c: int) -> SegmentRecord:
        """Return what the manifest says of the segment, given the checksum of the file."""
        return SegmentRecord(
            nbytes=self.nbytes,
            index_offset=self.index_offset,
            index_nbytes=len(self.index),
            index_sha256=self.index_sha256,
            crc32c=crc32c,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLayout:
    """A segment with the place of every extent: those of parts, then those of objects.

    Attributes:
        payloads: The bytes of the objects that have any.
        offsets: Where each extent begins.
        index_offset: Where the index region begins.
    """

    ordinal: int
    plan: SegmentPlan
    geometry: Geometry
    tables: IndexAssembly
    payloads: tuple[bytes, ...]
    offsets: tuple[int, ...]
    index_offset: int

    @classmethod
    def of(cls, ordinal: int, plan: SegmentPlan, geometry: Geometry) -> "SegmentLayout":
        """Place the extents of a segment.

        Raises:
            PlanError: A part or an alias names an entry that the segment does not declare.
        """
        tables = IndexAssembly(plan, geometry)
        offsets, index_offset = place_extents(tables.extent_nbytes, geometry)
        return cls(
            ordinal=ordinal,
            plan=plan,
            geometry=geometry,
            tables=tables,
            payloads=tuple(entry.payload for entry in plan.objects if entry.payload),
            offsets=tuple(offsets),
            index_offset=index_offset,
        )

    def header(self, save_id: bytes) -> bytes:
        """Return the header block."""
        incompat, ro_compat, compat = feature_words(Features())
        header = Header(
            ordinal=self.ordinal,
            save_id=save_id,
            geometry=self.geometry,
            incompat=incompat,
            ro_compat=ro_compat,
            compat=compat,
        )
        return dump_header(header)

    def end(self, checksums: Sequence[int], save_id: bytes) -> SegmentEnd:
        """Return what follows the extents, given the checksums of all their pieces in order."""
        index, index_sha256 = self.tables.dump(self.offsets, checksums)
        footer = Footer(
            index_offset=self.index_offset,
            index_nbytes=len(index),
            index_sha256=index_sha256,
            save_id=save_id,
            segment_nbytes=self.index_offset + len(index) + self.geometry.align,
            ordinal=self.ordinal,
        )
        return SegmentEnd(
            index=index,
            footer=dump_footer(footer, align=self.geometry.align),
            index_offset=self.index_offset,
            index_sha256=index_sha256,
            nbytes=footer.segment_nbytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveLayout:
    """A plan that passed every check, with the layout of its segments."""

    plan: SavePlan
    segments: tuple[SegmentLayout, ...]

    @property
    def data_nbytes(self) -> int:
        """Bytes of tensors and objects."""
        return sum(segment.plan.data_nbytes for segment in self.segments)

    def manifest(
        self, records: Sequence[SegmentRecord], *, save_id: bytes, created_us: int
    ) -> tuple[bytes, str]:
        """Return the manifest of the written segments and the checkpoint id."""
        return _dump_manifest(self.plan, records, save_id=save_id, created_us=created_us)


def lay_out(plan: SavePlan, sources: Mapping[ShardKey, ShardSource]) -> SaveLayout:
    """Lay out a save, and apply a reader's own checks to what it would write.

    Raises:
        PlanError: With the clause that the result would break, the source that is missing, or the
            argument that is of a wrong kind.
    """
    check_kind("plan", plan, SavePlan, "a SavePlan")
    check_kind("sources", sources, Mapping, "a mapping of ShardKey to ShardSource")
    for segment in plan.segments:
        for part in segment.parts:
            if (part.key, part.box) not in sources:
                raise PlanError(f"{part.key[0]!r}: no source gives its bytes (box {part.box})")
    for segment in plan.segments:
        for entry in segment.objects:
            if entry.kind == OBJECT_TREE:
                _check_tree(entry)
    try:
        segments = tuple(
            SegmentLayout.of(ordinal, segment, plan.geometry)
            for ordinal, segment in enumerate(plan.segments)
        )
        indexes = [_check_segment(segment, world_size=plan.world_size) for segment in segments]
        check_segments(indexes, world_size=plan.world_size, where="plan")
        _check_manifest_values(plan)
    except FormatError as error:
        raise PlanError(f"this cannot be stored: {error}") from error
    return SaveLayout(plan=plan, segments=segments)


def check_attempt(save_id: Any, created_us: Any) -> None:
    """Raise PlanError for a save id or a time that is not None and no manifest can hold."""
    if save_id is not None:
        check_kind("save_id", save_id, bytes, f"{SAVE_ID_NBYTES} bytes or None")
        if len(save_id) != SAVE_ID_NBYTES:
            raise PlanError(f"save_id has {len(save_id)} bytes, expected {SAVE_ID_NBYTES}")
    if created_us is not None and checked_int("created_us", created_us, least=0) > MAX_INT:
        raise PlanError(f"created_us={created_us}: expected at most 2^53-1")


def _check_tree(entry: ObjectEntry) -> None:
    """Parse a tree as a reader will, so that none is written that cannot be read."""
    try:
        parse_tree(entry.payload, f"object {entry.name!r}")
    except FormatError as error:
        raise PlanError(f"this cannot be stored: {error}") from error


def _check_segment(segment: SegmentLayout, *, world_size: int) -> SegmentIndex:
    """Read a segment's index as it will be, but for the checksums."""
    where = segment_name(segment.ordinal)
    end = segment.end([0] * segment.tables.piece_count, _NO_SAVE_ID)
    header = parse_header(segment.header(_NO_SAVE_ID)[:HEADER_NBYTES], where)
    footer = Footer(
        index_offset=end.index_offset,
        index_nbytes=len(end.index),
        index_sha256=end.index_sha256,
        save_id=_NO_SAVE_ID,
        segment_nbytes=end.nbytes,
        ordinal=segment.ordinal,
    )
    tables = parse_index(memoryview(end.index), header=header, footer=footer, where=where)
    return check_index(tables, header=header, footer=footer, world_size=world_size, where=where)


def _dump_manifest(
    plan: SavePlan, records: Sequence[SegmentRecord], *, save_id: bytes, created_us: int
) -> tuple[bytes, str]:
    manifest = Manifest(
        save_id=save_id,
        segments=tuple(records),
        created_us=created_us,
        step=plan.step,
        user=plan.user,
        world_size=plan.world_size,
        extensions=plan.extensions,
    )
    return dump_manifest(manifest)


def _check_manifest_values(plan: SavePlan) -> None:
    record = SegmentRecord(
        nbytes=0, index_offset=0, index_nbytes=0, index_sha256=bytes(32), crc32c=0
    )
    records = (record,) * len(plan.segments)
    try:
        document, _ = _dump_manifest(plan, records, save_id=_NO_SAVE_ID, created_us=0)
    except (UnicodeEncodeError, TypeError) as error:
        raise PlanError(f"step or user strings have no place in a manifest: {error}") from error
    parse_manifest(document, MANIFEST_NAME)
