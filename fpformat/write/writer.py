"""The simplest correct writer: one thread, buffered, piece by piece. The oracle for the fast one.

For the same plan and save id it always gives the same bytes. A segment is written front to back:
header block, extents with zero padding between them, index, footer block; then it is synced.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fpformat.arguments import checked_path
from fpformat.errors import PlanError
from fpformat.limits import SAVE_ID_NBYTES
from fpformat.names import segment_name
from fpformat.publish.staging import Staging, write_all
from fpformat.read.source import BytesSource
from fpformat.records.checksum import crc32c, piece_checksums
from fpformat.records.layout import place_extents
from fpformat.records.manifest import dump_manifest, feature_words
from fpformat.records.model import (
    Features,
    Geometry,
    Manifest,
    Part,
    SavePlan,
    SegmentPlan,
    SegmentRecord,
    ShardKey,
    ShardSource,
)
from fpformat.records.wire import Footer, Header, dump_footer, dump_header
from fpformat.write.assemble import IndexAssembly, check_attempt, check_plan

_BATCH_PIECES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteReport:
    """What a committed save amounts to.

    Attributes:
        nbytes: Size of all files.
        data_nbytes: Bytes of tensors and objects.
        seconds: From the call to the end of the last sync.
        warnings: What the file system could not do, such as to lock or to sync a directory.
        removed: Directories of writers that died, which were removed from beside the checkpoint.
    """

    path: Path
    checkpoint_id: str
    save_id: bytes
    nbytes: int
    data_nbytes: int
    seconds: float
    warnings: tuple[str, ...] = ()
    removed: tuple[Path, ...] = ()


class _SegmentFile:
    """An open segment that counts and checksums what is written to it."""

    def __init__(self, staging: Staging, ordinal: int) -> None:
        self._staging = staging
        self._path = staging.path / segment_name(ordinal)
        self._descriptor = staging.create_segment(ordinal)
        self.position = 0
        self.crc32c = 0

    def write(self, buffer: "bytes | memoryview") -> None:
        self._staging.attempt(
            f"writing {len(buffer)} bytes at {self.position}",
            lambda: write_all(self._descriptor, buffer),
            path=self._path,
        )
        self.crc32c = crc32c(buffer, self.crc32c)
        self.position += len(buffer)

    def pad_to(self, offset: int) -> None:
        self.write(bytes(offset - self.position))

    def sync(self) -> None:
        self._staging.attempt("syncing", lambda: os.fsync(self._descriptor), path=self._path)

    def close(self) -> None:
        os.close(self._descriptor)


def write_checkpoint(
    path: "str | os.PathLike[str]",
    plan: SavePlan,
    sources: Mapping[ShardKey, ShardSource],
    *,
    save_id: bytes | None = None,
    created_us: int | None = None,
) -> WriteReport:
    """Write and commit a checkpoint; it is durable when this returns.

    Args:
        path: Directory to create; nothing may stand there.
        plan: What goes where.
        sources: The bytes of every shard that the plan's parts name.
        save_id: 16 bytes that identify this attempt; random by default.
        created_us: Time for the manifest in microseconds since 1970; now by default.

    Raises:
        PlanError: The plan breaks a clause, `path` exists, or an argument is of a wrong kind;
            nothing was written.
        SaveError: A system call failed; what was written is removed again.
    """
    begin = time.perf_counter()
    path = checked_path(path)
    check_attempt(save_id, created_us)
    check_plan(plan, sources)
    save_id = os.urandom(SAVE_ID_NBYTES) if save_id is None else save_id
    staging = Staging(path, save_id)
    try:
        records = tuple(
            _write_segment(staging, ordinal, segment, plan.geometry, sources, save_id)
            for ordinal, segment in enumerate(plan.segments)
        )
        staging.seal()
        manifest = Manifest(
            save_id=save_id,
            segments=records,
            created_us=time.time_ns() // 1000 if created_us is None else created_us,
            step=plan.step,
            user=plan.user,
            world_size=plan.world_size,
            extensions=plan.extensions,
        )
        document, checkpoint_id = dump_manifest(manifest)
        staging.publish(document)
    except BaseException:
        staging.abandon()
        raise
    return WriteReport(
        path=staging.final,
        checkpoint_id=checkpoint_id,
        save_id=save_id,
        nbytes=len(document) + sum(record.nbytes for record in records),
        data_nbytes=sum(segment.data_nbytes for segment in plan.segments),
        seconds=time.perf_counter() - begin,
        warnings=tuple(staging.warnings),
        removed=staging.removed,
    )


def _write_segment(
    staging: Staging,
    ordinal: int,
    plan: SegmentPlan,
    geometry: Geometry,
    sources: Mapping[ShardKey, ShardSource],
    save_id: bytes,
) -> SegmentRecord:
    segment = _SegmentFile(staging, ordinal)
    try:
        incompat, ro_compat, compat = feature_words(Features())
        header = Header(
            ordinal=ordinal,
            save_id=save_id,
            geometry=geometry,
            incompat=incompat,
            ro_compat=ro_compat,
            compat=compat,
        )
        segment.write(dump_header(header))
        checksums, offsets = _write_extents(segment, plan, geometry, sources)
        index, index_sha256 = IndexAssembly(plan, geometry).dump(offsets, checksums)
        index_offset = segment.position
        segment.write(index)
        footer = Footer(
            index_offset=index_offset,
            index_nbytes=len(index),
            index_sha256=index_sha256,
            save_id=save_id,
            segment_nbytes=segment.position + geometry.align,
            ordinal=ordinal,
        )
        segment.write(dump_footer(footer, align=geometry.align))
        segment.sync()
    finally:
        segment.close()
    return SegmentRecord(
        nbytes=segment.position,
        index_offset=index_offset,
        index_nbytes=len(index),
        index_sha256=index_sha256,
        crc32c=segment.crc32c,
    )


def _write_extents(
    segment: _SegmentFile,
    plan: SegmentPlan,
    geometry: Geometry,
    sources: Mapping[ShardKey, ShardSource],
) -> tuple[list[int], list[int]]:
    """Write all extents and the padding; return piece checksums and offsets."""
    objects = [entry.payload for entry in plan.objects if entry.payload]
    sizes = [part.nbytes for part in plan.parts] + [len(payload) for payload in objects]
    offsets, index_offset = place_extents(sizes, geometry)
    checksums: list[int] = []
    for part, offset in zip(plan.parts, offsets, strict=False):
        segment.pad_to(offset)
        checksums += _write_extent(segment, part, sources[part.key, part.box], geometry)
    for payload, offset in zip(objects, offsets[len(plan.parts) :], strict=True):
        segment.pad_to(offset)
        whole = Part(key=("", None), box=None, shard_offset=0, nbytes=len(payload))
        checksums += _write_extent(segment, whole, BytesSource(payload), geometry)
    segment.pad_to(index_offset)
    return checksums, offsets


def _write_extent(
    segment: _SegmentFile, part: Part, source: ShardSource, geometry: Geometry
) -> list[int]:
    batch = _BATCH_PIECES * geometry.piece_nbytes
    checksums: list[int] = []
    for start in range(0, part.nbytes, batch):
        nbytes = min(batch, part.nbytes - start)
        buffer = source.read(offset=part.shard_offset + start, nbytes=nbytes)
        if len(buffer) != nbytes:
            raise PlanError(f"{part.key[0]!r}: its source gave {len(buffer)} of {nbytes} bytes")
        checksums += piece_checksums(buffer, piece_nbytes=geometry.piece_nbytes)
        segment.write(buffer)
    return checksums
