"""Cutting into transfers: every byte once, aligned, and padding only where nothing lies."""

import numpy as np
import pytest
from engine_cases import MIB
from hypothesis import given
from hypothesis import strategies as st

from fpformat import Geometry
from fpformat.records.layout import place_extents
from fpformat_io.write.aligned import HUGE_PAGE_NBYTES, AlignedMemory, address_of
from fpformat_io.write.transfers import Stretches, cut_transfers
from fpformat_io.write.volume import Volume, buffered

DIRECT = Volume(mode="direct", memory_align=512, offset_align=512, reason="test")


@st.composite
def layouts(draw):
    sizes = draw(st.lists(st.integers(1, 3 * MIB) | st.integers(1, 9000), max_size=8))
    align = draw(st.sampled_from([4096, 65536]))
    offsets, stop = place_extents(sizes, Geometry(align=align))
    places = st.sampled_from([0, 4096 * 1000, 64 + 4096 * 9])
    addresses = [draw(places) for _ in sizes]
    return Stretches.of(offsets, sizes, addresses), stop, align


@given(layouts(), st.sampled_from([16384, 262144]), st.sampled_from([DIRECT, buffered("test")]))
def test_fragments_tile_the_stretches(layout, piece_nbytes, volume):
    stretches, stop, align = layout
    todo = cut_transfers(
        stretches,
        start=align,
        stop=stop,
        piece_nbytes=piece_nbytes,
        buffer_nbytes=2 * MIB,
        align=align,
        volume=volume,
    )
    position = align
    seen = [0] * len(stretches.offsets)
    pieces = {}
    for number, (offset, nbytes, first, count, is_straight, own) in enumerate(
        todo.transfers.tolist()
    ):
        assert (offset, own) == (position, number)
        assert 0 < nbytes <= 2 * MIB
        assert offset % align == 0
        assert nbytes % align == 0
        position += nbytes
        end = 0
        for index in range(first, first + count):
            address, size, at = todo.fragments[index].tolist()
            owner = todo.stretch_of[index]
            assert at >= end
            assert offset + at == stretches.offsets[owner] + seen[owner]
            if stretches.addresses[owner]:
                assert address == stretches.addresses[owner] + seen[owner]
            assert bool(stretches.addresses[owner]) or todo.is_pulled[number]
            pieces.setdefault(int(todo.piece_of[index]), []).append((int(owner), seen[owner], size))
            seen[owner] += size
            end = at + size
        assert end <= nbytes
        if is_straight:
            assert end == nbytes == todo.fragments[first : first + count, 1].sum()
            assert todo.fragments[first, 0] % volume.memory_align == 0
    assert position == stop
    assert seen == stretches.nbytes.tolist()
    assert len(pieces) == todo.piece_count
    for parts in pieces.values():
        owner, start, _ = parts[0]
        assert start % piece_nbytes == 0
        whole = min(piece_nbytes, int(stretches.nbytes[owner]) - start)
        assert sum(size for _, _, size in parts) == whole


def test_large_aligned_memory_is_written_straight():
    stretches = Stretches.of([4096], [5 * MIB + 100], [4096])
    todo = cut_transfers(
        stretches,
        start=0,
        stop=4096 + 5 * MIB + 4096,
        piece_nbytes=262144,
        buffer_nbytes=2 * MIB,
        align=4096,
        volume=DIRECT,
    )
    straight = todo.transfers[:, 4] == 1
    assert todo.transfers[straight, 1].sum() == 5 * MIB
    assert (todo.transfers[~straight, 1] == 4096).all()


@pytest.mark.parametrize("nbytes", [1, 4096, HUGE_PAGE_NBYTES, 3 * HUGE_PAGE_NBYTES + 1])
def test_memory_is_aligned_and_zero(nbytes):
    memory = AlignedMemory(nbytes)
    assert memory.nbytes >= nbytes
    assert memory.address % HUGE_PAGE_NBYTES == 0
    view = memory.view(0, nbytes)
    assert address_of(view) == memory.address
    assert not view.any()
    view[:] = 7
    del memory
    assert (np.asarray(view) == 7).all()
