"""Verification of every byte of every file, with all that is wrong in one report.

Where `fpformat.read.reader` stops at the first fault, this goes on: a segment that cannot be opened
does not hide the damage in the next, and every damaged piece is laid to the tensor that owns it.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fpformat.arguments import wrong
from fpformat.errors import FormatError, Problem, fault
from fpformat.names import MANIFEST_NAME
from fpformat.read.reader import Checkpoint
from fpformat.read.segment import Segment, SegmentPlace
from fpformat.read.source import CheckpointDirectory, read_exact
from fpformat.read.trees import StateTrees
from fpformat.records.checksum import crc32c
from fpformat.records.manifest import parse_manifest
from fpformat.records.model import Manifest, TensorKey
from fpformat.records.wire import is_zero
from fpformat.rules.checkpoint import check_segments

_BATCH_NBYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What verification found.

    Attributes:
        problems: Every fault, in the order found; none means that the checkpoint is sound.
        damaged: Tensors of which at least one byte cannot be trusted.
        checkpoint_id: None when the manifest cannot be read.
        tensor_count: Tensors in the tables that could be read.
        nbytes: Bytes read from files.
    """

    problems: tuple[Problem, ...]
    damaged: tuple[TensorKey, ...]
    checkpoint_id: str | None
    manifest: Manifest | None
    tensor_count: int
    nbytes: int


@dataclass(slots=True, kw_only=True)
class _Findings:
    problems: list[Problem] = field(default_factory=list)
    damaged: dict[TensorKey, None] = field(default_factory=dict)
    nbytes: int = 0
    progress: Callable[[int], None] | None = None

    def add(self, error: FormatError) -> None:
        self.problems.append(Problem.of(error))

    def add_new(self, error: FormatError) -> None:
        """Add a fault unless it was found before, when the same bytes were read."""
        if Problem.of(error) not in self.problems:
            self.add(error)

    def note_read(self, nbytes: int) -> None:
        self.nbytes += nbytes
        if self.progress is not None:
            self.progress(nbytes)

    def report(
        self, segments: Sequence[Segment], manifest: Manifest | None, checkpoint_id: str | None
    ) -> VerifyReport:
        return VerifyReport(
            problems=tuple(self.problems),
            damaged=tuple(self.damaged),
            checkpoint_id=checkpoint_id,
            manifest=manifest,
            tensor_count=len({key for segment in segments for key in segment.keys}),
            nbytes=self.nbytes,
        )


