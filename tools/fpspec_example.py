"""The worked example of the specification: a small checkpoint, written and shown as annotated hex.

The plain writer makes it, so the text can be compared with the code. The pages are made from the
bytes with the layouts that the code itself uses; nothing is interpreted twice.
"""

import struct
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from fpformat.dtypes import by_name
from fpformat.index import TABLE_NAMES, TABLES
from fpformat.limits import (
    BYTE_ORDER,
    DIRECTORY_ENTRY_NBYTES,
    DIRECTORY_HEADER_NBYTES,
    NONE,
)
from fpformat.model import Box, ObjectEntry, Part, SavePlan, SegmentPlan, ShardKey, TensorEntry
from fpformat.names import MANIFEST_NAME, segment_name
from fpformat.source import BytesSource
from fpformat.tree import Node, ParameterRef, TensorRef, dump_tree
from fpformat.wire import FOOTER_FIELDS, HEADER_FIELDS
from fpformat.writer import write_checkpoint

SAVE_ID: Final = bytes(range(16))
CREATED_US: Final = 1_700_000_000_000_000
_ROWS: Final = 2
_COLUMNS: Final = 512
_HALF_NBYTES: Final = _ROWS * _COLUMNS * 4
_HEX_WIDTH: Final = 16
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
_TREE_PARTS: Final = (
    (5, "dict, 5 entries"),
    (6, "str 'w'"),
    (6, "parameter: index 1, requires_grad"),
    (7, "str 'w2'"),
    (5, "tensor: index 2"),
    (10, "str 'scale'"),
    (5, "tensor: index 0"),
    (9, "str 'step'"),
    (9, "int 7"),
    (7, "str 'lr'"),
    (9, "float 0.5"),
)

Fields = Iterable[tuple[str, str]]


def pattern(nbytes: int) -> bytes:
    """Return the example's tensor bytes: byte i is i mod 251."""
    return bytes(i % 251 for i in range(nbytes))


def example_plan() -> tuple[SavePlan, dict[ShardKey, BytesSource]]:
    """Return plan and sources of the example: two segments, one tensor cut by rows, one tie."""
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
    sources: dict[ShardKey, BytesSource] = {
        (weight.key, halves[0]): BytesSource(content[:_HALF_NBYTES]),
        (weight.key, halves[1]): BytesSource(content[_HALF_NBYTES:]),
        (scale.key, None): BytesSource(struct.pack("<f", 0.5)),
    }
    plan = SavePlan(segments=(first, second), step=7, user={"note": "example"}, world_size=2)
    return plan, sources


def write_example(path: Path) -> str:
    """Write the example to `path` and return its checkpoint id."""
    plan, sources = example_plan()
    report = write_checkpoint(path, plan, sources, save_id=SAVE_ID, created_us=CREATED_US)
    return report.checkpoint_id


def render_example() -> str:
    """Return the worked example as it stands in the specification."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "example"
        write_example(path)
        lines = [*_introduction()]
        for ordinal in range(2):
            name = segment_name(ordinal)
            lines += _segment(name, (path / name).read_bytes())
        lines += _manifest((path / MANIFEST_NAME).read_bytes())
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _introduction() -> Iterator[str]:
    yield from (
        "",
        "Two ranks save a dict with five entries: ``w``, a parameter of type F32 and shape",
        "[4, 512] whose rows 0 and 1 are written by the first rank and rows 2 and 3 by the",
        "second; ``w2``, the same tensor under another name; ``scale``, a scalar of type F32 with",
        "the value 0.5; ``step``, the integer 7; and ``lr``, the float 0.5. Byte i of ``w`` is",
        "i mod 251. The save id is ``00 01 02`` ... ``0f``. A is 4096, T is 64, P is 262144.",
        "",
        "The offsets on the left count from the start of the file. Runs of zeros between the parts",
        "that are shown are left out.",
        "",
    )


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
    _, _, record_nbytes, _, count, offset = entries[1]
    start = index_offset + offset
    table = np.frombuffer(content[start : start + record_nbytes * count], dtype=TABLES[2])
    rows: list[str] = []
    for number, record in enumerate(table):
        at, nbytes = int(record["offset"]), int(record["stored_nbytes"])
        raw = content[at : at + nbytes]
        if record["owner_kind"]:
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
    for nbytes, note in _TREE_PARTS:
        yield from _rows(offset, tree[:nbytes], note)
        offset, tree = offset + nbytes, tree[nbytes:]


def _manifest(document: bytes) -> list[str]:
    """Show the manifest, broken into lines for the eye only."""
    text = document.decode()
    width = 88
    pieces = [text[at : at + width] for at in range(0, len(text), width)]
    lines = _title(f"manifest.json, {len(document)} bytes")
    lines += ["The file is one line; it is broken here every 88 characters.", ""]
    return lines + _listing("Content", pieces)
