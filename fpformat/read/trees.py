"""The state trees of an open checkpoint: where they lie, whose they are, what they reach."""

from collections.abc import Sequence
from dataclasses import dataclass

from fpformat.dtypes import DTYPES, numpy_dtype
from fpformat.errors import PlanError, fault
from fpformat.limits import NONE
from fpformat.names import Path, name_of
from fpformat.read.segment import Segment
from fpformat.records.index import OBJECT_TREE
from fpformat.records.model import TensorKey
from fpformat.records.nodes import ArrayRef
from fpformat.records.tree import Node, parse_tree, walk_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTree:
    """A state tree; the tensors in it are numbers into `keys`."""

    node: Node
    keys: Sequence[TensorKey]


class StateTrees:
    """The trees in the segments of one checkpoint."""

    def __init__(self, segments: Sequence[Segment], *, world_size: int) -> None:
        self._segments = segments
        self._trees: list[tuple[Segment, int, list[tuple[int, int]]]] = []
        for segment in segments:
            ranks = segment.index.tables.object_ranks
            for row, record in enumerate(segment.index.tables.objects):
                if record["kind"] != OBJECT_TREE:
                    continue
                own = ranks[ranks["object"] == row]
                ranges = list(zip(own["start"].tolist(), own["stop"].tolist(), strict=True))
                if record["scope"] == NONE:
                    ranges = [(0, world_size)]
                self._trees.append((segment, row, ranges))

    def ranks(self) -> list[int]:
        """Return the lowest rank of each tree."""
        return sorted(ranges[0][0] for _, _, ranges in self._trees)

    def of(self, rank: int) -> StateTree | None:
        """Return the tree of a rank, None when it has none.

        Raises:
            FormatError: TRE-1 to TRE-9 or NAM-3; SUM-2 for damage.
        """
        for segment, row, ranges in self._trees:
            if any(start <= rank < stop for start, stop in ranges):
                return _read_tree(segment, row)
        return None

    def check(self) -> None:
        """Check that trees together reach every tensor that is not hidden.

        Raises:
            FormatError: TRE-8, or what `of` raises.
        """
        if not self._trees:
            return
        reached: set[TensorKey] = set()
        for segment, row, _ in self._trees:
            tree = _read_tree(segment, row)
            reached.update(tree.keys[ref.index] for _, ref in walk_tensors(tree.node))
        for segment in self._segments:
            for row, key in enumerate(segment.keys):
                if key not in reached and not segment.entry(row).hidden:
                    where = f"{segment.where}: tensor {key[0]!r}"
                    raise fault("TRE-8", where, "is reached by no tree")


def _read_tree(segment: Segment, row: int) -> StateTree:
    where = f"{segment.where}: tree"
    extent = int(segment.index.tables.objects["extent"][row])
    node = parse_tree(bytes(segment.read_extent(extent)), where)
    keys = segment.keys
    hidden = segment.index.tables.tensors["flags"] & 2
    codes = segment.index.tables.tensors["dtype"]
    for path, ref in walk_tensors(node):
        if ref.index >= len(keys) or hidden[ref.index]:
            raise fault("TRE-6", where, f"tensor {ref.index} does not exist or is hidden")
        _check_name(path, keys[ref.index][0], where)
        if isinstance(ref, ArrayRef) and numpy_dtype(DTYPES[int(codes[ref.index])]) is None:
            raise fault("TRE-9", where, f"numpy has no type for {keys[ref.index][0]!r}")
    return StateTree(node=node, keys=keys)


def _check_name(path: Path, stored: str, where: str) -> None:
    try:
        name = name_of(path)
    except PlanError as error:
        raise fault("NAM-3", where, f"the path of tensor {stored[:60]!r} has no name") from error
    if name != stored:
        raise fault("NAM-3", where, f"the tensor at {name!r} is called {stored!r} in the table")
