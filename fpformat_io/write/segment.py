"""One segment written by the engine: header, extents, index and footer, all by transfers.

The checksum of the whole file and those of pieces are combined from the checksums of fragments;
nothing is read twice.
"""

import errno
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fpformat.records.model import (
    Geometry,
    SegmentRecord,
    ShardKey,
    ShardSource,
)
from fpformat.write.layout import SegmentLayout
from fpformat_io.control import SaveControl
from fpformat_io.errors import WriteError
from fpformat_io.native.columns import FRAGMENT_NBYTES, NBYTES, Row
from fpformat_io.native.kernels import combine_runs
from fpformat_io.write.aligned import address_of
from fpformat_io.write.pulls import Pulls, copier_of
from fpformat_io.write.runs import Run
from fpformat_io.write.transfers import Stretches, TransferList, cut_transfers
from fpformat_io.write.volume import Volume, fall_back, preallocate
from fpformat_io.write.workers import Crew, Outcome, StagingRing, Target, os_error


class SegmentWriter:
    """An open segment, written from front to back in two lists of transfers.

    Attributes:
        volume: How it is written; changes when the volume refuses direct I/O.
        crc32c: Of what was written so far.
        calls: System calls that wrote so far.
    """

    def __init__(
        self,
        descriptor: int,
        path: str,
        *,
        volume: Volume,
        ring: StagingRing,
        geometry: Geometry,
        control: SaveControl,
    ) -> None:
        self._descriptor = descriptor
        self._control = control
        self._path = path
        self._ring = ring
        self._geometry = geometry
        self.volume = volume
        self.crc32c = 0
        self.calls = 0

    def write(
        self,
        layout: SegmentLayout,
        sources: Mapping[ShardKey, ShardSource],
        *,
        save_id: bytes,
        after_data: Callable[[], None],
    ) -> SegmentRecord:
        """Write the segment; the caller syncs it.

        Args:
            layout: What it holds, and where.
            sources: The bytes.
            save_id: Of the save.
            after_data: Called when no source will be read any more.

        Raises:
            CancelledError: The save was told to stop.
            WriteError: The operating system failed.
            PlanError: A source gave too few bytes.
        """
        runs = [Run.of(part, sources[part.key, part.box]) for part in layout.plan.parts]
        runs += [Run.of_bytes("object", payload) for payload in layout.payloads]
        if self.volume.mode == "direct":
            self._preallocate(layout.index_offset)
        head = Run.of_bytes("header", layout.header(save_id))
        pieces = self._write([head, *runs], [0, *layout.offsets], start=0, stop=layout.index_offset)
        after_data()
        # The header block is a stretch like the extents, but its pieces are in no table.
        head_pieces = -(-head.nbytes // self._geometry.piece_nbytes)
        end = layout.end(pieces[head_pieces:], save_id)
        self._write(
            [Run.of_bytes("index", end.index), Run.of_bytes("footer", end.footer)],
            [end.index_offset, end.index_offset + len(end.index)],
            start=end.index_offset,
            stop=end.nbytes,
        )
        return end.record(self.crc32c)

    def _preallocate(self, nbytes: int) -> None:
        try:
            preallocate(self._descriptor, nbytes)
        except OSError as error:
            raise WriteError(
                f"{self._path}: allocating {nbytes} bytes failed: {error.strerror}",
                path=self._path,
                offset=0,
                nbytes=nbytes,
                errno=error.errno or 0,
            ) from error

    def _write(
        self, runs: Sequence[Run], offsets: Sequence[int], *, start: int, stop: int
    ) -> list[int]:
        """Write bytes `start` to `stop` and return the checksums of the pieces of all runs."""
        stretches = Stretches.of(
            offsets,
            [run.nbytes for run in runs],
            [0 if run.memory is None else address_of(run.memory) for run in runs],
        )
        todo = self._cut(stretches, start=start, stop=stop)
        checksums, outcome = self._run(todo, stretches, runs)
        if outcome.errno == errno.EINVAL and self.volume.mode == "direct":
            # Nobody says before the first write what a volume really takes. Whatever was written
            # so far is right; writing it once more through the page cache is only time.
            reason = f"the volume refused a direct write at {outcome.offset}"
            self.volume = fall_back(self._descriptor, self.volume, reason)
            todo = self._cut(stretches, start=start, stop=stop)
            checksums, outcome = self._run(todo, stretches, runs)
        if outcome.errno:
            cause = os_error(outcome)
            where = f"{self._path}: writing {outcome.nbytes} bytes at {outcome.offset} failed"
            raise WriteError(
                f"{where}: {cause.strerror}",
                path=self._path,
                offset=outcome.offset,
                nbytes=outcome.nbytes,
                errno=outcome.errno,
            ) from cause
        return self._combine(todo, checksums)

    def _cut(self, stretches: Stretches, *, start: int, stop: int) -> TransferList:
        return cut_transfers(
            stretches,
            start=start,
            stop=stop,
            piece_nbytes=self._geometry.piece_nbytes,
            buffer_nbytes=self._ring.transfer_nbytes(self.volume),
            align=self._geometry.align,
            volume=self.volume,
        )

    def _combine(self, todo: TransferList, checksums: Row) -> list[int]:
        """Add all transfers to the checksum of the file; return those of the pieces."""
        sizes = np.ascontiguousarray(todo.fragments[:, FRAGMENT_NBYTES])
        pieces = np.zeros(todo.piece_count, dtype=np.int64)
        combine_runs(checksums[: len(sizes)], sizes, todo.piece_of, pieces)
        total = np.array([self.crc32c], dtype=np.int64)
        groups = np.zeros(len(todo.transfers), dtype=np.int64)
        whole = np.ascontiguousarray(todo.transfers[:, NBYTES])
        combine_runs(checksums[len(sizes) :], whole, groups, total)
        self.crc32c = int(total[0])
        piece_list: list[int] = pieces.tolist()
        return piece_list

    def _run(
        self, todo: TransferList, stretches: Stretches, runs: Sequence[Run]
    ) -> tuple[Row, Outcome]:
        """Write what lies in memory, and meanwhile read the rest; stop at the first error."""
        checksums = np.zeros(len(todo.fragments) + len(todo.transfers), dtype=np.int64)
        target = Target(descriptor=self._descriptor, volume=self.volume)
        # Named, so that its memory lives until the last worker has left.
        pulls = self._pulls(todo, stretches, runs)
        with Crew(target, self._ring, self._control) as crew:
            crew.start(todo.transfers[~todo.is_pulled], todo.fragments, checksums)
            for batch in pulls.batches() if pulls else ():
                outcome = crew.finish()
                if outcome.errno:
                    break
                crew.start(batch, todo.fragments, checksums)
            outcome = crew.finish()
        self.calls += outcome.calls
        return checksums, outcome

    def _pulls(self, todo: TransferList, stretches: Stretches, runs: Sequence[Run]) -> Pulls | None:
        if not todo.is_pulled.any():
            return None
        copier = copier_of(runs)
        memory = copier.memory(self._ring.pull_nbytes) if copier else self._ring.pull_memory()
        return Pulls(todo, stretches, runs, memory=memory, align=self._geometry.align)
