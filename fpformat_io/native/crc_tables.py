"""Tables for CRC-32C in kernels, made from `fpformat.records.checksum.combine`.

All are operators on a CRC state: appending n zero bytes is a linear map, so the table for a byte
of the state is made of eight columns.
"""

from typing import Any, Final

import numpy as np

from fpformat.records.checksum import combine

Array = np.ndarray[Any, np.dtype[np.int64]]

LONG_LANE_NBYTES: Final = 8192
SHORT_LANE_NBYTES: Final = 256


def _columns(zero_nbytes: int) -> list[int]:
    return [combine(1 << bit, 0, second_nbytes=zero_nbytes) for bit in range(32)]


def _by_byte(columns: list[int]) -> Array:
    """Return the operator as four tables, one for each byte of the state."""
    tables = np.zeros((4, 256), dtype=np.int64)
    values = np.arange(256)
    for bit, column in enumerate(columns):
        tables[bit // 8][values >> bit % 8 & 1 == 1] ^= column
    return tables


def lane_tables() -> Array:
    """Return the operators that append one long and one short lane of zeros: (2, 4, 256)."""
    lanes = (LONG_LANE_NBYTES, SHORT_LANE_NBYTES)
    return np.stack([_by_byte(_columns(nbytes)) for nbytes in lanes])


def word_tables() -> Array:
    """Return the states after one byte and 0 to 7 zero bytes, for the way without instruction."""
    return np.stack([_by_byte(_columns(count + 1))[0] for count in range(8)])


def power_columns() -> Array:
    """Return the operators that append 2**k zero bytes, k = 0 to 52, as columns: (53, 32)."""
    return np.array([_columns(1 << power) for power in range(53)], dtype=np.int64)
