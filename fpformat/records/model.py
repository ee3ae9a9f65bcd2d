"""The frozen records that the other modules exchange. No bytes and no files here."""

from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol, TypeAlias

from fpformat.dtypes import DType
from fpformat.limits import DEFAULT_ALIGN, DEFAULT_PIECE, DEFAULT_TENSOR_ALIGN

Shape: TypeAlias = tuple[int, ...]
TensorKey: TypeAlias = tuple[str, int | None]
"""Name and scope: the scope is None for a global tensor, otherwise the rank it belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangular part of a tensor: first index and number of indices per dimension."""

    start: Shape
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How an alias looks at its target: strides and offset in elements of its own dtype."""

    target: TensorKey
    strides: Shape
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a segment's table: own bytes, or an alias of another entry.

    Attributes:
        name: See `fpformat.names.name_of`.
        dtype: Registered data type.
        shape: Shape of the whole tensor, not of the part in this segment.
        scope: None, or the rank that the tensor belongs to.
        alias: None for own bytes; a key for the same tensor under another name; a `View`.
        hidden: The entry is only the base of views and stands in no tree.
    """

    name: str
    dtype: DType
    shape: Shape
    scope: int | None = None
    alias: TensorKey | View | None = None
    hidden: bool = False

    @property
    def key(self) -> TensorKey:
        """Name and scope."""
        return (self.name, self.scope)

    @property
    def nbytes(self) -> int:
        """Logical size in bytes."""
        return prod(self.shape) * self.dtype.nbytes

    @property
    def target(self) -> TensorKey | None:
        """Key of the entry that owns the bytes, None when this one does."""
        return self.alias.target if isinstance(self.alias, View) else self.alias


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectEntry:
    """State that is no tensor: a tree (`kind` 1) or plain bytes (`kind` 2).

    Attributes:
        ranks: Half-open ranges of the ranks that a tree with a scope belongs to.
    """

    name: str
    kind: int
    payload: bytes
    scope: int | None = None
    ranks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one extent will hold: bytes of one box of one tensor.

    Attributes:
        key: The tensor.
        box: The shard; None when it is the whole tensor.
        shard_offset: Position in the shard's bytes (C order).
        nbytes: Number of bytes, at least 1.
    """

    key: TensorKey
    box: Box | None
    shard_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPlan:
    """Everything that one writer puts into one segment, in file order of `parts`.

    Objects follow the tensors' parts, in the order of their names.
    """

    entries: tuple[TensorEntry, ...]
    parts: tuple[Part, ...]
    objects: tuple[ObjectEntry, ...] = ()

    @property
    def data_nbytes(self) -> int:
        """Bytes of the parts and the objects, without padding and index."""
        parts = sum(part.nbytes for part in self.parts)
        return parts + sum(len(entry.payload) for entry in self.objects)


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The three powers of two of a segment, in bytes: block A, small tensors T, piece P."""

    align: int = DEFAULT_ALIGN
    tensor_align: int = DEFAULT_TENSOR_ALIGN
    piece_nbytes: int = DEFAULT_PIECE


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Named features, each tuple sorted."""

    incompat: tuple[str, ...] = ()
    ro_compat: tuple[str, ...] = ()
    compat: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """An addition to the manifest; `content` is any value of the canonical JSON profile."""

    name: str
    must_understand: bool
    content: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRecord:
    """What the manifest says of one segment."""

    nbytes: int
    index_offset: int
    index_nbytes: int
    index_sha256: bytes
    crc32c: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The commit record of a checkpoint.

    Attributes:
        created_us: Microseconds since 1970-01-01 UTC; informative.
        step: Training step, or None.
        user: The caller's strings.
        world_size: Number of ranks at save time.
    """

    save_id: bytes
    segments: tuple[SegmentRecord, ...]
    created_us: int
    step: int | None = None
    user: dict[str, str] = field(default_factory=dict)
    world_size: int = 1
    features: Features = field(default_factory=Features)
    extensions: tuple[Extension, ...] = ()
    version: tuple[int, int] = (1, 0)


class ShardSource(Protocol):
    """Where the bytes of one shard come from."""

    def read(self, *, offset: int, nbytes: int) -> memoryview:
        """Return `nbytes` bytes of the shard (C order) from `offset`; valid until the next call."""
        ...


ShardKey: TypeAlias = tuple[TensorKey, Box | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """What a whole save will hold: one plan per segment, and the manifest's own values."""

    segments: tuple[SegmentPlan, ...]
    step: int | None = None
    user: dict[str, str] = field(default_factory=dict)
    world_size: int = 1
    geometry: Geometry = field(default_factory=Geometry)
    extensions: tuple[Extension, ...] = ()
