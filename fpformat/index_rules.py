"""The rules that the tables of one segment obey among themselves, checked in bulk.

Each function checks one table and raises at the first record that breaks a clause. Every redundant
field is compared, so after `check_index` the rest of the reader may trust positions and sizes: all
of them lie inside tables whose own sizes are bounded by the file.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import lt
from typing import Final

import numpy as np

from fpformat.dtypes import DTYPES
from fpformat.errors import fault
from fpformat.index import (
    FLAG_HIDDEN,
    FLAG_VIEW,
    OBJECT_BYTES,
    OBJECT_TREE,
    OWNER_OBJECT,
    OWNER_TENSOR,
    Array,
    Tables,
)
from fpformat.limits import (
    FEATURE_ZSTD,
    MAX_ENTRIES,
    MAX_INT,
    MAX_NDIM,
    NONE,
    round_up,
)
from fpformat.names import TREE_NAME
from fpformat.wire import Footer, Header

CODECS: Final = 3
_SIZES: Final = np.zeros(max(DTYPES) + 1, dtype=np.uint64)
for _code, _dtype in DTYPES.items():
    _SIZES[_code] = _dtype.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentIndex:
    """The tables of one segment after every check, with their names.

    Attributes:
        tables: The tables as read.
        names: Tensor names, in table order.
        object_names: Object names, in table order.
    """

    tables: Tables
    names: list[str]
    object_names: list[str]


def check_index(
    tables: Tables, *, header: Header, footer: Footer, world_size: int, where: str
) -> SegmentIndex:
    """Check the tables of a segment against each other.

    Raises:
        FormatError: The first broken clause of TEN, NAM, DIM, ALI, EXT, SEG, SUM, OBJ.
    """
    for table in (tables.tensors, tables.extents, tables.objects):
        if len(table) > MAX_ENTRIES:
            raise fault("TEN-10", where, f"{len(table)} records; this reader takes {MAX_ENTRIES}")
    names, object_names = _check_names(tables, where)
    index = SegmentIndex(tables=tables, names=names, object_names=object_names)
    _check_tensor_fields(index, world_size, where)
    tensor_dims = _check_tensor_dims(index, where)
    _check_tensor_sizes(index, where)
    _check_aliases(index, where)
    _check_extent_fields(index, header, where)
    _check_extent_places(tables.extents, header, footer, where)
    _check_extent_dims(index, tensor_dims, where)
    _check_extent_boxes(index, where)
    _check_pieces(tables, header, where)
    _check_objects(index, world_size, where)
    return index


def _first(bad: Array) -> int | None:
    """Return the position of the first true value, or None."""
    return int(np.argmax(bad)) if bad.any() else None


def _running(lengths: Array) -> Array:
    """Return where each run of a gapless sequence starts, and last where it ends."""
    ends = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=ends[1:])
    return ends


def _check_names(tables: Tables, where: str) -> tuple[list[str], list[str]]:
    lengths = np.concatenate([tables.tensors["name_nbytes"], tables.objects["name_nbytes"]])
    offsets = np.concatenate([tables.tensors["name_offset"], tables.objects["name_offset"]])
    starts = _running(lengths.astype(np.int64) + 1)
    count = len(tables.tensors)
    if (bad := _first(starts[:-1] != offsets)) is not None:
        clause, row = ("TEN-3", bad) if bad < count else ("OBJ-1", bad - count)
        table = "tensor" if bad < count else "object"
        detail = f"name_offset is {offsets[bad]}, expected {starts[bad]}"
        raise fault(clause, f"{where}: {table} record {row}", detail)
    heap = tables.names
    ends = starts[1:] - 1
    if starts[-1] != len(heap) or heap[ends].any() or np.count_nonzero(heap == 0) != len(ends):
        raise fault("NAM-1", f"{where}: names", "are not exactly the names, each ended by a NUL")
    try:
        names = heap.tobytes().decode().split("\0")[:-1]
    except UnicodeDecodeError as error:
        raise fault("NAM-2", f"{where}: names", f"are not UTF-8: {error}") from error
    return names[:count], names[count:]


def _row(index: SegmentIndex, where: str, row: int) -> str:
    return f"{where}: tensor {index.names[row]!r} (record {row})"


def _check_order(names: list[str], scopes: Array) -> int | None:
    """Return the first record not above its predecessor by (name, scope), or None."""
    if all(map(lt, names, names[1:])):
        return None
    pairs = list(zip(names, scopes.tolist(), strict=True))
    return next((i for i in range(1, len(pairs)) if pairs[i - 1] >= pairs[i]), None)


def _check_tensor_fields(index: SegmentIndex, world_size: int, where: str) -> None:
    tensors = index.tables.tensors
    if (row := _check_order(index.names, tensors["scope"])) is not None:
        raise fault("TEN-1", _row(index, where, row), "is not above the record before it")
    codes = tensors["dtype"]
    known = _SIZES[np.minimum(codes, len(_SIZES) - 1)] > 0
    if (bad := _first(~known | (codes >= len(_SIZES)))) is not None:
        raise fault("TEN-4", _row(index, where, bad), f"unknown data type code {codes[bad]}")
    if (bad := _first(tensors["ndim"] > MAX_NDIM)) is not None:
        detail = f"{tensors['ndim'][bad]} dimensions; the limit is {MAX_NDIM}"
        raise fault("TEN-5", _row(index, where, bad), detail)
    flags = tensors["flags"]
    if (bad := _first((flags > (FLAG_VIEW | FLAG_HIDDEN)) | (tensors["zero"] != 0))) is not None:
        raise fault("TEN-7", _row(index, where, bad), "unknown flags or a non-zero reserved field")
    scopes = tensors["scope"]
    if (bad := _first((scopes != NONE) & (scopes >= world_size))) is not None:
        detail = f"scope is rank {scopes[bad]} of a world of {world_size}"
        raise fault("TEN-8", _row(index, where, bad), detail)


def _is_view(tensors: Array) -> Array:
    view: Array = (tensors["flags"] & FLAG_VIEW).astype(bool)
    return view


def _check_tensor_dims(index: SegmentIndex, where: str) -> int:
    """Return the length of the part of the dims table that belongs to tensors."""
    tensors = index.tables.tensors
    ndim = tensors["ndim"].astype(np.int64)
    starts = _running(ndim + np.where(_is_view(tensors), ndim + 1, 0))
    if (bad := _first(starts[:-1] != tensors["dims_index"])) is not None:
        detail = f"dims_index is {tensors['dims_index'][bad]}, expected {starts[bad]}"
        raise fault("TEN-2", _row(index, where, bad), detail)
    if starts[-1] > len(index.tables.dims):
        raise fault("DIM-1", f"{where}: dims", f"has {len(index.tables.dims)} values, too few")
    return int(starts[-1])


def _by_ndim(ndim: Array, rows: Array) -> Iterator[tuple[int, Array]]:
    """Split `rows` into groups of equal number of dimensions."""
    for value in np.unique(ndim[rows]):
        yield int(value), rows[ndim[rows] == value]


def _dims(index: SegmentIndex, starts: Array, ndim: int) -> Array:
    """Return one row of `ndim` values of the dims table for each start."""
    positions = starts.astype(np.int64)[:, None] + np.arange(ndim)
    values: Array = index.tables.dims[positions]
    return values


def _products(sizes: Array, itemsize: Array) -> tuple[Array, Array]:
    """Return the products of each row's non-zero sizes in bytes, and where they overflow."""
    product = itemsize.astype(np.uint64)
    bad = np.zeros(len(sizes), dtype=bool)
    for column in sizes.T:
        factor = np.maximum(column, 1)
        bad |= factor > MAX_INT // product
        product = np.where(bad, 1, product * np.where(bad, 1, factor))
    return product, bad