def verify_checkpoint(
    path: "str | os.PathLike[str]",
    *,
    volumes: Sequence[str] = (),
    follow_symlinks: bool = False,
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Read and check every byte of a checkpoint.

    Args:
        path: The checkpoint's directory.
        volumes: Roots of further volumes on which segments may lie.
        follow_symlinks: Whether manifest and segments may be symbolic links.
        progress: Called with the number of bytes just read.

    Raises:
        PlanError: An argument is of a wrong kind; faults of the checkpoint stand in the report.
    """
    if progress is not None and not callable(progress):
        raise wrong("progress", progress, "a callable or None")
    findings = _Findings(progress=progress)
    manifest, checkpoint_id = None, None
    segments: list[Segment] = []
    try:
        with CheckpointDirectory(
            path, volumes=volumes, follow_symlinks=follow_symlinks
        ) as directory:
            manifest, checkpoint_id = _manifest(directory, findings)
            segments = _verify_segments(directory, manifest, findings)
    except FormatError as error:
        findings.add(error)
    return findings.report(segments, manifest, checkpoint_id)


def verify_open(checkpoint: Checkpoint) -> VerifyReport:
    """Read and check every byte of the segments of an open checkpoint, as it was opened.

    Args:
        checkpoint: What was opened; its manifest and the structure of its segments are checked.
    """
    findings = _Findings()
    for segment in checkpoint.segments:
        try:
            _verify_extents(segment, findings)
            _verify_file(segment.place, checkpoint.manifest, findings)
        except FormatError as error:
            findings.add(error)
    try:
        checkpoint.check_trees()
    except FormatError as error:
        findings.add_new(error)
    return findings.report(checkpoint.segments, checkpoint.manifest, checkpoint.checkpoint_id)


def _manifest(directory: CheckpointDirectory, findings: _Findings) -> tuple[Manifest, str]:
    document = directory.read_manifest()
    findings.nbytes += len(document)
    return parse_manifest(document, os.path.join(directory.path, MANIFEST_NAME))


def _verify_segments(
    directory: CheckpointDirectory, manifest: Manifest, findings: _Findings
) -> list[Segment]:
    """Verify every segment and, when all are sound in structure, the rules across them."""
    segments: list[Segment] = []
    for ordinal in range(len(manifest.segments)):
        segment = _verify_segment(directory, ordinal, manifest, findings)
        segments += [segment] if segment else []
    if len(segments) == len(manifest.segments):
        _check_whole(directory.path, segments, manifest, findings)
    return segments


def _verify_segment(
    directory: CheckpointDirectory, ordinal: int, manifest: Manifest, findings: _Findings
) -> Segment | None:
    """Verify one segment; return it when its structure is sound."""
    try:
        place = SegmentPlace(directory, ordinal, save_id=manifest.save_id, keep_open=True)
    except FormatError as error:
        findings.add(error)
        return None
    segment = None
    try:
        segment = Segment(place, manifest)
        _verify_extents(segment, findings)
    except FormatError as error:
        findings.add(error)
    try:
        _verify_file(place, manifest, findings)
    except FormatError as error:
        findings.add(error)
    finally:
        place.close()
    return segment


def _verify_extents(segment: Segment, findings: _Findings) -> None:
    """Check each piece of each extent, then the padding between extents."""
    extents = segment.index.tables.extents
    align = segment.header.geometry.align
    end = align
    with segment.place.open() as (descriptor, _):
        for row, record in enumerate(extents):
            offset, stored = int(record["offset"]), int(record["stored_nbytes"])
            _check_padding(segment, descriptor, end, offset, findings)
            end = offset + stored
            try:
                segment.verify_extent(row)
            except FormatError as error:
                findings.add(error)
                if record["owner_kind"] == 0:
                    findings.damaged[segment.keys[int(record["owner"])]] = None
        _check_padding(segment, descriptor, end, segment.footer.index_offset, findings)


def _check_padding(
    segment: Segment, descriptor: int, start: int, stop: int, findings: _Findings
) -> None:
    padding = bytearray(stop - start)
    read_exact(descriptor, padding, offset=start, where=segment.where)
    if padding and not is_zero(padding):
        at = start + int(np.flatnonzero(np.frombuffer(padding, dtype=np.uint8))[0])
        detail = f"padding is not zero at byte {at}"
        findings.add(fault("SEG-5", segment.where, detail))


def _verify_file(place: SegmentPlace, manifest: Manifest, findings: _Findings) -> None:
    """Compare the checksum of the whole file with the manifest's."""
    checksum = 0
    with place.open() as (descriptor, nbytes):
        for offset in range(0, nbytes, _BATCH_NBYTES):
            buffer = bytearray(min(_BATCH_NBYTES, nbytes - offset))
            read_exact(descriptor, buffer, offset=offset, where=place.where)
            checksum = crc32c(buffer, checksum)
            findings.note_read(len(buffer))
    if checksum != (expected := manifest.segments[place.ordinal].crc32c):
        detail = f"CRC-32C of the file is {checksum:08x}, the manifest says {expected:08x}"
        findings.add(fault("SUM-4", place.where, detail))


def _check_whole(
    path: str, segments: Sequence[Segment], manifest: Manifest, findings: _Findings
) -> None:
    """Check the rules across segments, then the trees."""
    try:
        indexes = [segment.index for segment in segments]
        check_segments(indexes, world_size=manifest.world_size, where=path)
        StateTrees(segments, world_size=manifest.world_size).check()
    except FormatError as error:
        findings.add_new(error)
