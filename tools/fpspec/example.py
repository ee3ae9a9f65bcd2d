"""The worked examples of the specification: small checkpoints, written and shown as annotated hex.

The plain writer makes them, so the text can be compared with the code. The pages are made from the
bytes with the layouts that the code itself uses; nothing is interpreted twice.
"""

import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from fpformat.dtypes import by_name
from fpformat.limits import (
    BYTE_ORDER,
    DIRECTORY_ENTRY_NBYTES,
    DIRECTORY_HEADER_NBYTES,
    NONE,
)
from fpformat.names import MANIFEST_NAME, segment_name
from fpformat.read.source import BytesSource
from fpformat.records.index import KIND_EXTENT, KIND_OBJECT, OBJECT_TREE, TABLE_NAMES, TABLES
from fpformat.records.model import (
    Box,
    ObjectEntry,
    Part,
    SavePlan,
    SegmentPlan,
    ShardKey,
    TensorEntry,
    View,
)
from fpformat.records.tree import ArrayRef, Node, ParameterRef, TensorRef, dump_tree, parse_tree
from fpformat.records.wire import FOOTER_FIELDS, HEADER_FIELDS
from fpformat.write.writer import write_checkpoint

CREATED_US: Final = 1_700_000_000_000_000
_ROWS: Final = 2
_COLUMNS: Final = 512
_HALF_NBYTES: Final = _ROWS * _COLUMNS * 4
_HEX_WIDTH: Final = 16
_COUNTED_NBYTES: Final = 5
_DIRECTORY_HEADER_FIELDS: Final = (
    ("magic", "8s"),
    ("table_count", "I"),
    ("entry_nbytes", "I"),
    ("index_nbytes", "Q"),
    ("zero", "Q"),
)
_ENTRY_FIELDS: Final = (
    ("kind", "I"),
    ("flags", "I"),
    ("record_nbytes", "I"),
    ("zero", "I"),
    ("count", "Q"),
    ("offset", "Q"),
    ("sha256", "32s"),
)
Fields = Iterable[tuple[str, str]]
Sources = dict[ShardKey, BytesSource]


def pattern(nbytes: int) -> bytes:
    """Return the example's tensor bytes: byte i is i mod 251."""
    return bytes(i % 251 for i in range(nbytes))


def first_plan() -> tuple[SavePlan, Sources]:
    """Return plan and sources of two segments with one tensor cut by rows and one tie."""
    f32 = by_name("F32")
    weight = TensorEntry(name="w", dtype=f32, shape=(2 * _ROWS, _COLUMNS))
    tied = TensorEntry(name="w2", dtype=f32, shape=weight.shape, alias=weight.key)
    scale = TensorEntry(name="scale", dtype=f32, shape=())
    tree: Node = {
        "w": ParameterRef(1, True),
        "w2": TensorRef(2),
        "scale": TensorRef(0),
        "step": 7,
        "lr": 0.5,
    }
    halves = [Box(start=(row, 0), shape=(_ROWS, _COLUMNS)) for row in (0, _ROWS)]
    parts = [Part(key=weight.key, box=half, shard_offset=0, nbytes=_HALF_NBYTES) for half in halves]
    first = SegmentPlan(
        entries=(weight, tied, scale),
        parts=(parts[0], Part(key=scale.key, box=None, shard_offset=0, nbytes=4)),
        objects=(ObjectEntry(name="tree", kind=1, payload=dump_tree(tree)),),
    )
    second = SegmentPlan(entries=(weight,), parts=(parts[1],))
    content = pattern(2 * _HALF_NBYTES)
    sources: Sources = {
        (weight.key, halves[0]): BytesSource(content[:_HALF_NBYTES]),
        (weight.key, halves[1]): BytesSource(content[_HALF_NBYTES:]),
        (scale.key, None): BytesSource(struct.pack("<f", 0.5)),
    }
    plan = SavePlan(segments=(first, second), step=7, user={"note": "example"}, world_size=2)
    return plan, sources


