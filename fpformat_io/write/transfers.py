"""From extents to transfers: which ranges of a segment are written at once, and from where.

Pure arithmetic on arrays. A **stretch** is a run of bytes with one source: the header block, an
extent, the index, the footer block. The range of the file that is to be written is cut into
transfers at multiples of the buffer size, and at both ends of every stretch that can be written
straight from its memory. Fragments are what the cuts of transfers and of pieces leave of the
stretches; everything between them is padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fpformat.limits import round_up
from fpformat_io.write.volume import Volume

Array = np.ndarray[Any, np.dtype[np.int64]]

# A stretch below this is packed with others: one more write costs more than copying it.
STRAIGHT_NBYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretches:
    """Runs of bytes in file order.

    Attributes:
        offsets: Position of each in the segment.
        nbytes: Size of each, at least 1.
        addresses: Where each lies in memory, 0 for one that has to be read piece by piece.
    """

    offsets: Array
    nbytes: Array
    addresses: Array

    @classmethod
    def of(
        cls, offsets: Sequence[int], nbytes: Sequence[int], addresses: Sequence[int]
    ) -> "Stretches":
        """Return the stretches of three sequences of equal length."""
        return cls(
            offsets=np.array(offsets, dtype=np.int64),
            nbytes=np.array(nbytes, dtype=np.int64),
            addresses=np.array(addresses, dtype=np.int64),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferList:
    """What `fpformat_io.native.kernels.run_transfers` works off.

    Attributes:
        transfers: Offset, nbytes, first fragment, number of fragments, whether to write straight,
            number.
        fragments: Address, nbytes, position in the transfer.
        stretch_of: The stretch of each fragment.
        piece_of: The piece of each fragment, counted over all stretches.
        piece_count: Number of pieces.
        is_pulled: For each transfer whether a fragment of it has no address yet.
    """

    transfers: Array
    fragments: Array
    stretch_of: Array
    piece_of: Array
    piece_count: int
    is_pulled: "np.ndarray[Any, np.dtype[np.bool_]]"


def cut_transfers(
    stretches: Stretches,
    *,
    start: int,
    stop: int,
    piece_nbytes: int,
    buffer_nbytes: int,
    align: int,
    volume: Volume,
) -> TransferList:
    """Cut bytes `start` to `stop` of a segment, both multiples of `align`, into transfers."""
    straight = _straight(stretches, align=align, volume=volume)
    bounds = _bounds(
        stretches, straight, start=start, stop=stop, buffer_nbytes=buffer_nbytes, align=align
    )
    piece_starts, piece_stops, stretch_of_piece = _pieces(stretches, piece_nbytes)
    points = np.unique(np.concatenate((piece_starts, bounds[:-1])))
    piece_of = np.searchsorted(piece_starts, points, side="right") - 1
    if len(piece_starts):
        inside = (piece_of >= 0) & (points < piece_stops[piece_of])
    else:
        inside = np.zeros(len(points), dtype=bool)
    ends = np.append(points[1:], stop)[inside]
    points, piece_of = points[inside], piece_of[inside]
    ends = np.minimum(ends, piece_stops[piece_of])
    stretch_of = stretch_of_piece[piece_of]
    transfer_of = np.searchsorted(bounds, points, side="right") - 1
    shifts = points - stretches.offsets[stretch_of]
    sources = stretches.addresses[stretch_of]
    addresses = np.where(sources > 0, sources + shifts, 0)
    fragments = np.stack((addresses, ends - points, points - bounds[transfer_of]), axis=1)
    firsts = np.searchsorted(points, bounds)
    starts, counts = bounds[:-1], np.diff(firsts)
    transfers = np.zeros((len(starts), 6), dtype=np.int64)
    transfers[:, 0], transfers[:, 1] = starts, np.diff(bounds)
    transfers[:, 2], transfers[:, 3] = firsts[:-1], counts
    transfers[:, 5] = np.arange(len(starts))
    transfers[:, 4] = _is_whole(stretches, straight, transfers)
    pulled = np.zeros(len(starts), dtype=bool)
    pulled[transfer_of[sources == 0]] = True
    return TransferList(
        transfers=transfers,
        fragments=np.ascontiguousarray(fragments, dtype=np.int64),
        stretch_of=stretch_of,
        piece_of=piece_of,
        piece_count=len(piece_starts),
        is_pulled=pulled,
    )


def _straight(stretches: Stretches, *, align: int, volume: Volume) -> Array:
    """Return the stretches whose whole blocks the volume takes from where they lie."""
    fits = (stretches.addresses > 0) & (stretches.nbytes >= max(STRAIGHT_NBYTES, align))
    fits &= (stretches.addresses % volume.memory_align == 0) & (stretches.offsets % align == 0)
    return np.flatnonzero(fits)


def _bounds(
    stretches: Stretches,
    straight: Array,
    *,
    start: int,
    stop: int,
    buffer_nbytes: int,
    align: int,
) -> Array:
    regular = np.arange(round_up(start + 1, to=buffer_nbytes), stop, buffer_nbytes)
    begins = stretches.offsets[straight]
    ends = (begins + stretches.nbytes[straight]) // align * align
    return np.unique(np.concatenate(([start, stop], regular, begins, ends))).astype(np.int64)


def _pieces(stretches: Stretches, piece_nbytes: int) -> tuple[Array, Array, Array]:
    """Return start and stop of each piece in the file, and its stretch."""
    counts = -(-stretches.nbytes // piece_nbytes)
    stretch_of = np.repeat(np.arange(len(counts)), counts)
    firsts = np.cumsum(counts) - counts
    within = (np.arange(len(stretch_of)) - firsts[stretch_of]) * piece_nbytes
    starts = stretches.offsets[stretch_of] + within
    sizes = np.minimum(piece_nbytes, stretches.nbytes[stretch_of] - within)
    return starts, starts + sizes, stretch_of


def _is_whole(
    stretches: Stretches, straight: Array, transfers: Array
) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """Return for each transfer whether it lies inside one stretch that can be written straight."""
    if not len(straight):
        return np.zeros(len(transfers), dtype=bool)
    begins = stretches.offsets[straight]
    stops = begins + stretches.nbytes[straight]
    place = np.searchsorted(begins, transfers[:, 0], side="right") - 1
    ends = transfers[:, 0] + transfers[:, 1]
    return (place >= 0) & (ends <= stops[place])
