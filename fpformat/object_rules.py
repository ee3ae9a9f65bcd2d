"""The rules of objects and the ranks they belong to, in one segment's tables."""

import numpy as np

from fpformat.bulk import extent_title, first_out_of_order
from fpformat.errors import fault
from fpformat.index import OBJECT_BYTES, OBJECT_TREE, OWNER_OBJECT, SegmentIndex
from fpformat.limits import NONE
from fpformat.names import TREE_NAME


def check_objects(index: SegmentIndex, world_size: int, where: str) -> None:
    """Check objects, their extents, and the ranks that trees belong to.

    Raises:
        FormatError: OBJ-1 to OBJ-5, OBJ-7 or EXT-13.
    """
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
