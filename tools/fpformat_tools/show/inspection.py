"""What a checkpoint holds, counted from its tables without reading tensor bytes."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np

from fpformat.dtypes import DTYPES
from fpformat.limits import NONE
from fpformat.names import segment_name
from fpformat.read.reader import Checkpoint
from fpformat.read.segment import Segment
from fpformat.records.index import FLAG_HIDDEN, FLAG_VIEW, OWNER_OBJECT
from fpformat.records.model import TensorEntry, TensorKey, View


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeCount:
    """Tensors of one data type that own bytes."""

    name: str
    tensor_count: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentShare:
    """How a segment divides its bytes."""

    name: str
    nbytes: int
    extent_count: int
    data_nbytes: int
    padding_nbytes: int
    index_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts over the whole checkpoint.

    Attributes:
        tensor_count: Names in the state; hidden bases are not counted.
        nbytes: Stored bytes of tensors, each tie once.
        logical_nbytes: Of every name by itself, in the order of the tables.
    """

    tensor_count: int
    alias_count: int
    view_count: int
    hidden_count: int
    object_count: int
    nbytes: int
    dtypes: tuple[DtypeCount, ...]
    segments: tuple[SegmentShare, ...]
    logical_nbytes: dict[TensorKey, int]


def share_of(segment: Segment, *, nbytes: int) -> SegmentShare:
    """Return how a segment of `nbytes` divides its bytes."""
    extents = segment.index.tables.extents
    align = segment.header.geometry.align
    stored = int(extents["stored_nbytes"].sum())
    index_offset = segment.footer.index_offset
    return SegmentShare(
        name=segment_name(segment.place.ordinal),
        nbytes=nbytes,
        extent_count=len(extents),
        data_nbytes=stored,
        padding_nbytes=index_offset - align - stored,
        index_nbytes=nbytes - index_offset - align,
    )


def count(checkpoint: Checkpoint) -> Totals:
    """Return the totals of an open checkpoint."""
    keys: dict[TensorKey, int] = {}
    owned: dict[int, list[int]] = {}
    aliases = views = hidden = objects = 0
    for segment in checkpoint.segments:
        tensors = segment.index.tables.tensors
        fresh = np.fromiter((key not in keys for key in segment.keys), bool, len(tensors))
        flags, target = tensors["flags"], tensors["target"]
        shown = fresh & (flags & FLAG_HIDDEN == 0)
        names = [key for key, ours in zip(segment.keys, shown.tolist(), strict=True) if ours]
        keys.update(zip(names, tensors["nbytes"][shown].tolist(), strict=True))
        views += int(np.count_nonzero(shown & (flags & FLAG_VIEW != 0)))
        aliases += int(np.count_nonzero(shown & (target != NONE) & (flags & FLAG_VIEW == 0)))
        hidden += int(np.count_nonzero(fresh & (flags & FLAG_HIDDEN != 0)))
        objects += len(segment.index.tables.objects)
        own = fresh & (target == NONE)
        for code in np.unique(tensors["dtype"][own]).tolist():
            chosen = own & (tensors["dtype"] == code)
            found = owned.setdefault(code, [0, 0])
            found[0] += int(np.count_nonzero(chosen))
            found[1] += int(tensors["nbytes"][chosen].sum())
    records = checkpoint.manifest.segments
    return Totals(
        tensor_count=len(keys),
        alias_count=aliases,
        view_count=views,
        hidden_count=hidden,
        object_count=objects,
        nbytes=sum(nbytes for _, nbytes in owned.values()),
        dtypes=tuple(
            DtypeCount(name=DTYPES[code].name, tensor_count=tensors, nbytes=nbytes)
            for code, (tensors, nbytes) in sorted(owned.items(), key=lambda pair: -pair[1][1])
        ),
        segments=tuple(
            share_of(segment, nbytes=record.nbytes)
            for segment, record in zip(checkpoint.segments, records, strict=True)
        ),
        logical_nbytes=keys,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtentPlace:
    """Where an extent lies and what it holds."""

    offset: int
    nbytes: int
    padding_nbytes: int
    title: str


def extents_of(segment: Segment) -> Iterator[ExtentPlace]:
    """Yield the extents of a segment in file order, each with the padding before it."""
    tables = segment.index.tables
    end = segment.header.geometry.align
    for record in tables.extents:
        offset, stored = int(record["offset"]), int(record["stored_nbytes"])
        owner = int(record["owner"])
        if record["owner_kind"] == OWNER_OBJECT:
            title = f"object {segment.index.object_names[owner]}"
        else:
            title = segment.index.names[owner]
            total = int(tables.tensors["nbytes"][owner])
            if int(record["nbytes"]) < total:
                start = int(record["shard_offset"])
                stop = start + int(record["nbytes"])
                boxed = record["dims_index"] != NONE
                title += f"  ({'a box, ' if boxed else ''}bytes {start:,} to {stop:,})"
        yield ExtentPlace(offset=offset, nbytes=stored, padding_nbytes=offset - end, title=title)
        end = offset + stored


def created_text(created_us: int) -> str:
    """Return a time for people, in UTC; the number itself where no calendar reaches."""
    try:
        moment = datetime.fromtimestamp(created_us / 1e6, tz=timezone.utc)
    except (OverflowError, ValueError, OSError):
        return f"{created_us} microseconds after 1970"
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")


def entry_document(entry: TensorEntry, nbytes: int) -> dict[str, Any]:
    """Return a tensor for programs to read."""
    document: dict[str, Any] = {
        "name": entry.name,
        "dtype": entry.dtype.name,
        "shape": list(entry.shape),
        "nbytes": nbytes,
    }
    if entry.scope is not None:
        document["rank"] = entry.scope
    if entry.target is not None:
        document["target"] = entry.target[0]
    if isinstance(entry.alias, View):
        document["strides"] = list(entry.alias.strides)
        document["offset"] = entry.alias.offset
    return document
