"""Sources that are no host memory, read into staging memory while what came before is written.

The memory has two halves: workers write from one while the next sources are read into the other.
A source that can put its bytes where they are wanted (`PullSource`) is spared a copy, and one that
does so in the background (a device) is waited for once for each half, not once for each tensor.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from fpformat.limits import round_up
from fpformat_io.native.columns import (
    ADDRESS,
    AT,
    COUNT,
    FIRST,
    FRAGMENT_NBYTES,
    IS_STRAIGHT,
    NBYTES,
    OFFSET,
    Table,
)
from fpformat_io.sources import Bytes, Copier, PullSource
from fpformat_io.write.aligned import address_of
from fpformat_io.write.runs import Run, check_size
from fpformat_io.write.transfers import Stretches, TransferList

HALF_COUNT: Final = 2


class Pulls:
    """The transfers of a list that have to be read first, half a memory at a time."""

    def __init__(
        self,
        todo: TransferList,
        stretches: Stretches,
        runs: Sequence[Run],
        *,
        memory: Bytes,
        align: int,
    ) -> None:
        """Prepare to read.

        Args:
            todo: The list; addresses of what is read are noted in its fragments.
            stretches: What the list was cut from.
            runs: The source of each stretch.
            memory: Where to; each half holds the largest transfer of the list.
            align: Block size of the segment; in memory transfers begin at its multiples, too.
        """
        self._todo = todo
        self._stretches = stretches
        self._runs = runs
        self._memory = memory
        self._address = address_of(memory)
        self._half_nbytes = len(memory) // HALF_COUNT // align * align
        self._align = align

    def batches(self) -> Iterator[Table]:
        """Yield transfers that were read; those of a batch must be written before the next but one.

        Raises:
            PlanError: A source gave too few bytes.
            Exception: What a source raises.
        """
        for number, batch in enumerate(self._split()):
            self._pull(batch, (number % HALF_COUNT) * self._half_nbytes)
            yield batch

    def _split(self) -> Iterator[Table]:
        """Cut the list where a half is full."""
        pulled = self._todo.transfers[self._todo.is_pulled]
        ends = np.cumsum([round_up(int(nbytes), to=self._align) for nbytes in pulled[:, NBYTES]])
        first = begin = 0
        while first < len(pulled):
            stop = int(np.searchsorted(ends, begin + self._half_nbytes, side="right"))
            assert stop > first, "a transfer is larger than half the memory"
            yield np.ascontiguousarray(pulled[first:stop])
            first, begin = stop, int(ends[stop - 1])

    def _pull(self, batch: Table, slot: int) -> None:
        copiers: dict[int, Copier] = {}
        try:
            for transfer in batch:
                self._pull_transfer(transfer, slot, copiers)
                slot += round_up(int(transfer[NBYTES]), to=self._align)
        finally:
            # Also after an error: a copy that goes on would write into memory that others have.
            for copier in copiers.values():
                copier.wait()

    def _pull_transfer(self, transfer: Table, slot: int, copiers: dict[int, Copier]) -> None:
        """Begin to read the sources of one transfer and note where their bytes will lie."""
        first, stop = transfer[FIRST], transfer[FIRST] + transfer[COUNT]
        fragments, owners = self._todo.fragments[first:stop], self._todo.stretch_of[first:stop]
        begins = np.flatnonzero(np.diff(owners, prepend=-1))
        taken = 0
        for begin, end in zip(begins, [*begins[1:], len(owners)], strict=True):
            run, stretch = self._runs[owners[begin]], owners[begin]
            if run.memory is not None:
                continue
            at = int(fragments[begin, AT])
            nbytes = int(fragments[end - 1, AT] + fragments[end - 1, FRAGMENT_NBYTES]) - at
            inside = int(transfer[OFFSET]) + at - int(self._stretches.offsets[stretch])
            target = self._memory[slot + at : slot + at + nbytes]
            _read(run, target, offset=run.shard_offset + inside, copiers=copiers)
            fragments[begin:end, ADDRESS] = self._address + slot + fragments[begin:end, AT]
            taken += nbytes
        transfer[IS_STRAIGHT] = taken == transfer[NBYTES]


def _read(run: Run, target: Bytes, *, offset: int, copiers: dict[int, Copier]) -> None:
    source = run.source
    if isinstance(source, PullSource):
        if source.copier is not None:
            copiers[id(source.copier)] = source.copier
        source.read_into(target, offset=offset)
        return
    view = source.read(offset=offset, nbytes=len(target))
    check_size(run.name, len(view), len(target))
    target[:] = np.frombuffer(view, np.uint8)


def copier_of(runs: Sequence[Run]) -> Copier | None:
    """Return the first copier among the sources: its memory is good for all of them."""
    for run in runs:
        copier = getattr(run.source, "copier", None)
        if copier is not None and run.memory is None:
            return copier  # type: ignore[no-any-return]
    return None
