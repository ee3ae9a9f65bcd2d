"""Small checkpoints with one of everything, for tests to read and to break."""

from pathlib import Path

import numpy as np

from fpformat import (
    Box,
    BytesSource,
    ObjectEntry,
    Part,
    SavePlan,
    SegmentPlan,
    TensorEntry,
    View,
    write_checkpoint,
)
from fpformat.dtypes import by_name
from fpformat.records.nodes import TensorRef
from fpformat.records.tree import dump_tree

F32, U8, I64 = by_name("F32"), by_name("U8"), by_name("I64")
TOP = Box(start=(0, 0), shape=(1, 3))
REST = Box(start=(1, 0), shape=(3, 3))
GRID = np.arange(12, dtype="<f4").reshape(4, 3)
LONG = (np.arange(5000) % 251).astype("u1")
BASE = np.arange(8, dtype="<f4")
RANK = np.arange(3, dtype="<i8")
SAVE_ID = bytes(range(16))

# Rows of segment 0's tensor table, in order of (name, scope).
ENTRIES = (
    TensorEntry(name="empty", dtype=I64, shape=(0, 7)),
    TensorEntry(name="grid", dtype=F32, shape=(4, 3)),
    TensorEntry(name="long", dtype=U8, shape=(5000,)),
    TensorEntry(name="rng", dtype=I64, shape=(3,), scope=1),
    TensorEntry(name="tied", dtype=F32, shape=(4, 3), alias=("grid", None)),
    TensorEntry(
        name="view",
        dtype=F32,
        shape=(2, 3),
        alias=View(target=("~h/view", None), strides=(1, 2), offset=1),
    ),
    TensorEntry(name="~h/view", dtype=F32, shape=(8,), hidden=True),
)
EMPTY, GRID_ROW, LONG_ROW, RNG_ROW, TIED_ROW, VIEW_ROW, HIDDEN_ROW = range(7)
TREE = {
    "empty": TensorRef(0),
    "grid": TensorRef(1),
    "long": TensorRef(2),
    "rng": TensorRef(3),
    "tied": TensorRef(4),
    "view": TensorRef(5),
    "step": 7,
}


def write_sample(path: Path) -> Path:
    """Write two segments of two ranks: boxes, cut bytes, alias, view, scope, tree, object."""
    by_name_ = {entry.name: entry for entry in ENTRIES}
    first = SegmentPlan(
        entries=ENTRIES,
        parts=(
            Part(key=("long", None), box=None, shard_offset=0, nbytes=4096),
            Part(key=("grid", None), box=TOP, shard_offset=0, nbytes=12),
            Part(key=("~h/view", None), box=None, shard_offset=0, nbytes=32),
        ),
        objects=(
            ObjectEntry(name="loader", kind=2, payload=b"position 12"),
            ObjectEntry(name="none", kind=2, payload=b""),
            ObjectEntry(name="tree", kind=1, payload=dump_tree(TREE)),
        ),
    )
    second = SegmentPlan(
        entries=(by_name_["grid"], by_name_["long"], by_name_["rng"]),
        parts=(
            Part(key=("long", None), box=None, shard_offset=4096, nbytes=904),
            Part(key=("grid", None), box=REST, shard_offset=0, nbytes=16),
            Part(key=("grid", None), box=REST, shard_offset=16, nbytes=20),
            Part(key=("rng", 1), box=None, shard_offset=0, nbytes=24),
        ),
    )
    sources = {
        (("long", None), None): BytesSource(LONG),
        (("grid", None), TOP): BytesSource(GRID[:1]),
        (("grid", None), REST): BytesSource(np.ascontiguousarray(GRID[1:])),
        (("~h/view", None), None): BytesSource(BASE),
        (("rng", 1), None): BytesSource(RANK),
    }
    plan = SavePlan(segments=(first, second), step=7, user={"run": "sample"}, world_size=2)
    write_checkpoint(path, plan, sources, save_id=SAVE_ID, created_us=1_700_000_000_000_000)
    return path
