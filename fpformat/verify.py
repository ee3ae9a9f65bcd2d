"""Verification of every byte of every file, with all that is wrong in one report.

Where `fpformat.reader` stops at the first fault, this goes on: a segment that cannot be opened does
not hide the damage in the next one, and every damaged piece is laid to the tensor that owns it.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fpformat.check import check_segments
from fpformat.checksum import crc32c
from fpformat.errors import FormatError, Problem, fault
from fpformat.manifest import parse_manifest
from fpformat.model import Manifest, TensorKey
from fpformat.names import MANIFEST_NAME
from fpformat.reader import Checkpoint
from fpformat.segment import Segment, SegmentPlace
from fpformat.source import open_directory, read_exact, read_manifest
from fpformat.wire import is_zero

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

    def add(self, error: FormatError) -> None:
        self.problems.append(Problem.of(error))


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
    """
    findings = _Findings()
    place = os.fspath(path)
    manifest, checkpoint_id = None, None
    segments: list[Segment] = []
    try:
        manifest, checkpoint_id = _manifest(place, follow_symlinks, findings)
    except FormatError as error:
        findings.add(error)
    if manifest is not None:
        for ordinal in range(len(manifest.segments)):
            segment = _verify_segment(
                place, ordinal, manifest, tuple(volumes), follow_symlinks, findings, progress
            )
            segments += [segment] if segment else []
    if manifest is not None and len(segments) == len(manifest.segments):
        _check_whole(place, segments, manifest, volumes, follow_symlinks, findings)
    return VerifyReport(
        problems=tuple(findings.problems),
        damaged=tuple(findings.damaged),
        checkpoint_id=checkpoint_id,
        manifest=manifest,
        tensor_count=len({key for segment in segments for key in segment.keys}),
        nbytes=findings.nbytes,
    )


def _manifest(path: str, follow_symlinks: bool, findings: _Findings) -> tuple[Manifest, str]:
    directory = open_directory(path)
    try:
        document = read_manifest(path, directory, follow_symlinks=follow_symlinks)
    finally:
        os.close(directory)
    findings.nbytes += len(document)
    return parse_manifest(document, os.path.join(path, MANIFEST_NAME))


def _verify_segment(
    path: str,
    ordinal: int,
    manifest: Manifest,
    volumes: tuple[str, ...],
    follow_symlinks: bool,
    findings: _Findings,
    progress: Callable[[int], None] | None,
) -> Segment | None:
    """Verify one segment; return it when its structure is sound."""
    place = segment = None
    try:
        place = SegmentPlace(
            path,
            ordinal,
            volumes=volumes,
            save_id=manifest.save_id,
            follow_symlinks=follow_symlinks,
            keep_open=True,
        )
        segment = Segment(place, manifest)
        _verify_extents(segment, findings)
    except FormatError as error:
        findings.add(error)
    if place is not None:
        try:
            _verify_file(place, manifest, findings, progress)
        except FormatError as error:
            findings.add(error)
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


def _verify_file(
    place: SegmentPlace,
    manifest: Manifest,
    findings: _Findings,
    progress: Callable[[int], None] | None,
) -> None:
    """Compare the checksum of the whole file with the manifest's."""
    checksum = 0
    with place.open() as (descriptor, nbytes):
        for offset in range(0, nbytes, _BATCH_NBYTES):
            buffer = bytearray(min(_BATCH_NBYTES, nbytes - offset))
            read_exact(descriptor, buffer, offset=offset, where=place.where)
            checksum = crc32c(buffer, checksum)
            findings.nbytes += len(buffer)
            if progress is not None:
                progress(len(buffer))
    if checksum != (expected := manifest.segments[place.ordinal].crc32c):
        detail = f"CRC-32C of the file is {checksum:08x}, the manifest says {expected:08x}"
        findings.add(fault("SUM-4", place.where, detail))


def _check_whole(
    path: str,
    segments: Sequence[Segment],
    manifest: Manifest,
    volumes: Sequence[str],
    follow_symlinks: bool,
    findings: _Findings,
) -> None:
    """Check the rules across segments, then the trees."""
    try:
        indexes = [segment.index for segment in segments]
        check_segments(indexes, world_size=manifest.world_size, where=path)
        with Checkpoint(path, volumes=volumes, follow_symlinks=follow_symlinks) as checkpoint:
            checkpoint.check_trees()
    except FormatError as error:
        if Problem.of(error) not in findings.problems:
            findings.add(error)
