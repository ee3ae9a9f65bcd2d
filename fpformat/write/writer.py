"""The simplest correct writer: one thread, buffered, piece by piece. The oracle for the fast one.

For the same plan and save id it always gives the same bytes. A segment is written front to back:
header block, extents with zero padding between them, index, footer block; then it is synced.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fpformat.arguments import checked_path
from fpformat.errors import PlanError
from fpformat.limits import SAVE_ID_NBYTES
from fpformat.names import segment_name
from fpformat.publish.latch import Latch
from fpformat.publish.shield import run_whole
from fpformat.publish.staging import Staging, write_all
from fpformat.read.source import BytesSource
from fpformat.records.checksum import crc32c, piece_checksums
from fpformat.records.model import (
    Geometry,
    Part,
    SavePlan,
    SegmentRecord,
    ShardKey,
    ShardSource,
)
from fpformat.write.layout import SaveLayout, SegmentLayout, check_attempt, lay_out

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
    path = checked_path(path)
    check_attempt(save_id, created_us)
    layout = lay_out(plan, sources)
    return write_layout(path, layout, sources, save_id=save_id, created_us=created_us)


def write_layout(
    path: str,
    layout: SaveLayout,
    sources: Mapping[ShardKey, ShardSource],
    *,
    save_id: bytes | None = None,
    created_us: int | None = None,
) -> WriteReport:
    """Write and commit a save whose plan and arguments were checked; see `write_checkpoint`.

    An interrupt is raised when what was written is removed, or the commit that had begun is whole.
    """
    stop = Latch()
    work = partial(_write, path, layout, sources, save_id=save_id, created_us=created_us, stop=stop)
    return run_whole(work, stop=stop.set)


def _write(
    path: str,
    layout: SaveLayout,
    sources: Mapping[ShardKey, ShardSource],
    *,
    save_id: bytes | None,
    created_us: int | None,
    stop: Latch,
) -> WriteReport:
    begin = time.perf_counter()
    save_id = os.urandom(SAVE_ID_NBYTES) if save_id is None else save_id
    created_us = time.time_ns() // 1000 if created_us is None else created_us
    staging = Staging(path, save_id, stop=stop)
    try:
        records = [
            _write_segment(staging, segment, sources, save_id) for segment in layout.segments
        ]
        staging.seal()
        document, checkpoint_id = layout.manifest(records, save_id=save_id, created_us=created_us)
        staging.publish(document)
    except BaseException:
        staging.abandon()
        raise
    return WriteReport(
        path=staging.final,
        checkpoint_id=checkpoint_id,
        save_id=save_id,
        nbytes=len(document) + sum(record.nbytes for record in records),
        data_nbytes=layout.data_nbytes,
        seconds=time.perf_counter() - begin,
        warnings=tuple(staging.warnings),
        removed=staging.removed,
    )


def _write_segment(
    staging: Staging,
    layout: SegmentLayout,
    sources: Mapping[ShardKey, ShardSource],
    save_id: bytes,
) -> SegmentRecord:
    segment = _SegmentFile(staging, layout.ordinal)
    try:
        segment.write(layout.header(save_id))
        checksums = _write_extents(segment, layout, sources)
        end = layout.end(checksums, save_id)
        segment.write(end.index)
        segment.write(end.footer)
        segment.sync()
    finally:
        segment.close()
    return end.record(segment.crc32c)


def _write_extents(
    segment: _SegmentFile, layout: SegmentLayout, sources: Mapping[ShardKey, ShardSource]
) -> list[int]:
    """Write all extents and the padding; return the checksums of their pieces."""
    parts = [(part, sources[part.key, part.box]) for part in layout.plan.parts]
    parts += [
        (Part(key=("", None), box=None, shard_offset=0, nbytes=len(payload)), BytesSource(payload))
        for payload in layout.payloads
    ]
    checksums: list[int] = []
    for (part, source), offset in zip(parts, layout.offsets, strict=True):
        segment.pad_to(offset)
        checksums += _write_extent(segment, part, source, layout.geometry)
    segment.pad_to(layout.index_offset)
    return checksums


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
