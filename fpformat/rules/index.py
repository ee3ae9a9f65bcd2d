"""The rules that the tables of one segment obey among themselves, checked in bulk.

Each function checks one table and raises at the first record that breaks a clause. Every redundant
field is compared, so after `check_index` the rest of the reader may trust positions and sizes: all
of them lie inside tables whose own sizes are bounded by the file.
"""

from bisect import bisect_left
from typing import Final

import numpy as np

from fpformat.dtypes import DTYPES
from fpformat.errors import fault
from fpformat.limits import FEATURE_ZSTD, MAX_ENTRIES, MAX_INT, MAX_NDIM, NONE, round_up
from fpformat.names import HIDDEN_PREFIX, TREE_NAME
from fpformat.records.index import (
    FLAG_HIDDEN,
    FLAG_VIEW,
    OBJECT_BYTES,
    OBJECT_TREE,
    OWNER_OBJECT,
    OWNER_TENSOR,
    Array,
    SegmentIndex,
    Tables,
)
from fpformat.records.wire import Footer, Header
from fpformat.rules.bulk import (
    ELEMENT_NBYTES,
    by_ndim,
    dims_rows,
    extent_title,
    first_out_of_order,
    first_true,
    is_view,
    products,
    running,
    tensor_title,
)

CODECS: Final = 3


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


def _check_names(tables: Tables, where: str) -> tuple[list[str], list[str]]:
    lengths = np.concatenate([tables.tensors["name_nbytes"], tables.objects["name_nbytes"]])
    offsets = np.concatenate([tables.tensors["name_offset"], tables.objects["name_offset"]])
    starts = running(lengths.astype(np.int64) + 1)
    count = len(tables.tensors)
    if (bad := first_true(starts[:-1] != offsets)) is not None:
        clause, row = ("TEN-3", bad) if bad < count else ("OBJ-1", bad - count)
        table = "tensor" if bad < count else "object"
        detail = f"name_offset is {offsets[bad]}, expected {starts[bad]}"
        raise fault(clause, f"{where}: {table} record {row}", detail)
    heap = tables.names
    ends = starts[1:] - 1
    if (
        starts[-1] != len(heap)
        or len(heap) >= NONE
        or heap[ends].any()
        or np.count_nonzero(heap == 0) != len(ends)
    ):
        raise fault("NAM-1", f"{where}: names", "are not exactly the names, each ended by a NUL")
    try:
        names = str(heap.data, "utf-8").split("\0")[:-1]
    except UnicodeDecodeError as error:
        raise fault("NAM-2", f"{where}: names", f"are not UTF-8: {error}") from error
    return names[:count], names[count:]


def _check_tensor_fields(index: SegmentIndex, world_size: int, where: str) -> None:
    tensors = index.tables.tensors
    if (row := first_out_of_order(index.names, tensors["scope"])) is not None:
        raise fault("TEN-1", tensor_title(index, where, row), "is not above the record before it")
    codes = tensors["dtype"]
    known = ELEMENT_NBYTES[np.minimum(codes, len(ELEMENT_NBYTES) - 1)] > 0
    if (bad := first_true(~known | (codes >= len(ELEMENT_NBYTES)))) is not None:
        raise fault(
            "TEN-4", tensor_title(index, where, bad), f"unknown data type code {codes[bad]}"
        )
    if (bad := first_true(tensors["ndim"] > MAX_NDIM)) is not None:
        detail = f"{tensors['ndim'][bad]} dimensions; the limit is {MAX_NDIM}"
        raise fault("TEN-5", tensor_title(index, where, bad), detail)
    flags = tensors["flags"]
    if (
        bad := first_true((flags > (FLAG_VIEW | FLAG_HIDDEN)) | (tensors["zero"] != 0))
    ) is not None:
        raise fault(
            "TEN-7", tensor_title(index, where, bad), "unknown flags or a non-zero reserved field"
        )
    scopes = tensors["scope"]
    if (bad := first_true((scopes != NONE) & (scopes >= world_size))) is not None:
        detail = f"scope is rank {scopes[bad]} of a world of {world_size}"
        raise fault("TEN-8", tensor_title(index, where, bad), detail)


def _check_tensor_dims(index: SegmentIndex, where: str) -> int:
    """Return the length of the part of the dims table that belongs to tensors."""
    tensors = index.tables.tensors
    ndim = tensors["ndim"].astype(np.int64)
    starts = running(ndim + np.where(is_view(tensors), ndim + 1, 0))
    if (bad := first_true(starts[:-1] != tensors["dims_index"])) is not None:
        detail = f"dims_index is {tensors['dims_index'][bad]}, expected {starts[bad]}"
        raise fault("TEN-2", tensor_title(index, where, bad), detail)
    if not starts[-1] <= len(index.tables.dims) < NONE:
        raise fault(
            "DIM-1", f"{where}: dims", f"has {len(index.tables.dims)} values, too few or too many"
        )
    return int(starts[-1])


