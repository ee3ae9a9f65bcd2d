"""Helpers for checking tables in bulk: whole columns at a time, never record by record."""

from collections.abc import Iterator
from operator import lt
from typing import Final

import numpy as np

from fpformat.dtypes import DTYPES
from fpformat.limits import MAX_INT
from fpformat.records.index import FLAG_VIEW, Array, SegmentIndex

ELEMENT_NBYTES: Final = np.zeros(max(DTYPES) + 1, dtype=np.uint64)
for _code, _dtype in DTYPES.items():
    ELEMENT_NBYTES[_code] = _dtype.nbytes


def first_true(bad: Array) -> int | None:
    """Return the position of the first true value, or None."""
    return int(np.argmax(bad)) if bad.any() else None


def running(lengths: Array) -> Array:
    """Return where each run of a gapless sequence starts, and last where it ends."""
    ends = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=ends[1:])
    return ends


def first_out_of_order(names: list[str], scopes: Array) -> int | None:
    """Return the first record not above its predecessor by (name, scope), or None."""
    if all(map(lt, names, names[1:])):
        return None
    pairs = list(zip(names, scopes.tolist(), strict=True))
    return next((i for i in range(1, len(pairs)) if pairs[i - 1] >= pairs[i]), None)


def by_ndim(ndim: Array, rows: Array) -> Iterator[tuple[int, Array]]:
    """Split `rows` into groups of equal number of dimensions."""
    for value in np.unique(ndim[rows]):
        yield int(value), rows[ndim[rows] == value]


def dims_rows(index: SegmentIndex, starts: Array, ndim: int) -> Array:
    """Return one row of `ndim` values of the dims table for each start."""
    positions = starts.astype(np.int64)[:, None] + np.arange(ndim)
    values: Array = index.tables.dims[positions]
    return values


def products(sizes: Array, itemsize: Array) -> tuple[Array, Array]:
    """Return the products of each row's non-zero sizes in bytes, and where they overflow."""
    product = itemsize.astype(np.uint64)
    bad = np.zeros(len(sizes), dtype=bool)
    for column in sizes.T:
        factor = np.maximum(column, 1)
        bad |= factor > MAX_INT // product
        product = np.where(bad, 1, product * np.where(bad, 1, factor))
    return product, bad


def tensor_title(index: SegmentIndex, where: str, row: int) -> str:
    """Return the place of a tensor record, for messages."""
    return f"{where}: tensor {index.names[row]!r} (record {row})"


def extent_title(where: str, row: int) -> str:
    """Return the place of an extent record, for messages."""
    return f"{where}: extent record {row}"


def is_view(tensors: Array) -> Array:
    """Return which tensor records are views."""
    view: Array = (tensors["flags"] & FLAG_VIEW).astype(bool)
    return view
