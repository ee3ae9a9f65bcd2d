"""The arrays that kernels work on: their types, their columns, and the cells that workers share.

Apart from the kernels, because whoever fills such an array, or only names what lies in one, must
not import numba for it.
"""

from typing import Final, TypeAlias

import numpy as np

from fpformat_io.native.crc_tables import Array

Row: TypeAlias = Array
Table: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.int64]]

# Columns of `transfers` and `fragments`.
OFFSET, NBYTES, FIRST, COUNT, IS_STRAIGHT, NUMBER = 0, 1, 2, 3, 4, 5
TRANSFER_COLUMNS: Final = 6
ADDRESS, FRAGMENT_NBYTES, AT = 0, 1, 2
# Cells of `shared`.
(
    SELF,
    DESCRIPTOR,
    PWRITE,
    ERRNO_LOCATION,
    SYNC_RANGE,
    SYNC_FLAGS,
    WRITE_ALIGN,
    CURSOR,
    STOP,
    DONE_NBYTES,
    CALLS,
    ERRNO,
    ERROR_OFFSET,
    ERROR_NBYTES,
) = range(14)
SHARED_CELLS: Final = 16