def _check_tensor_sizes(index: SegmentIndex, where: str) -> None:
    tensors = index.tables.tensors
    for ndim, rows in by_ndim(tensors["ndim"], np.arange(len(tensors))):
        shapes = dims_rows(index, tensors["dims_index"][rows], ndim)
        product, over = products(shapes, ELEMENT_NBYTES[tensors["dtype"][rows]])
        nbytes = np.where((shapes == 0).any(axis=1), 0, product)
        if (bad := first_true(over | (nbytes != tensors["nbytes"][rows]))) is not None:
            dtype = DTYPES[int(tensors["dtype"][rows[bad]])].name
            detail = f"nbytes is {tensors['nbytes'][rows[bad]]} for {shapes[bad].tolist()} {dtype}"
            if over[bad]:
                detail = f"shape {shapes[bad].tolist()} of {dtype} exceeds 2^53-1 bytes"
            raise fault("TEN-6", tensor_title(index, where, int(rows[bad])), detail)


def _check_extent_fields(index: SegmentIndex, header: Header, where: str) -> None:
    extents, tensors = index.tables.extents, index.tables.tensors
    if (bad := first_true(extents["zero"] != 0)) is not None:
        raise fault("EXT-9", extent_title(where, bad), "the reserved field is not zero")
    kind, owner, codec = extents["owner_kind"], extents["owner"], extents["codec"]
    counts = np.where(kind == OWNER_TENSOR, len(tensors), len(index.tables.objects))
    if (bad := first_true((kind > OWNER_OBJECT) | (owner >= counts))) is not None:
        detail = f"owner {owner[bad]} of kind {kind[bad]} does not exist"
        raise fault("EXT-2", extent_title(where, bad), detail)
    if (bad := first_true(codec >= CODECS)) is not None:
        raise fault("EXT-8", extent_title(where, bad), f"unknown codec {codec[bad]}")
    if not header.incompat & FEATURE_ZSTD and (bad := first_true(codec != 0)) is not None:
        raise fault("EXT-14", extent_title(where, bad), "is compressed without the feature zstd")
    sizes = np.maximum(extents["nbytes"], extents["stored_nbytes"])
    wrong = (extents["nbytes"] == 0) | (extents["stored_nbytes"] == 0) | (sizes > MAX_INT)
    wrong |= (codec == 0) & (extents["nbytes"] != extents["stored_nbytes"])
    if (bad := first_true(wrong)) is not None:
        row = extents[bad]
        detail = f"nbytes {row['nbytes']} and stored_nbytes {row['stored_nbytes']} disagree"
        raise fault("EXT-1", extent_title(where, bad), detail)
    rows = np.flatnonzero(kind == OWNER_TENSOR)
    if (bad := first_true(tensors["target"][owner[rows]] != NONE)) is not None:
        name = index.names[int(owner[rows[bad]])]
        raise fault(
            "ALI-5", extent_title(where, int(rows[bad])), f"holds bytes of the alias {name!r}"
        )