def _check_tensor_sizes(index: SegmentIndex, where: str) -> None:
    tensors = index.tables.tensors
    for ndim, rows in _by_ndim(tensors["ndim"], np.arange(len(tensors))):
        shapes = _dims(index, tensors["dims_index"][rows], ndim)
        product, over = _products(shapes, _SIZES[tensors["dtype"][rows]])
        nbytes = np.where((shapes == 0).any(axis=1), 0, product)
        if (bad := _first(over | (nbytes != tensors["nbytes"][rows]))) is not None:
            dtype = DTYPES[int(tensors["dtype"][rows[bad]])].name
            detail = f"nbytes is {tensors['nbytes'][rows[bad]]} for {shapes[bad].tolist()} {dtype}"
            if over[bad]:
                detail = f"shape {shapes[bad].tolist()} of {dtype} exceeds 2^53-1 bytes"
            raise fault("TEN-6", _row(index, where, int(rows[bad])), detail)


def _check_aliases(index: SegmentIndex, where: str) -> None:
    tensors = index.tables.tensors
    target = tensors["target"]
    is_alias = target != NONE
    is_view, is_hidden = _is_view(tensors), (tensors["flags"] & FLAG_HIDDEN) != 0
    wrong = (is_view & ~is_alias) | (is_hidden & (is_alias | (tensors["ndim"] != 1)))
    if (bad := _first(wrong)) is not None:
        detail = "a view needs a target; a hidden base has none and one dimension"
        raise fault("ALI-4", _row(index, where, bad), detail)
    rows = np.flatnonzero(is_alias)
    inside = target[rows] < len(tensors)
    if (bad := _first(~inside | is_alias[np.where(inside, target[rows], 0)])) is not None:
        row = int(rows[bad])
        detail = f"target {target[row]} is not another entry with bytes of its own"
        raise fault("ALI-1", _row(index, where, row), detail)
    _check_same(index, rows[~is_view[rows]], where)
    _check_views(index, rows[is_view[rows]], where)


