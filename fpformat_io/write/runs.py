"""Which bytes of which source a stretch of a segment holds."""

from dataclasses import dataclass

from fpformat.errors import PlanError
from fpformat.read.source import BytesSource
from fpformat.records.model import Part, ShardSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The source of a stretch: which bytes of which shard, and where they lie, if in memory.

    Attributes:
        memory: The bytes; None when they have to be read.
    """

    name: str
    source: ShardSource
    shard_offset: int
    nbytes: int
    memory: memoryview | None

    @classmethod
    def of(cls, part: Part, source: ShardSource) -> "Run":
        """Return the run of a plan's part; PlanError when its memory is too short.

        A source may have an attribute ``buffer``: the bytes of the whole shard where they lie, or
        None when they have to be read.
        """
        memory: memoryview | None = getattr(source, "buffer", None)
        if memory is not None:
            memory = memory[part.shard_offset : part.shard_offset + part.nbytes]
            check_size(part.key[0], len(memory), part.nbytes)
        return cls(
            name=part.key[0],
            source=source,
            shard_offset=part.shard_offset,
            nbytes=part.nbytes,
            memory=memory,
        )

    @classmethod
    def of_bytes(cls, name: str, memory: bytes) -> "Run":
        """Return the run of all bytes of an object in memory."""
        source = BytesSource(memory)
        return cls(
            name=name, source=source, shard_offset=0, nbytes=len(memory), memory=source.buffer
        )


def check_size(name: str, found: int, expected: int) -> None:
    """Raise PlanError when a source gave another number of bytes than asked for."""
    if found != expected:
        raise PlanError(f"{name!r}: its source gave {found} of {expected} bytes")
