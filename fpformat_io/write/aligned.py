"""Aligned host memory: anonymous mappings in huge pages, and the addresses of buffers.

Huge pages, because a direct write pins its memory page by page: measured, staging memory in pages
of 4 KiB halves the bandwidth. They are a request to the kernel; without them all works, slower.
"""

import mmap
from contextlib import suppress
from typing import Any, Final

import numpy as np

from fpformat.limits import round_up
from fpformat_io.errors import StagingError

HUGE_PAGE_NBYTES: Final = 2 * 1024 * 1024


class AlignedMemory:
    """Zeroed private memory that begins at a multiple of 2 MiB; it goes with the object.

    Attributes:
        address: Where it begins.
        nbytes: Its size.
    """

    def __init__(self, nbytes: int) -> None:
        """Map at least `nbytes`; pages are only taken when they are touched.

        Raises:
            StagingError: There is not enough memory.
        """
        self.nbytes = round_up(max(nbytes, 1), to=HUGE_PAGE_NBYTES)
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._mapping = mmap.mmap(-1, self.nbytes + HUGE_PAGE_NBYTES, flags=flags)
        except (OSError, MemoryError) as error:
            raise StagingError(
                f"mapping {nbytes} bytes of staging memory failed: {error}"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        start = address_of(self._mapping)
        self._skip = round_up(start, to=HUGE_PAGE_NBYTES) - start
        self.address = start + self._skip

    def view(self, offset: int, nbytes: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """Return a part of the memory as an array, which keeps the memory alive."""
        return np.frombuffer(self._mapping, np.uint8, nbytes, self._skip + offset)


def address_of(buffer: Any) -> int:
    """Return the address of the first byte of a C-contiguous buffer."""
    array = np.frombuffer(buffer, dtype=np.uint8)
    address: int = array.__array_interface__["data"][0]
    return address