def second_plan() -> tuple[SavePlan, Sources]:
    """Return plan and sources of two ranks with views, tensors of their own, and trees."""
    u8, f32 = by_name("U8"), by_name("F32")
    base = TensorEntry(name="~h/a", dtype=u8, shape=(16,), hidden=True)
    views = (
        TensorEntry(
            name="a", dtype=f32, shape=(2,), alias=View(target=base.key, strides=(2,), offset=1)
        ),
        TensorEntry(
            name="b",
            dtype=by_name("U16"),
            shape=(4,),
            alias=View(target=base.key, strides=(2,), offset=0),
        ),
    )
    weight = TensorEntry(name="w", dtype=f32, shape=(4, 4))
    upper, lower = (Box(start=(row, 0), shape=(2, 4)) for row in (0, 2))
    content = pattern(64)
    sources: Sources = {
        (base.key, None): BytesSource(content[:16]),
        (weight.key, upper): BytesSource(content[:32]),
        (weight.key, lower): BytesSource(content[32:]),
    }
    parts = (
        (
            Part(key=base.key, box=None, shard_offset=0, nbytes=16),
            Part(key=weight.key, box=upper, shard_offset=0, nbytes=16),
        ),
        (
            Part(key=weight.key, box=upper, shard_offset=16, nbytes=16),
            Part(key=weight.key, box=lower, shard_offset=0, nbytes=32),
        ),
    )
    segments = []
    for rank in range(2):
        own = TensorEntry(name="rng/~l0", dtype=u8, shape=(8,), scope=rank)
        sources[own.key, None] = BytesSource(bytes((rank,)) * 8)
        tree: Node = {
            "a": TensorRef(0),
            "b": TensorRef(1),
            "rng": [ArrayRef(2)],
            "w": ParameterRef(3, True),
            "rank": rank,
        }
        ranks = ((rank, rank + 1),)
        trees = (
            ObjectEntry(name="tree", kind=1, payload=dump_tree(tree), scope=rank, ranks=ranks),
        )
        notes = (ObjectEntry(name="note", kind=2, payload=b"resumed"),) if rank else ()
        segments.append(
            SegmentPlan(
                entries=(*views, own, weight, base),
                parts=(*parts[rank], Part(key=own.key, box=None, shard_offset=0, nbytes=8)),
                objects=(*notes, *trees),
            )
        )
    return SavePlan(segments=tuple(segments), world_size=2), sources


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A checkpoint of the text, and what is said of it before its bytes are shown."""

    plan: Callable[[], tuple[SavePlan, Sources]]
    save_id: bytes
    introduction: str


EXAMPLES: Final = {
    "first": Example(
        plan=first_plan,
        save_id=bytes(range(16)),
        introduction="""
Two ranks save a dict with five entries: ``w``, a parameter of type F32 and shape
[4, 512] whose rows 0 and 1 are written by the first rank and rows 2 and 3 by the
second; ``w2``, the same tensor under another name; ``scale``, a scalar of type F32 with
the value 0.5; ``step``, the integer 7; and ``lr``, the float 0.5. Byte i of ``w`` is
i mod 251. The save id is ``00 01 02`` ... ``0f``. A is 4096, T is 64, P is 262144.

The offsets on the left count from the start of the file. Runs of zeros between the parts
that are shown are left out.
""",
    ),
    "second": Example(
        plan=second_plan,
        save_id=bytes(range(16, 32)),
        introduction="""
Two ranks save one dict each. Both dicts have the same ``a``, ``b`` and ``w``. ``a`` has type
F32 and shape [2], ``b`` has type U16 and shape [4]; they overlap in 16 bytes of memory, of which
byte i is i. None covers the other, and their types differ, so the 16 bytes are stored once as the
hidden base ``~h/a`` of type U8. ``a`` has the stride 2 and the offset 1, in elements of 4 bytes:
its element 1 is bytes (1 + 1 * 2) * 4 = 12 to 15 of the base. ``b`` has the stride 2 and the
offset 0, in elements of 2 bytes: its element 3 is bytes (0 + 3 * 2) * 2 = 12 and 13.

``w`` is a parameter of type F32 and shape [4, 4], of which byte i is i. It has two boxes: rows 0
and 1, and rows 2 and 3. The first box has 32 bytes in two extents: bytes 0 to 15 in segment 0,
bytes 16 to 31 in segment 1. Both extents state the same box.

