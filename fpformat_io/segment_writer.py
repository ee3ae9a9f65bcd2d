"""One segment written by the engine: header, extents, index and footer, all by transfers.

The checksum of the whole file and those of pieces are combined from the checksums of fragments;
nothing is read twice.
"""

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fpformat.assemble import IndexAssembly
from fpformat.errors import PlanError
from fpformat.layout import place_extents
from fpformat.limits import round_up
from fpformat.manifest import feature_words
from fpformat.model import (
    Features,
    Geometry,
    Part,
    SegmentPlan,
    SegmentRecord,
    ShardKey,
    ShardSource,
)
from fpformat.source import BytesSource
from fpformat.wire import Footer, Header, dump_footer, dump_header
from fpformat_io.aligned import address_of
from fpformat_io.control import SaveControl
from fpformat_io.errors import WriteError
from fpformat_io.kernels import (
    ADDRESS,
    AT,
    COUNT,
    FIRST,
    FRAGMENT_NBYTES,
    IS_STRAIGHT,
    NBYTES,
    OFFSET,
    Row,
    Table,
    combine_runs,
)
from fpformat_io.transfers import Stretches, TransferList, cut_transfers
from fpformat_io.volume import Volume, fall_back, preallocate
from fpformat_io.workers import Outcome, StagingRing, Target, os_error, run_workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The source of a stretch: which bytes of which shard, and where they lie, if in memory.

    Attributes:
        memory: The bytes; None when they have to be read.
    """

    name: str
    source: ShardSource
    shard_offset: int
    nbytes: int
    memory: memoryview | None

    @classmethod
    def of(cls, part: Part, source: ShardSource) -> "Run":
        """Return the run of a plan's part; PlanError when its memory is too short.

        A source may have an attribute ``buffer``: the bytes of the whole shard where they lie, or
        None when they have to be read.
        """
        memory: memoryview | None = getattr(source, "buffer", None)
        if memory is not None:
            memory = memory[part.shard_offset : part.shard_offset + part.nbytes]
            _check_size(part.key[0], len(memory), part.nbytes)
        return cls(
            name=part.key[0],
            source=source,
            shard_offset=part.shard_offset,
            nbytes=part.nbytes,
            memory=memory,
        )

    @classmethod
    def of_bytes(cls, name: str, memory: bytes) -> "Run":
        """Return the run of all bytes of an object in memory."""
        source = BytesSource(memory)
        return cls(
            name=name, source=source, shard_offset=0, nbytes=len(memory), memory=source.buffer
        )


def _check_size(name: str, found: int, expected: int) -> None:
    if found != expected:
        raise PlanError(f"{name!r}: its source gave {found} of {expected} bytes")


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
        plan: SegmentPlan,
        sources: Mapping[ShardKey, ShardSource],
        *,
        ordinal: int,
        save_id: bytes,
        after_data: Callable[[], None],
    ) -> SegmentRecord:
        """Write the segment; the caller syncs it.

        Args:
            plan: What it holds.
            sources: The bytes.
            ordinal: Its number.
            save_id: Of the save.
            after_data: Called when no source will be read any more.

        Raises:
            CancelledError: The save was told to stop.
            WriteError: The operating system failed.
            PlanError: A source gave too few bytes.
        """
        geometry = self._geometry
        incompat, ro_compat, compat = feature_words(Features())
        header = Header(
            ordinal=ordinal,
            save_id=save_id,
            geometry=geometry,
            incompat=incompat,
            ro_compat=ro_compat,
            compat=compat,
        )
        runs = [Run.of(part, sources[part.key, part.box]) for part in plan.parts]
        runs += [Run.of_bytes(entry.name, entry.payload) for entry in plan.objects if entry.payload]
        offsets, index_offset = place_extents([run.nbytes for run in runs], geometry)
        if self.volume.mode == "direct":
            self._preallocate(index_offset)
        head = dump_header(header)
        head_run = Run.of_bytes("header", head)
        pieces = self._write([head_run, *runs], [0, *offsets], start=0, stop=index_offset)
        after_data()
        # The header block is a stretch like the extents, but its pieces are in no table.
        head_pieces = -(-len(head) // geometry.piece_nbytes)
        index, index_sha256 = IndexAssembly(plan, geometry).dump(offsets, pieces[head_pieces:])
        nbytes = index_offset + len(index) + geometry.align
        footer = dump_footer(
            Footer(
                index_offset=index_offset,
                index_nbytes=len(index),
                index_sha256=index_sha256,
                save_id=save_id,
                segment_nbytes=nbytes,
                ordinal=ordinal,
            ),
            align=geometry.align,
        )
        self._write(
            [Run.of_bytes("index", index), Run.of_bytes("footer", footer)],
            [index_offset, index_offset + len(index)],
            start=index_offset,
            stop=nbytes,
        )
        return SegmentRecord(
            nbytes=nbytes,
            index_offset=index_offset,
            index_nbytes=len(index),
            index_sha256=index_sha256,
            crc32c=self.crc32c,
        )

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
        """Write what lies in memory, then what has to be read; stop at the first error."""
        checksums = np.zeros(len(todo.fragments) + len(todo.transfers), dtype=np.int64)
        ready = todo.transfers[~todo.is_pulled]
        outcome = self._run_rows(ready, todo.fragments, checksums)
        for batch in self._batches(todo):
            if outcome.errno:
                break
            self._pull(batch, todo, stretches, runs)
            outcome = self._run_rows(batch, todo.fragments, checksums)
        return checksums, outcome

    def _run_rows(self, transfers: Table, fragments: Table, checksums: Row) -> Outcome:
        target = Target(descriptor=self._descriptor, volume=self.volume)
        outcome = run_workers(
            transfers, fragments, checksums, target=target, ring=self._ring, control=self._control
        )
        self.calls += outcome.calls
        return outcome

    def _batches(self, todo: TransferList) -> Iterator[Table]:
        """Yield the transfers that have to be read, as many at once as there is memory for."""
        pulled = todo.transfers[todo.is_pulled]
        size = max(self._ring.pull_nbytes // self._ring.transfer_nbytes(self.volume), 1)
        for first in range(0, len(pulled), size):
            yield np.ascontiguousarray(pulled[first : first + size])

    def _pull(
        self, batch: Table, todo: TransferList, stretches: Stretches, runs: Sequence[Run]
    ) -> None:
        """Read the sources of some transfers into staging memory and note the addresses."""
        slot = 0
        for transfer in batch:
            first, stop = transfer[FIRST], transfer[FIRST] + transfer[COUNT]
            fragments, owners = todo.fragments[first:stop], todo.stretch_of[first:stop]
            begins = np.flatnonzero(np.diff(owners, prepend=-1))
            taken = 0
            for begin, end in zip(begins, [*begins[1:], len(owners)], strict=True):
                run, stretch = runs[owners[begin]], owners[begin]
                if run.memory is not None:
                    continue
                at = int(fragments[begin, AT])
                nbytes = int(fragments[end - 1, AT] + fragments[end - 1, FRAGMENT_NBYTES]) - at
                inside = int(transfer[OFFSET]) + at - int(stretches.offsets[stretch])
                view = run.source.read(offset=run.shard_offset + inside, nbytes=nbytes)
                _check_size(run.name, len(view), nbytes)
                self._ring.pull_view(slot + at, nbytes)[:] = np.frombuffer(view, np.uint8)
                fragments[begin:end, ADDRESS] = (
                    self._ring.pull_address + slot + fragments[begin:end, AT]
                )
                taken += nbytes
            transfer[IS_STRAIGHT] = taken == transfer[NBYTES]
            slot += round_up(int(transfer[NBYTES]), to=self._geometry.align)
