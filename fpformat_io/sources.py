"""What the engine asks of sources that are no host memory.

A source that can put its bytes where they are wanted is spared a copy, and one that does so in the
background, as from a device, is waited for once for many tensors.
"""

from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


class Copier(Protocol):
    """Copies bytes into host memory in the background of the thread that asks for it."""

    def memory(self, nbytes: int) -> Bytes:
        """Return writable memory that it copies into best; valid as long as the array lives."""
        ...

    def wait(self) -> None:
        """Return when all copies that were begun have arrived.

        Raises:
            Exception: A copy failed; nothing that was begun may be used.
        """
        ...


@runtime_checkable
class PullSource(Protocol):
    """A source that puts its bytes where they are wanted.

    Attributes:
        copier: Who has to be waited for; None when the bytes are there as `read_into` returns.
    """

    copier: Copier | None

    def read_into(self, target: Bytes, *, offset: int) -> None:
        """Fill `target` with bytes of the shard from `offset`, now or by the next `wait`."""
        ...