def _check_same(index: SegmentIndex, rows: Array, where: str) -> None:
    """Check plain aliases: data type and shape equal the target's."""
    tensors = index.tables.tensors
    others = tensors["target"][rows]
    same = (tensors["dtype"][rows] == tensors["dtype"][others]) & (
        tensors["ndim"][rows] == tensors["ndim"][others]
    )
    for ndim, group in _by_ndim(tensors["ndim"], rows[same]):
        starts = tensors["dims_index"]
        mine = _dims(index, starts[group], ndim)
        theirs = _dims(index, starts[tensors["target"][group]], ndim)
        same[np.isin(rows, group[(mine != theirs).any(axis=1)])] = False
    if (bad := _first(~same)) is not None:
        target = index.names[int(others[bad])]
        detail = f"has another data type or shape than its target {target!r}"
        raise fault("ALI-2", _row(index, where, int(rows[bad])), detail)


def _check_views(index: SegmentIndex, rows: Array, where: str) -> None:
    """Check that a view's last byte lies inside its target."""
    tensors = index.tables.tensors
    for ndim, group in _by_ndim(tensors["ndim"], rows):
        values = _dims(index, tensors["dims_index"][group], 2 * ndim + 1)
        shapes, strides, offsets = values[:, :ndim], values[:, ndim:-1], values[:, -1]
        empty = (shapes == 0).any(axis=1)
        steps = np.where(shapes == 0, 0, shapes - np.uint64(1))
        sizes = _SIZES[tensors["dtype"][group]]
        rough = offsets.astype(float) + (steps.astype(float) * strides.astype(float)).sum(axis=1)
        too_far = (rough > MAX_INT) | (strides > MAX_INT).any(axis=1) | (offsets > MAX_INT)
        last = np.where(too_far, 0, offsets + (steps * strides).sum(axis=1))
        end = np.where(empty, offsets, last + np.uint64(1))
        limit = tensors["nbytes"][tensors["target"][group]]
        if (bad := _first(too_far | (end > limit // sizes))) is not None:
            detail = f"the view does not lie inside the {limit[bad]} bytes of its target"
            raise fault("ALI-3", _row(index, where, int(group[bad])), detail)


def _extent(where: str, row: int) -> str:
    return f"{where}: extent record {row}"


def _check_extent_fields(index: SegmentIndex, header: Header, where: str) -> None:
    extents, tensors = index.tables.extents, index.tables.tensors
    if (bad := _first(extents["zero"] != 0)) is not None:
        raise fault("EXT-9", _extent(where, bad), "the reserved field is not zero")
    kind, owner, codec = extents["owner_kind"], extents["owner"], extents["codec"]
    counts = np.where(kind == OWNER_TENSOR, len(tensors), len(index.tables.objects))
    if (bad := _first((kind > OWNER_OBJECT) | (owner >= counts))) is not None:
        detail = f"owner {owner[bad]} of kind {kind[bad]} does not exist"
        raise fault("EXT-2", _extent(where, bad), detail)
    if (bad := _first(codec >= CODECS)) is not None:
        raise fault("EXT-8", _extent(where, bad), f"unknown codec {codec[bad]}")
    if not header.incompat & FEATURE_ZSTD and (bad := _first(codec != 0)) is not None:
        raise fault("EXT-14", _extent(where, bad), "is compressed without the feature zstd")
    sizes = np.maximum(extents["nbytes"], extents["stored_nbytes"])
    wrong = (extents["nbytes"] == 0) | (extents["stored_nbytes"] == 0) | (sizes > MAX_INT)
    wrong |= (codec == 0) & (extents["nbytes"] != extents["stored_nbytes"])
    if (bad := _first(wrong)) is not None:
        row = extents[bad]
        detail = f"nbytes {row['nbytes']} and stored_nbytes {row['stored_nbytes']} disagree"
        raise fault("EXT-1", _extent(where, bad), detail)
    rows = np.flatnonzero(kind == OWNER_TENSOR)
    if (bad := _first(tensors["target"][owner[rows]] != NONE)) is not None:
        name = index.names[int(owner[rows[bad]])]
        raise fault("ALI-5", _extent(where, int(rows[bad])), f"holds bytes of the alias {name!r}")


def _check_extent_places(extents: Array, header: Header, footer: Footer, where: str) -> None:
    geometry = header.geometry
    offsets, stored = extents["offset"], extents["stored_nbytes"]
    if (bad := _first(offsets > MAX_INT)) is not None:
        raise fault("SEG-3", _extent(where, bad), f"offset {offsets[bad]} is above 2^53-1")
    ends = np.concatenate([np.array([geometry.align], dtype=np.uint64), offsets + stored])
    align = np.where(stored >= geometry.align, geometry.align, geometry.tensor_align)
    expected = -(-ends[:-1].astype(np.int64) // align) * align
    if (bad := _first(expected != offsets)) is not None:
        detail = f"offset is {offsets[bad]}, expected {expected[bad]}"
        raise fault("SEG-3", _extent(where, bad), detail)
    end = round_up(int(ends[-1]), to=geometry.align)
    if end != footer.index_offset:
        detail = f"the index lies at {footer.index_offset}, the extents end before {end}"
        raise fault("SEG-4", where, detail)


def _check_extent_dims(index: SegmentIndex, tensor_dims: int, where: str) -> None:
    extents = index.tables.extents
    boxed = (extents["dims_index"] != NONE) & (extents["owner_kind"] == OWNER_TENSOR)
    wrong_object = (extents["dims_index"] != NONE) & (extents["owner_kind"] == OWNER_OBJECT)
    wrong_object |= (extents["shard_offset"] != 0) & (extents["owner_kind"] == OWNER_OBJECT)
    if (bad := _first(wrong_object)) is not None:
        raise fault("EXT-13", _extent(where, bad), "an object has no box and no shard_offset")
    rows = np.flatnonzero(boxed)
    ndim = index.tables.tensors["ndim"][extents["owner"][rows]].astype(np.int64)
    starts = _running(2 * ndim) + tensor_dims
    if (bad := _first(starts[:-1] != extents["dims_index"][rows])) is not None:
        row = int(rows[bad])
        detail = f"dims_index is {extents['dims_index'][row]}, expected {starts[bad]}"
        raise fault("EXT-5", _extent(where, row), detail)
    if starts[-1] != len(index.tables.dims):
        detail = f"has {len(index.tables.dims)} values, the records use {starts[-1]}"
        raise fault("DIM-1", f"{where}: dims", detail)


def _check_extent_boxes(index: SegmentIndex, where: str) -> None:
    """Check boxes against shapes, and byte ranges against boxes."""
    extents, tensors = index.tables.extents, index.tables.tensors
    rows = np.flatnonzero(extents["owner_kind"] == OWNER_TENSOR)
    owner = extents["owner"][rows]
    box_nbytes = tensors["nbytes"][owner].copy()
    boxed = np.flatnonzero(extents["dims_index"][rows] != NONE)
    for ndim, group in _by_ndim(tensors["ndim"][owner], boxed):
        owners = owner[group]
        values = _dims(index, extents["dims_index"][rows[group]], 2 * ndim)
        start, shape = values[:, :ndim], values[:, ndim:]
        whole = _dims(index, tensors["dims_index"][owners], ndim)
        outside = ((shape == 0) | (start > whole) | (shape > whole - np.minimum(start, whole))).any(
            axis=1
        )
        if (bad := _first(outside)) is not None:
            name = index.names[int(owners[bad])]
            detail = f"box {values[bad].tolist()} is not inside {name!r} {whole[bad].tolist()}"
            raise fault("EXT-6", _extent(where, int(rows[group[bad]])), detail)
        if (bad := _first((shape == whole).all(axis=1))) is not None:
            detail = "the box is the whole tensor, which has no box record"
            raise fault("EXT-7", _extent(where, int(rows[group[bad]])), detail)
        box_nbytes[group] = _products(shape, _SIZES[tensors["dtype"][owners]])[0]
    _check_ranges(extents[rows], rows, box_nbytes, _SIZES[tensors["dtype"][owner]], where)


def _check_ranges(extents: Array, rows: Array, box_nbytes: Array, size: Array, where: str) -> None:
    offset, nbytes = extents["shard_offset"], extents["nbytes"]
    wrong = (offset % size != 0) | (nbytes % size != 0) | (offset > box_nbytes)
    wrong |= nbytes > box_nbytes - np.minimum(offset, box_nbytes)
    if (bad := _first(wrong)) is not None:
        detail = f"bytes {offset[bad]} + {nbytes[bad]} are not whole elements inside a shard"
        raise fault("EXT-3", _extent(where, int(rows[bad])), f"{detail} of {box_nbytes[bad]}")


def _check_pieces(tables: Tables, header: Header, where: str) -> None:
    extents = tables.extents
    counts = -(-extents["nbytes"].astype(np.int64) // header.geometry.piece_nbytes)
    starts = _running(counts)
    if (bad := _first(starts[:-1] != extents["piece_first"])) is not None:
        detail = f"piece_first is {extents['piece_first'][bad]}, expected {starts[bad]}"
        raise fault("EXT-4", _extent(where, bad), detail)
    if starts[-1] != len(tables.crc32c):
        detail = f"has {len(tables.crc32c)} checksums for {starts[-1]} pieces"
        raise fault("SUM-3", f"{where}: crc32c", detail)
    if not header.incompat & FEATURE_ZSTD:
        return
    if len(tables.piece_stored) != starts[-1]:
        raise fault("ZST-2", f"{where}: piece_stored_nbytes", "is not one record per piece")
    totals = np.diff(_running(tables.piece_stored)[starts])
    if (bad := _first(totals != extents["stored_nbytes"])) is not None:
        raise fault("ZST-2", _extent(where, bad), "stored sizes of its pieces do not add up")
    piece = header.geometry.piece_nbytes
    raw = np.full(int(starts[-1]), piece, dtype=np.int64)
    raw[starts[1:] - 1] = extents["nbytes"].astype(np.int64) - (counts - 1) * piece
    wrong = np.repeat(extents["codec"] == 0, counts) & (raw != tables.piece_stored)
    if (bad := _first(wrong)) is not None:
        detail = f"piece {bad} is raw, but its stored size is {tables.piece_stored[bad]}"
        raise fault("ZST-2", f"{where}: piece_stored_nbytes", detail)


def _check_objects(index: SegmentIndex, world_size: int, where: str) -> None:
    objects, extents = index.tables.objects, index.tables.extents
    if (row := _check_order(index.object_names, objects["scope"])) is not None:
        raise fault("OBJ-1", f"{where}: object record {row}", "is not above the record before it")
    owned = np.flatnonzero(extents["owner_kind"] == OWNER_OBJECT)
    owners = dict(zip(owned.tolist(), extents["owner"][owned].tolist(), strict=True))
    for row, record in enumerate(objects):
        place = f"{where}: object {index.object_names[row]!r} (record {row})"
        if record["kind"] not in (OBJECT_TREE, OBJECT_BYTES):
            raise fault("OBJ-2", place, f"unknown kind {record['kind']}")
        if (record["kind"] == OBJECT_TREE) != (index.object_names[row] == TREE_NAME):
            raise fault(
                "OBJ-3", place, f"the name {TREE_NAME!r} belongs to trees, and only to them"
            )
        if record["scope"] != NONE and record["scope"] >= world_size:
            raise fault("OBJ-7", place, f"scope is rank {record['scope']} of {world_size}")
        if record["extent"] != NONE and owners.pop(int(record["extent"]), None) != row:
            raise fault("OBJ-4", place, f"extent {record['extent']} is not its own")
        if record["extent"] == NONE and record["kind"] == OBJECT_TREE:
            raise fault("OBJ-4", place, "a tree has at least one byte")
    if owners:
        raise fault("EXT-13", _extent(where, min(owners)), "belongs to no object record")
    _check_object_ranks(index, world_size, where)


def _check_object_ranks(index: SegmentIndex, world_size: int, where: str) -> None:
    objects = index.tables.objects
    previous: tuple[int, int] = (-1, 0)
    lowest: dict[int, int] = {}
    for row, record in enumerate(index.tables.object_ranks):
        owner, start, stop = (int(record[name]) for name in ("object", "start", "stop"))
        place = f"{where}: object_ranks record {row}"
        after = owner > previous[0] or (owner == previous[0] and start > previous[1])
        if not after or not start < stop <= world_size or owner >= len(objects):
            raise fault(
                "OBJ-5", place, f"ranks {start} to {stop} of object {owner} are not in order"
            )
        lowest.setdefault(owner, start)
        previous = (owner, stop)
    for row, record in enumerate(objects):
        scope = int(record["scope"])
        is_scoped_tree = record["kind"] == OBJECT_TREE and scope != NONE
        if lowest.get(row) != (scope if is_scoped_tree else None):
            detail = "only a tree with a scope has ranks, and the lowest is its scope"
            raise fault("OBJ-5", f"{where}: object record {row}", detail)