``rng`` is a list with one numpy array of 8 bytes, different on each rank, so each rank has a
tensor ``rng/~l0`` of its own scope, and ``rank`` is an integer. So the trees differ as well, and
each has the scope of its rank. An object of bytes, ``note``, stands beside the tree in segment 1.
The save id is ``10 11 12`` ... ``1f``. A, T and P are those of the first example; there is no
step.
""",
    ),
}


def write_example(path: Path, name: str) -> str:
    """Write an example to `path` and return its checkpoint id."""
    example = EXAMPLES[name]
    plan, sources = example.plan()
    report = write_checkpoint(path, plan, sources, save_id=example.save_id, created_us=CREATED_US)
    return report.checkpoint_id


def render_example(name: str) -> str:
    """Return a worked example as it stands in the specification."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "example"
        write_example(path, name)
        lines = [*EXAMPLES[name].introduction.splitlines(), ""]
        for ordinal in range(2):
            segment = segment_name(ordinal)
            lines += _segment(segment, (path / segment).read_bytes())
        lines += _manifest((path / MANIFEST_NAME).read_bytes())
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _title(text: str) -> list[str]:
    return [text, "=" * len(text), ""]


def _listing(caption: str, rows: Iterable[str]) -> list[str]:
    return [f"{caption}::", "", *(f"    {row}" for row in rows), ""]


def _rows(offset: int, content: bytes, note: str) -> Iterator[str]:
    """Yield hex rows of 16 bytes, the note on the first."""
    for start in range(0, len(content), _HEX_WIDTH):
        octets = content[start : start + _HEX_WIDTH].hex(" ")
        yield f"{offset + start:6}  {octets:<{3 * _HEX_WIDTH - 1}}  {note if not start else ''}"


def _shown(code: str, raw: bytes) -> str:
    """Return the value of an integer field after its name, nothing for bytes."""
    if code.endswith("s"):
        return ""
    number = int.from_bytes(raw, "little")
    if number == BYTE_ORDER and len(raw) == 2:
        return f" = {number:#06x}"
    return " = NONE" if code == "I" and number == NONE else f" = {number}"


def _fields(offset: int, record: bytes, fields: Fields) -> Iterator[str]:
    for name, code in fields:
        nbytes = struct.calcsize(f"<{code}")
        raw, record = record[:nbytes], record[nbytes:]
        if name == "zero" and nbytes > _HEX_WIDTH:
            yield f"{offset:6}  {'00 ... 00':<{3 * _HEX_WIDTH - 1}}  zero, {nbytes} bytes"
        else:
            shown = "" if name in ("crc", "zero") else _shown(code, raw)
            yield from _rows(offset, raw, f"{name}{shown}")
        offset += nbytes


def _dtype_fields(dtype: "np.dtype[Any]") -> Fields:
    codes = {1: "B", 2: "H", 4: "I", 8: "Q"}
    names = dtype.names or ()
    return [(name, codes[dtype[name].itemsize]) for name in names]


def _segment(name: str, content: bytes) -> list[str]:
    footer_at = len(content) - 128
    index_offset, index_nbytes = struct.unpack_from("<QQ", content, footer_at)
    region = content[index_offset : index_offset + index_nbytes]
    (table_count,) = struct.unpack_from("<I", region, 8)
    entries = [
        struct.unpack_from("<IIIIQQ", region, DIRECTORY_HEADER_NBYTES + at)
        for at in range(0, DIRECTORY_ENTRY_NBYTES * table_count, DIRECTORY_ENTRY_NBYTES)
    ]
    lines = _title(f"{name}, {len(content)} bytes")
    lines += _listing("Header record", _fields(0, content, HEADER_FIELDS))
    lines += _extents(content, index_offset, entries)
    lines += _listing("Index directory", _directory(index_offset, region, table_count))
    for kind, _, record_nbytes, _, count, offset in entries:
        table = region[offset : offset + record_nbytes * count]
        rows = list(_table(index_offset + offset, kind, table)) or ["(empty)"]
        lines += _listing(f"Table {kind}, {TABLE_NAMES[kind]}", rows)
    lines += _listing("Footer record", _fields(footer_at, content[footer_at:], FOOTER_FIELDS))
    return lines


