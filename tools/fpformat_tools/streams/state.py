"""The state between an input and an output: a tree, strided tensors, storages to read from.

Every input becomes a `State`; every output is written from one. A tensor is a view of a storage,
as in torch, so that what shares memory in the input can share it in the output. No bytes are held
here: storages are read while the output is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final, Protocol

from fpformat.dtypes import DType
from fpformat.names import Path
from fpformat.records.layout import c_strides
from fpformat.records.nodes import Node

PYTORCH: Final = "pt"
"""What safetensors calls torch."""


class Storage(Protocol):
    """Where tensors' bytes lie."""

    @property
    def nbytes(self) -> int:
        """The length in bytes."""
        ...

    def read_at(self, *, offset: int, nbytes: int) -> "bytes | memoryview":
        """Return exactly `nbytes` bytes from `offset`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A view of a storage; strides and offset count elements of the tensor's own type.

    Attributes:
        base: Position of the storage in `State.storages`.
    """

    base: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether it has no elements."""
        return 0 in self.shape

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie one after another in C order."""
        return all(
            dim == 1 or stride == expected
            for dim, stride, expected in zip(
                self.shape, self.strides, c_strides(self.shape), strict=True
            )
        )

    @property
    def nbytes(self) -> int:
        """Logical size: elements times element size."""
        return prod(self.shape) * self.dtype.nbytes

    @property
    def reach(self) -> tuple[int, int]:
        """First byte of the storage that the tensor uses, and the one after the last."""
        start = self.offset * self.dtype.nbytes
        if self.is_empty:
            return start, start
        last = sum((dim - 1) * stride for dim, stride in zip(self.shape, self.strides, strict=True))
        return start, start + (last + 1) * self.dtype.nbytes


@dataclass(slots=True, kw_only=True)
class State:
    """A whole model or training state.

    Attributes:
        where: The input, for messages.
        node: The tree; its references count through `tensors`.
        user: Strings that belong to the state as a whole.
        step: Training step, if known.
        framework: What the format of the input belongs to, as safetensors names it (`PYTORCH`).
        warnings: What was tolerated or changed on the way in.
        problems: Values of the input that have no form and are not in the tree: path and reason.
        beside: What the input holds beside this state, such as states of other ranks.
    """

    where: str
    node: Node
    tensors: Sequence[Tensor]
    storages: Sequence[Storage]
    user: dict[str, str] = field(default_factory=dict)
    step: int | None = None
    framework: str | None = None
    warnings: list[str] = field(default_factory=list)
    problems: list[tuple[Path, str]] = field(default_factory=list)
    beside: tuple[str, ...] = ()


def whole(*, base: int, dtype: DType, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor that fills a storage from its first byte in C order."""
    return Tensor(base=base, dtype=dtype, shape=shape, strides=c_strides(shape))