def _check_extent_places(extents: Array, header: Header, footer: Footer, where: str) -> None:
    geometry = header.geometry
    offsets, stored = extents["offset"], extents["stored_nbytes"]
    if (bad := first_true(offsets > MAX_INT)) is not None:
        raise fault("SEG-3", extent_title(where, bad), f"offset {offsets[bad]} is above 2^53-1")
    ends = np.concatenate([np.array([geometry.align], dtype=np.uint64), offsets + stored])
    align = np.where(stored >= geometry.align, geometry.align, geometry.tensor_align)
    expected = -(-ends[:-1].astype(np.int64) // align) * align
    if (bad := first_true(expected != offsets)) is not None:
        detail = f"offset is {offsets[bad]}, expected {expected[bad]}"
        raise fault("SEG-3", extent_title(where, bad), detail)
    end = round_up(int(ends[-1]), to=geometry.align)
    if end != footer.index_offset:
        detail = f"the index lies at {footer.index_offset}, the extents end before {end}"
        raise fault("SEG-4", where, detail)


def _check_extent_dims(index: SegmentIndex, tensor_dims: int, where: str) -> None:
    extents = index.tables.extents
    boxed = (extents["dims_index"] != NONE) & (extents["owner_kind"] == OWNER_TENSOR)
    wrong_object = (extents["dims_index"] != NONE) & (extents["owner_kind"] == OWNER_OBJECT)
    wrong_object |= (extents["shard_offset"] != 0) & (extents["owner_kind"] == OWNER_OBJECT)
    if (bad := first_true(wrong_object)) is not None:
        raise fault("EXT-13", extent_title(where, bad), "an object has no box and no shard_offset")
    rows = np.flatnonzero(boxed)
    ndim = index.tables.tensors["ndim"][extents["owner"][rows]].astype(np.int64)
    starts = running(2 * ndim) + tensor_dims
    if (bad := first_true(starts[:-1] != extents["dims_index"][rows])) is not None:
        row = int(rows[bad])
        detail = f"dims_index is {extents['dims_index'][row]}, expected {starts[bad]}"
        raise fault("EXT-5", extent_title(where, row), detail)
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
    for ndim, group in by_ndim(tensors["ndim"][owner], boxed):
        owners = owner[group]
        values = dims_rows(index, extents["dims_index"][rows[group]], 2 * ndim)
        start, shape = values[:, :ndim], values[:, ndim:]
        whole = dims_rows(index, tensors["dims_index"][owners], ndim)
        outside = ((shape == 0) | (start > whole) | (shape > whole - np.minimum(start, whole))).any(
            axis=1
        )
        if (bad := first_true(outside)) is not None:
            name = index.names[int(owners[bad])]
            detail = f"box {values[bad].tolist()} is not inside {name!r} {whole[bad].tolist()}"
            raise fault("EXT-6", extent_title(where, int(rows[group[bad]])), detail)
        if (bad := first_true((shape == whole).all(axis=1))) is not None:
            detail = "the box is the whole tensor, which has no box record"
            raise fault("EXT-7", extent_title(where, int(rows[group[bad]])), detail)
        box_nbytes[group] = products(shape, ELEMENT_NBYTES[tensors["dtype"][owners]])[0]
    _check_ranges(extents, rows, box_nbytes, ELEMENT_NBYTES[tensors["dtype"][owner]], where)


def _check_ranges(extents: Array, rows: Array, box_nbytes: Array, size: Array, where: str) -> None:
    offset, nbytes = extents["shard_offset"][rows], extents["nbytes"][rows]
    wrong = (offset % size != 0) | (nbytes % size != 0) | (offset > box_nbytes)
    wrong |= nbytes > box_nbytes - np.minimum(offset, box_nbytes)
    if (bad := first_true(wrong)) is not None:
        detail = f"bytes {offset[bad]} + {nbytes[bad]} are not whole elements inside a shard"
        raise fault("EXT-3", extent_title(where, int(rows[bad])), f"{detail} of {box_nbytes[bad]}")


def _check_pieces(tables: Tables, header: Header, where: str) -> None:
    extents = tables.extents
    counts = -(-extents["nbytes"].astype(np.int64) // header.geometry.piece_nbytes)
    starts = running(counts)
    if (bad := first_true(starts[:-1] != extents["piece_first"])) is not None:
        detail = f"piece_first is {extents['piece_first'][bad]}, expected {starts[bad]}"
        raise fault("EXT-4", extent_title(where, bad), detail)
    if starts[-1] != len(tables.crc32c) or starts[-1] >= NONE:
        detail = f"has {len(tables.crc32c)} checksums for {starts[-1]} pieces"
        raise fault("SUM-3", f"{where}: crc32c", detail)
    if not header.incompat & FEATURE_ZSTD:
        return
    if len(tables.piece_stored) != starts[-1]:
        raise fault("ZST-2", f"{where}: piece_stored_nbytes", "is not one record per piece")
    totals = np.diff(running(tables.piece_stored)[starts])
    if (bad := first_true(totals != extents["stored_nbytes"])) is not None:
        raise fault("ZST-2", extent_title(where, bad), "stored sizes of its pieces do not add up")
    piece = header.geometry.piece_nbytes
    raw = np.full(int(starts[-1]), piece, dtype=np.int64)
    raw[starts[1:] - 1] = extents["nbytes"].astype(np.int64) - (counts - 1) * piece
    wrong = np.repeat(extents["codec"] == 0, counts) & (raw != tables.piece_stored)
    if (bad := first_true(wrong)) is not None:
        detail = f"piece {bad} is raw, but its stored size is {tables.piece_stored[bad]}"
        raise fault("ZST-2", f"{where}: piece_stored_nbytes", detail)


def _check_aliases(index: SegmentIndex, where: str) -> None:
    """Check flags, names of hidden bases, targets, and that views stay inside them."""
    tensors = index.tables.tensors
    target = tensors["target"]
    is_alias = target != NONE
    viewing, is_hidden = is_view(tensors), (tensors["flags"] & FLAG_HIDDEN) != 0
    wrong = (viewing & ~is_alias) | (is_hidden & (is_alias | (tensors["ndim"] != 1)))
    if (bad := first_true(wrong)) is not None:
        detail = "a view needs a target; a hidden base has none and one dimension"
        raise fault("ALI-4", tensor_title(index, where, bad), detail)
    _check_hidden_names(index, is_hidden, where)
    rows = np.flatnonzero(is_alias)
    inside = target[rows] < len(tensors)
    if (bad := first_true(~inside | is_alias[np.where(inside, target[rows], 0)])) is not None:
        row = int(rows[bad])
        detail = f"target {target[row]} is not another entry with bytes of its own"
        raise fault("ALI-1", tensor_title(index, where, row), detail)
    if (bad := first_true(is_hidden[target[rows]] & ~viewing[rows])) is not None:
        detail = "is the same tensor as a hidden base, which only views may look at"
        raise fault("ALI-7", tensor_title(index, where, int(rows[bad])), detail)
    _check_same(index, rows[~viewing[rows]], where)
    _check_views(index, rows[viewing[rows]], where)


def _check_hidden_names(index: SegmentIndex, is_hidden: Array, where: str) -> None:
    """Check that the names of hidden bases, and only they, have the prefix.

    Names are sorted, so those with the prefix stand together.
    """
    first = bisect_left(index.names, HIDDEN_PREFIX)
    last = bisect_left(index.names, HIDDEN_PREFIX[:-1] + chr(ord(HIDDEN_PREFIX[-1]) + 1))
    wrong = is_hidden.copy()
    wrong[first:last] ^= True
    if (bad := first_true(wrong)) is not None:
        detail = f"hidden bases, and only they, have names that begin with {HIDDEN_PREFIX}"
        raise fault("ALI-7", tensor_title(index, where, bad), detail)


def _check_same(index: SegmentIndex, rows: Array, where: str) -> None:
    """Check plain aliases: data type and shape equal the target's."""
    tensors = index.tables.tensors
    others = tensors["target"][rows]
    same = (tensors["dtype"][rows] == tensors["dtype"][others]) & (
        tensors["ndim"][rows] == tensors["ndim"][others]
    )
    for ndim, group in by_ndim(tensors["ndim"], rows[same]):
        starts = tensors["dims_index"]
        mine = dims_rows(index, starts[group], ndim)
        theirs = dims_rows(index, starts[tensors["target"][group]], ndim)
        same[np.isin(rows, group[(mine != theirs).any(axis=1)])] = False
    if (bad := first_true(~same)) is not None:
        target = index.names[int(others[bad])]
        detail = f"has another data type or shape than its target {target!r}"
        raise fault("ALI-2", tensor_title(index, where, int(rows[bad])), detail)


def _check_views(index: SegmentIndex, rows: Array, where: str) -> None:
    """Check that a view's last byte lies inside its target."""
    tensors = index.tables.tensors
    for ndim, group in by_ndim(tensors["ndim"], rows):
        values = dims_rows(index, tensors["dims_index"][group], 2 * ndim + 1)
        shapes, strides, offsets = values[:, :ndim], values[:, ndim:-1], values[:, -1]
        empty = (shapes == 0).any(axis=1)
        steps = np.where(shapes == 0, 0, shapes - np.uint64(1))
        sizes = ELEMENT_NBYTES[tensors["dtype"][group]]
        rough = offsets.astype(float) + (steps.astype(float) * strides.astype(float)).sum(axis=1)
        too_far = (rough > MAX_INT) | (strides > MAX_INT).any(axis=1) | (offsets > MAX_INT)
        last = np.where(too_far, 0, offsets + (steps * strides).sum(axis=1))
        end = np.where(empty, offsets, last + np.uint64(1))
        limit = tensors["nbytes"][tensors["target"][group]]
        if (bad := first_true(too_far | (end > limit // sizes))) is not None:
            detail = f"the view does not lie inside the {limit[bad]} bytes of its target"
            raise fault("ALI-3", tensor_title(index, where, int(group[bad])), detail)


def _check_objects(index: SegmentIndex, world_size: int, where: str) -> None:
    """Check objects, their extents, and the ranks that trees belong to."""
    objects, extents = index.tables.objects, index.tables.extents
    if (row := first_out_of_order(index.object_names, objects["scope"])) is not None:
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
        raise fault("EXT-13", extent_title(where, min(owners)), "belongs to no object record")
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