def _directory(offset: int, region: bytes, table_count: int) -> Iterator[str]:
    yield from _fields(offset, region, _DIRECTORY_HEADER_FIELDS)
    for number in range(table_count):
        at = DIRECTORY_HEADER_NBYTES + DIRECTORY_ENTRY_NBYTES * number
        yield from _fields(offset + at, region[at:], _ENTRY_FIELDS)


def _table(offset: int, kind: int, table: bytes) -> Iterator[str]:
    dtype = TABLES[kind]
    if dtype.names is None:
        code = {1: "s", 4: "I", 8: "Q"}[dtype.itemsize]
        if code == "s":
            yield from _rows(offset, table, table.decode().replace("\0", "|"))
            return
        for at in range(0, len(table), dtype.itemsize):
            raw = table[at : at + dtype.itemsize]
            number = int.from_bytes(raw, "little")
            yield from _rows(offset + at, raw, f"{number:08x}" if code == "I" else str(number))
        return
    for at in range(0, len(table), dtype.itemsize):
        if at:
            yield ""
        yield from _fields(offset + at, table[at : at + dtype.itemsize], _dtype_fields(dtype))


def _extents(content: bytes, index_offset: int, entries: list[tuple[int, ...]]) -> list[str]:
    """Show the data region: start and end of a long extent, a short one or a tree whole."""
    tables = {
        kind: np.frombuffer(content, TABLES[kind], count, index_offset + offset)
        for kind, _, _, _, count, offset in entries
    }
    rows: list[str] = []
    for number, record in enumerate(tables[KIND_EXTENT]):
        at, nbytes = int(record["offset"]), int(record["stored_nbytes"])
        raw = content[at : at + nbytes]
        if record["owner_kind"] and tables[KIND_OBJECT][record["owner"]]["kind"] == OBJECT_TREE:
            rows += ["", f"extent {number}: the state tree, {nbytes} bytes"]
            rows += _tree(at, raw)
        elif nbytes > 2 * _HEX_WIDTH:
            rows += _rows(at, raw[:_HEX_WIDTH], f"extent {number}: {nbytes} bytes")
            rows += ["   ..."]
            rows += _rows(at + nbytes - _HEX_WIDTH, raw[-_HEX_WIDTH:], "its end")
        else:
            rows += _rows(at, raw, f"extent {number}: {nbytes} bytes")
    return _listing("Data region", rows)


def _tree(offset: int, tree: bytes) -> Iterator[str]:
    for nbytes, note in _tree_parts(parse_tree(tree, "tree")):
        yield from _rows(offset, tree[:nbytes], note)
        offset, tree = offset + nbytes, tree[nbytes:]


def _tree_parts(node: Node) -> Iterator[tuple[int, str]]:
    """Yield the size of each tag with its payload, up to the next tag, and what it says."""
    match node:
        case dict():
            yield _COUNTED_NBYTES, f"dict, {len(node)} entries"
            for pair in node.items():
                for child in pair:
                    yield from _tree_parts(child)
        case list():
            yield _COUNTED_NBYTES, f"list, nodes: {len(node)}"
            for child in node:
                yield from _tree_parts(child)
        case _:
            yield len(dump_tree(node)), _leaf_note(node)


def _leaf_note(node: Node) -> str:
    match node:
        case ParameterRef(index, requires_grad):
            return f"parameter: index {index}{', requires_grad' if requires_grad else ''}"
        case TensorRef(index):
            return f"tensor: index {index}"
        case ArrayRef(index):
            return f"numpy array: index {index}"
        case _:
            return f"{type(node).__name__} {node!r}"


def _manifest(document: bytes) -> list[str]:
    """Show the manifest, broken into lines for the eye only."""
    text = document.decode()
    width = 88
    pieces = [text[at : at + width] for at in range(0, len(text), width)]
    lines = _title(f"manifest.json, {len(document)} bytes")
    lines += ["The file is one line; it is broken here every 88 characters.", ""]
    return lines + _listing("Content", pieces)
