"""Every clause that a reader checks, broken once: one fault each, all checksums mended.

A row is a fault: its name, the clause that must be cited, and the patch. `open_checkpoint` must
refuse it, or where the fault is in the data region, `verify_checkpoint`; with the class of the
clause and the file in the message.
"""

import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from format.forge import Forge, Patches, Table
from format.samples import (
    EMPTY,
    GRID_ROW,
    HIDDEN_ROW,
    LONG_ROW,
    RNG_ROW,
    TIED_ROW,
    VIEW_ROW,
    write_sample,
)

from fpformat import FormatError, open_checkpoint, verify_checkpoint
from fpformat.clauses import CLAUSE_CLASS

NONE = 0xFFFFFFFF
NBYTES, NAME_OFFSET, SCOPE, DIMS, TARGET = (0, "Q"), (8, "I"), (12, "I"), (16, "I"), (20, "I")
DTYPE, NDIM, FLAGS, ZERO = (26, "H"), (28, "B"), (29, "B"), (30, "H")
E_OFFSET, E_STORED, E_NBYTES, E_SHARD = (0, "Q"), (8, "Q"), (16, "Q"), (24, "Q")
E_OWNER, E_DIMS, E_PIECE, E_CODEC, E_KIND, E_ZERO = (
    (32, "I"),
    (36, "I"),
    (40, "I"),
    (44, "B"),
    (45, "B"),
    (46, "H"),
)
O_NAME, O_SCOPE, O_EXTENT, O_KIND = (0, "I"), (4, "I"), (8, "I"), (14, "H")
LOADER, EMPTY_OBJECT, TREE = range(3)


def tables(patch: Callable[[dict[int, Table]], Any], segment: int = 0) -> dict[str, Any]:
    return {"patches": {segment: Patches(tables=patch)}}


def cell(kind: int, row: int, place: tuple[int, str], value: int, segment: int = 0):
    """Set one field of one record."""
    return tables(lambda t: t[kind].put(row, place[0], place[1], value), segment)


def tensor(row: int, place: tuple[int, str], value: int, segment: int = 0):
    return cell(1, row, place, value, segment)


def extent(row: int, place: tuple[int, str], value: int, segment: int = 0):
    return cell(2, row, place, value, segment)


def dim(position: int, value: int, segment: int = 0):
    return cell(3, position, (0, "Q"), value, segment)


def put(stage: str, offset: int, code: str, value: int, segment: int = 0, **options: bool):
    """Set one field at a position of a stage; negative positions count from the end."""

    def patch(buffer: bytearray) -> None:
        at = offset if offset >= 0 else len(buffer) + offset
        struct.pack_into("<" + code, buffer, at, value)

    return {"patches": {segment: Patches(**{stage: patch}, **options)}}


def several(*changes: tuple[int, int, tuple[int, str], int]):
    def patch(t: dict[int, Table]) -> None:
        for kind, row, place, value in changes:
            t[kind].put(row, place[0], place[1], value)

    return tables(patch)


def header(offset: int, code: str, value: int, **options: bool):
    return put("header", offset, code, value, **options)


def manifest(patch: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    return {"manifest": patch}


def inner(old: bytes, new: bytes) -> dict[str, Any]:
    def patch(document: bytes) -> bytes:
        assert old in document
        return document.replace(old, new, 1)

    return {"inner": patch}


def swap_tensors(t: dict[int, Table]) -> None:
    """Exchange the records of grid and long, all running fields kept right."""
    grid, long = (bytes(t[1].body[32 * row : 32 * row + 32]) for row in (GRID_ROW, LONG_ROW))
    t[1].body[32:96] = long + grid
    t[4].body[6:16] = b"long\0grid\0"
    for row, name_offset, dims in ((GRID_ROW, 6, 2), (LONG_ROW, 11, 3)):
        t[1].put(row, *NAME_OFFSET, name_offset)
        t[1].put(row, *DIMS, dims)
    t[3].body[16:40] = struct.pack("<QQQ", 5000, 4, 3)


def drop_table(kind: int) -> dict[str, Any]:
    return tables(lambda t: t.pop(kind) and None)


def add_table(kind: int, flags: int) -> dict[str, Any]:
    return tables(lambda t: t.update({kind: Table(kind, 4, bytearray(8), flags)}))


def set_table(kind: int, **values: int) -> dict[str, Any]:
    def patch(t: dict[int, Table]) -> None:
        for name, value in values.items():
            setattr(t[kind], name, value)

    return tables(patch)


def append(kind: int, body: bytes) -> dict[str, Any]:
    return tables(lambda t: t[kind].body.extend(body))


def lengthen(index: bytearray) -> None:
    """Add a block of zeros and count it."""
    index.extend(bytes(4096))
    struct.pack_into("<Q", index, 16, len(index))


def many_dims(t: dict[int, Table]) -> None:
    """Give the empty tensor 65 dimensions."""
    t[1].put(EMPTY, *NDIM, 65)
    t[3].body[:0] = struct.pack("<63Q", *[0] * 63)
    for row in range(1, len(t[1])):
        t[1].put(row, *DIMS, t[1].get(row, *DIMS) + 63)
    for row in range(len(t[2])):
        if t[2].get(row, *E_DIMS) != NONE:
            t[2].put(row, *E_DIMS, t[2].get(row, *E_DIMS) + 63)


def scope_tree(start: int, stop: int, *, scope: int = 0) -> Callable[[dict[int, Table]], None]:
    def patch(t: dict[int, Table]) -> None:
        t[6].put(TREE, *O_SCOPE, scope)
        t[7] = Table(7, 12, bytearray(struct.pack("<III", TREE, start, stop)))

    return patch


def nest(state: dict[str, Any]) -> None:
    value: Any = []
    for _ in range(20):
        value = [value]
    state["extensions"] = [{"data": value, "must_understand": False, "name": "x-deep"}]


def extension(*names: str, must: bool = False) -> Callable[[dict[str, Any]], None]:
    def patch(state: dict[str, Any]) -> None:
        state["extensions"] = [
            {"data": [], "must_understand": must, "name": name} for name in names
        ]

    return patch


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    # header
    "header-magic": ("HDR-1", header(1, "B", 0x51)),
    "header-crc": ("HDR-2", header(124, "I", 1, sum_header=False)),
    "header-flip": ("HDR-2", header(70, "B", 1, sum_header=False)),
    "major-2": ("HDR-3", header(8, "H", 2)),
    "incompat-bit-7": ("HDR-4", header(16, "Q", 1 << 7)),
    "header-nbytes": ("HDR-5", header(12, "I", 256)),
    "big-endian": ("HDR-6", header(40, "H", 0x0201)),
    "checksum-algorithm": ("HDR-7", header(42, "H", 2)),
    "align-too-small": ("HDR-8", header(64, "B", 11)),
    "align-too-large": ("HDR-8", header(64, "B", 22)),
    "tensor-align-too-large": ("HDR-8", header(65, "B", 13)),
    "piece-too-small": ("HDR-8", header(66, "B", 13)),
    "header-reserved": ("HDR-9", header(100, "B", 1)),
    "header-block-not-zero": ("HDR-9", header(4095, "B", 1)),
    "other-save-id": ("HDR-10", header(48, "B", 0xEE)),
    "other-ordinal": ("HDR-10", header(44, "I", 1)),
    "feature-bit-not-in-manifest": ("HDR-11", header(32, "Q", 1)),
    "zstd-bit-not-in-manifest": ("HDR-11", header(16, "Q", 1)),
    # file and footer
    "block-larger-than-file": ("SEG-2", header(64, "B", 16)),
    "footer-magic": ("FTR-1", put("footer", -1, "B", 0)),
    "footer-crc": ("FTR-2", put("footer", -12, "I", 1, sum_footer=False)),
    "footer-save-id": ("FTR-3", put("footer", -80, "B", 0xEE)),
    "footer-ordinal": ("FTR-3", put("footer", -56, "I", 9)),
    "footer-segment-nbytes": ("FTR-4", put("footer", -64, "Q", 4096)),
    "footer-index-offset": ("FTR-5", put("footer", -128, "Q", 4096)),
    "footer-reserved": ("FTR-6", put("footer", -50, "B", 1)),
    "footer-block-not-zero": ("FTR-6", put("footer", 0, "B", 1)),
    "index-not-on-a-block": (
        "FTR-7",
        {
            **put("footer", -128, "Q", 4096 + 64),
            "manifest": lambda m: m["segments"][0].update(index_offset=4096 + 64),
        },
    ),
    "index-past-the-file": (
        "FTR-7",
        {
            **put("footer", -120, "Q", 1 << 20),
            "manifest": lambda m: m["segments"][0].update(index_nbytes=1 << 20),
        },
    ),
    "block-between-index-and-footer": (
        "SEG-6",
        {
            "patches": {
                0: Patches(
                    index=lambda b: b.extend(bytes(4096)),
                    footer=lambda b: struct.pack_into("<Q", b, len(b) - 120, 4096),
                )
            },
            "manifest": lambda m: m["segments"][0].update(index_nbytes=4096),
        },
    ),
    # index directory
    "directory-digest": ("IDX-1", put("footer", -112, "B", 0, sum_directory=False)),
    "directory-magic": ("IDX-2", put("index", 0, "B", 0x41)),
    "entry-nbytes": ("IDX-2", put("index", 12, "I", 32)),
    "directory-zero": ("IDX-2", put("index", 24, "Q", 1)),
    "directory-too-long": ("IDX-2", put("index", 8, "I", 1000)),
    "directory-index-nbytes": ("IDX-3", put("index", 16, "Q", 8192)),
    "kinds-descend": ("IDX-4", put("index", 32 + 64, "I", 1)),
    "table-offset": ("IDX-5", set_table(2, shift=64)),
    "table-count-past-region": ("IDX-5", set_table(6, count=1 << 40)),
    "region-too-long": ("IDX-6", {"patches": {0: Patches(index=lengthen)}}),
    "padding-between-tables": ("IDX-7", put("index", 32 + 64 * 6 + 8, "B", 1)),
    "padding-after-tables": ("IDX-7", put("index", -1, "B", 1)),
    "table-flags": ("IDX-8", set_table(1, flags=3)),
    "table-optional": ("IDX-8", set_table(1, flags=0)),
    "entry-zero-field": ("IDX-8", set_table(3, zero=1)),
    "record-nbytes": ("IDX-9", put("index", 32 + 64 + 8, "I", 24)),
    "no-dims-table": ("IDX-10", drop_table(3)),
    "no-crc-table": ("IDX-10", drop_table(5)),
    "empty-ranks-table": ("IDX-10", tables(lambda t: t.update({7: Table(7, 12, bytearray())}))),
    "unknown-table-without-records": (
        "IDX-9",
        tables(lambda t: t.update({77: Table(77, 0, bytearray(), 0, count=0)})),
    ),
    "stored-sizes-without-zstd": ("IDX-10", add_table(8, 1)),
    "table-digest": ("IDX-11", put("index", 32 + 32, "B", 0)),
    "unknown-table": ("IDX-12", add_table(77, 1)),
    # tensor table
    "tensor-order": ("TEN-1", tables(swap_tensors)),
    "tensor-dims-index": ("TEN-2", tensor(GRID_ROW, DIMS, 0)),
    "tensor-name-offset": ("TEN-3", tensor(GRID_ROW, NAME_OFFSET, 0)),
    "dtype-0": ("TEN-4", tensor(GRID_ROW, DTYPE, 0)),
    "dtype-999": ("TEN-4", tensor(GRID_ROW, DTYPE, 999)),
    "too-many-dimensions": ("TEN-5", tables(many_dims)),
    "tensor-nbytes": ("TEN-6", tensor(LONG_ROW, NBYTES, 5001)),
    "size-overflow": ("TEN-6", dim(4, 1 << 62)),
    "size-overflow-beside-zero": ("TEN-6", dim(1, 1 << 53)),
    "dimension-2-64": ("TEN-6", dim(1, (1 << 64) - 1)),
    "tensor-flags": ("TEN-7", tensor(GRID_ROW, FLAGS, 4)),
    "tensor-zero-field": ("TEN-7", tensor(GRID_ROW, ZERO, 1)),
    "scope-outside-world": ("TEN-8", tensor(RNG_ROW, SCOPE, 2)),
    "declared-with-other-dtype": ("TEN-9", tensor(2, DTYPE, 8, segment=1)),
    "declared-with-other-shape": (
        "TEN-9",
        several((3, 5, (0, "Q"), 4), (1, RNG_ROW, NBYTES, 32)),
    ),
    # aliases
    "alias-of-nothing": ("ALI-1", tensor(TIED_ROW, TARGET, 99)),
    "alias-of-alias": ("ALI-1", tensor(TIED_ROW, TARGET, VIEW_ROW)),
    "alias-of-itself": ("ALI-1", tensor(TIED_ROW, TARGET, TIED_ROW)),
    "alias-with-other-dtype": ("ALI-2", tensor(TIED_ROW, DTYPE, 6)),
    "alias-with-other-shape": ("ALI-2", tensor(TIED_ROW, TARGET, LONG_ROW)),
    "view-past-its-target": ("ALI-3", dim(12, 3)),
    "view-stride-overflow": ("ALI-3", dim(10, 1 << 63)),
    "view-offset-overflow": ("ALI-3", dim(12, (1 << 64) - 1)),
    "view-without-target": ("ALI-4", tensor(VIEW_ROW, TARGET, NONE)),
    "hidden-2d": ("ALI-4", tensor(GRID_ROW, FLAGS, 2)),
    "hidden-by-another-name": (
        "ALI-7",
        tables(lambda t: t[4].body.__setitem__(slice(-25, -17), b"zh/view\0")),
    ),
    "prefix-of-hidden-bases": ("ALI-7", tensor(HIDDEN_ROW, FLAGS, 0)),
    "alias-of-a-hidden-base": ("ALI-7", tensor(TIED_ROW, TARGET, HIDDEN_ROW)),
    "alias-owns-bytes": ("ALI-5", extent(2, E_OWNER, VIEW_ROW)),
    # extents
    "extent-empty": ("EXT-1", several((2, 1, E_NBYTES, 0), (2, 1, E_STORED, 0))),
    "extent-stored-differs": ("EXT-1", extent(1, E_NBYTES, 8)),
    "extent-size-2-60": ("EXT-1", several((2, 1, E_NBYTES, 1 << 60), (2, 1, E_STORED, 1 << 60))),
    "owner-unknown": ("EXT-2", extent(1, E_OWNER, 7)),
    "owner-kind": ("EXT-2", extent(1, E_KIND, 2)),
    "half-an-element": ("EXT-3", extent(1, E_SHARD, 2)),
    "past-its-shard": ("EXT-3", extent(1, E_SHARD, 12)),
    "shard-offset-2-63": ("EXT-3", extent(0, E_SHARD, 1 << 63)),
    "piece-first": ("EXT-4", extent(1, E_PIECE, 5)),
    "extent-dims-index": ("EXT-5", extent(1, E_DIMS, 0)),
    "box-outside": ("EXT-6", dim(14, 4)),
    "box-side-zero": ("EXT-6", dim(16, 0)),
    "box-start-2-64": ("EXT-6", dim(14, (1 << 64) - 1)),
    "codec-9": ("EXT-8", extent(1, E_CODEC, 9)),
    "extent-zero-field": ("EXT-9", extent(1, E_ZERO, 1)),
    "bytes-stored-twice": ("EXT-10", extent(0, E_SHARD, 0, segment=1)),
    "box-bytes-missing": ("EXT-10", extent(2, E_SHARD, 0, segment=1)),
    "boxes-overlap": ("EXT-11", dim(14, 1)),
    "declared-not-stored": ("EXT-11", several((3, 0, (0, "Q"), 1), (1, EMPTY, NBYTES, 56))),
    "object-with-box": ("EXT-13", extent(3, E_SHARD, 8)),
    "object-extent-of-nobody": ("EXT-13", cell(6, LOADER, O_EXTENT, NONE)),
    "compressed-without-feature": ("EXT-14", extent(1, E_CODEC, 1)),
    "extent-misplaced": ("SEG-3", extent(1, E_OFFSET, 8192 + 64)),
    "extent-offset-2-60": ("SEG-3", extent(1, E_OFFSET, 1 << 60)),
    "index-misplaced": ("SEG-4", {"patches": {0: Patches(data=lambda b: b.extend(bytes(4096)))}}),
    "dims-left-over": ("DIM-1", append(3, bytes(8))),
    "dims-too-few": ("DIM-1", tables(lambda t: t[3].body.__delitem__(slice(-8, None)))),
    "names-left-over": ("NAM-1", append(4, b"x\0")),
    "name-with-nul": ("NAM-1", tables(lambda t: t[4].body.__setitem__(7, 0))),
    "name-not-utf8": ("NAM-2", tables(lambda t: t[4].body.__setitem__(7, 0xFF))),
    "pieces-left-over": ("SUM-3", append(5, bytes(4))),
    # objects
    "object-order": (
        "OBJ-1",
        tables(lambda t: t[4].body.__setitem__(slice(-17, -10), b"zoader\0")),
    ),
    "object-name-offset": ("OBJ-1", cell(6, LOADER, O_NAME, 0)),
    "object-kind": ("OBJ-2", cell(6, LOADER, O_KIND, 3)),
    "tree-by-another-name": ("OBJ-3", cell(6, LOADER, O_KIND, 1)),
    "tree-name-for-bytes": ("OBJ-3", cell(6, TREE, O_KIND, 2)),
    "object-extent-of-another": ("OBJ-4", cell(6, LOADER, O_EXTENT, 4)),
    "object-extent-of-tensor": ("OBJ-4", cell(6, EMPTY_OBJECT, O_EXTENT, 0)),
    "ranks-outside-world": ("OBJ-5", tables(scope_tree(0, 3))),
    "ranks-empty": ("OBJ-5", tables(scope_tree(1, 1))),
    "ranks-not-its-scope": ("OBJ-5", tables(scope_tree(0, 2, scope=1))),
    "ranks-of-global-tree": ("OBJ-5", tables(scope_tree(0, 2, scope=NONE))),
    "rank-without-tree": ("OBJ-6", tables(scope_tree(0, 1))),
    "object-scope-outside-world": ("OBJ-7", cell(6, TREE, O_SCOPE, 5)),
    # manifest
    "manifest-of-something-else": ("MAN-1", {"document": lambda _: b'{"name": "app"}'}),
    "manifest-empty": ("MAN-2", {"document": lambda _: b""}),
    "manifest-zeros": ("MAN-2", {"document": lambda d: bytes(len(d))}),
    "manifest-truncated": ("MAN-2", {"document": lambda d: d[:-1]}),
    "manifest-start-damaged": ("MAN-2", {"document": lambda d: b"[" + d[1:]}),
    "manifest-id": ("MAN-3", {"document": lambda d: d.replace(b'"run"', b'"ran"')}),
    "manifest-too-large": ("MAN-4", {"document": lambda d: d + b" " * (16 << 20)}),
    "white-space": ("MAN-5", inner(b',"version"', b', "version"')),
    "duplicate-key": ("MAN-5", inner(b',"version"', b',"version":[1,0],"version"')),
    "key-order": (
        "MAN-5",
        inner(
            b'"user":[["run","sample"]],"version":[1,0]',
            b'"version":[1,0],"user":[["run","sample"]]',
        ),
    ),
    "escape": ("MAN-5", inner(b'"sample"', b'"s\\u0061mple"')),
    "float": ("MAN-5", inner(b'"step":7', b'"step":7.0')),
    "null": ("MAN-5", inner(b'"step":7', b'"step":null')),
    "negative": ("MAN-5", inner(b'"step":7', b'"step":-7')),
    "integer-2-53": ("MAN-5", inner(b'"step":7', b'"step":9007199254740992')),
    "integer-of-5000-digits": ("MAN-5", inner(b'"step":7', b'"step":' + b"9" * 5000)),
    "lone-surrogate": ("MAN-5", inner(b'"sample"', b'"\\ud800"')),
    "not-utf8": ("MAN-5", inner(b'"sample"', b'"\xff"')),
    "trailing-comma": ("MAN-5", inner(b'"world_size":2', b'"world_size":2,')),
    "unknown-key": ("MAN-6", manifest(lambda m: m.update(extra=1))),
    "missing-key": ("MAN-6", manifest(lambda m: m.pop("created_us"))),
    "world-size-string": ("MAN-6", manifest(lambda m: m.update(world_size="2"))),
    "step-bool": ("MAN-6", manifest(lambda m: m.update(step=True))),
    "segment-unknown-key": ("MAN-6", manifest(lambda m: m["segments"][0].update(path="x"))),
    "segment-crc-upper-case": (
        "MAN-6",
        manifest(lambda m: m["segments"][0].update(crc32c="ABCDEF01")),
    ),
    "save-id-short": ("MAN-6", manifest(lambda m: m.update(save_id="00"))),
    "user-object": ("MAN-6", manifest(lambda m: m.update(user={"a": "b"}))),
    "version-string": ("MAN-6", manifest(lambda m: m.update(version="1.0"))),
    "version-2": ("MAN-7", manifest(lambda m: m.update(version=[2, 0]))),
    "user-order": ("MAN-8", manifest(lambda m: m.update(user=[["b", ""], ["a", ""]]))),
    "user-twice": ("MAN-8", manifest(lambda m: m.update(user=[["a", ""], ["a", ""]]))),
    "extension-order": ("MAN-8", manifest(extension("x-b", "x-a"))),
    "extension-must": ("MAN-9", manifest(extension("x-a", must=True))),
    "no-segments": ("MAN-10", manifest(lambda m: m.update(segments=[]))),
    "nesting": ("MAN-10", manifest(nest)),
    "other-format": ("MAN-11", manifest(lambda m: m.update(format="other"))),
    "world-size-2-32": ("MAN-11", manifest(lambda m: m.update(world_size=1 << 32))),
    "world-size-0": ("MAN-11", manifest(lambda m: m.update(world_size=0))),
    "unknown-incompat": ("FEA-1", manifest(lambda m: m["features"].update(incompat=["x-new"]))),
    "size-in-manifest": ("SEG-1", manifest(lambda m: m["segments"][0].update(nbytes=4096))),
    "index-in-manifest": ("FTR-5", manifest(lambda m: m["segments"][0].update(index_offset=4096))),
}


def refuse(path: Path) -> FormatError:
    with pytest.raises(FormatError) as caught:
        open_checkpoint(path).close()
    return caught.value


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    return write_sample(tmp_path_factory.mktemp("sample") / "c")


def marked(faults: dict[str, tuple[str, dict[str, Any]]]):
    return [
        pytest.param(clause, options, id=name, marks=pytest.mark.clause(clause))
        for name, (clause, options) in faults.items()
    ]


@pytest.mark.parametrize(("clause", "options"), marked(FAULTS))
def test_the_reader_refuses(sample, tmp_path, clause, options):
    error = refuse(Forge(sample, **options).write(tmp_path / "broken"))
    assert error.clause == clause, str(error)
    assert error.error_class == CLAUSE_CLASS[clause]
    assert str(tmp_path / "broken") in error.where


DATA_FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "padding-not-zero": ("SEG-5", put("data", 4096 + 20, "B", 1)),
    "padding-before-index": ("SEG-5", put("data", -1, "B", 1)),
    "piece-checksum": ("SUM-2", put("data", 0, "B", 99, sum_pieces=False)),
    "tree-checksum": ("SUM-2", put("data", 4096 + 192, "B", 99, sum_pieces=False)),
    "file-checksum": ("SUM-4", manifest(lambda m: m["segments"][1].update(crc32c="00000000"))),
}


@pytest.mark.parametrize(("clause", "options"), marked(DATA_FAULTS))
def test_verification_reports(sample, tmp_path, clause, options):
    path = Forge(sample, **options).write(tmp_path / "broken")
    open_checkpoint(path).close()
    assert clause in [problem.clause for problem in verify_checkpoint(path).problems]


IGNORED = {
    "a-newer-minor": ("HDR-12", header(10, "H", 9)),
    "a-table-that-may-be-ignored": ("IDX-12", add_table(77, 0)),
    "an-extension-that-may-be-ignored": ("MAN-9", manifest(extension("x-a", "x-b"))),
    "a-newer-minor-manifest": ("MAN-7", manifest(lambda m: m.update(version=[1, 9]))),
}


@pytest.mark.parametrize(("clause", "options"), marked(IGNORED))
def test_the_reader_accepts(sample, tmp_path, clause, options):
    assert verify_checkpoint(Forge(sample, **options).write(tmp_path / "newer")).problems == ()


def compat(word: str, offset: int) -> dict[str, Any]:
    bit = put("header", offset, "Q", 1 << 63)["patches"][0]
    return {
        "patches": {0: bit, 1: bit},
        "manifest": lambda m: m["features"].update({word: ["x-extra"]}),
    }


@pytest.mark.clause("FEA-3", "FEA-4", "HDR-11")
@pytest.mark.parametrize(("word", "offset"), [("ro_compat", 24), ("compat", 32)])
def test_features_that_a_reader_need_not_know(sample, tmp_path, word, offset):
    path = Forge(sample, **compat(word, offset)).write(tmp_path / "newer")
    assert verify_checkpoint(path).problems == ()


@pytest.mark.clause("DIR-1")
def test_no_manifest_is_incomplete(sample, tmp_path):
    (tmp_path / "c").mkdir()
    assert refuse(tmp_path / "c").clause == "DIR-1"


@pytest.mark.clause("DIR-2")
def test_a_missing_segment_is_incomplete(sample, tmp_path):
    path = Forge(sample).write(tmp_path / "c")
    (path / "seg-000001.fps").unlink()
    error = refuse(path)
    assert (error.clause, error.error_class) == ("DIR-2", "incomplete")
    assert "seg-000001.fps" in error.where


@pytest.mark.clause("DIR-4")
def test_other_files_are_ignored(sample, tmp_path):
    path = Forge(sample).write(tmp_path / "c")
    (path / "seg-000002.fps").write_bytes(b"stale")
    assert verify_checkpoint(path).problems == ()


@pytest.mark.clause("DIR-5")
@pytest.mark.parametrize("name", ["manifest.json", "seg-000001.fps"])
def test_symbolic_links_are_followed_only_on_request(sample, tmp_path, name):
    path = Forge(sample).write(tmp_path / "c")
    os.rename(path / name, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", path / name)
    assert refuse(path).clause == "DIR-5"
    open_checkpoint(path, follow_symlinks=True).close()


@pytest.mark.clause("DIR-5")
@pytest.mark.parametrize("name", ["manifest.json", "seg-000000.fps"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_only_regular_files_are_read(sample, tmp_path, name, make):
    path = Forge(sample).write(tmp_path / "c")
    (path / name).unlink()
    make(path / name)
    assert refuse(path).clause == "DIR-5"


@pytest.mark.clause("DIR-5")
@pytest.mark.parametrize("name", ["manifest.json", "seg-000000.fps"])
def test_a_socket_cannot_be_opened_and_is_no_regular_file(sample, tmp_path, monkeypatch, name):
    path = Forge(sample).write(tmp_path / "c")
    (path / name).unlink()
    monkeypatch.chdir(path)  # The path of a socket may not be long.
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(name)
    error = refuse(path)
    assert (error.clause, error.error_class) == ("DIR-5", "invalid")


@pytest.mark.clause("DIR-5")
@pytest.mark.parametrize("name", ["manifest.json", "seg-000000.fps"])
def test_a_link_to_a_device_is_no_regular_file(sample, tmp_path, name):
    path = Forge(sample).write(tmp_path / "c")
    (path / name).unlink()
    (path / name).symlink_to("/dev/null")
    with pytest.raises(FormatError) as caught:
        open_checkpoint(path, follow_symlinks=True)
    assert (caught.value.clause, caught.value.error_class) == ("DIR-5", "invalid")


@pytest.mark.clause("DIR-6")
@pytest.mark.parametrize("name", ["model.bin", "model.bin/c", "model.bin/c/d", "dead/c"])
def test_a_file_is_no_checkpoint(tmp_path, name):
    (tmp_path / "model.bin").write_bytes(b"x" * 100)
    (tmp_path / "dead").symlink_to("model.bin")
    error = refuse(tmp_path / name)
    assert (error.clause, error.error_class) == ("DIR-6", "not_fpformat")


@pytest.mark.clause("DIR-7")
def test_a_path_that_is_not_there(tmp_path):
    error = refuse(tmp_path / "nowhere")
    assert (error.clause, error.error_class) == ("DIR-7", "io")
    assert isinstance(error.__cause__, OSError)


@pytest.mark.clause("SEG-1")
@pytest.mark.parametrize("change", [-1, -4096, +1, +4096])
def test_a_file_of_another_size(sample, tmp_path, change):
    path = Forge(sample).write(tmp_path / "c")
    segment = path / "seg-000000.fps"
    os.truncate(segment, segment.stat().st_size + change)
    error = refuse(path)
    assert (error.clause, error.error_class) == ("SEG-1", "corrupt")


@pytest.mark.clause("HDR-10")
def test_swapped_segments(sample, tmp_path):
    path = Forge(sample).write(tmp_path / "c")
    sizes = manifest_sizes(path)
    assert sizes[0] != sizes[1]
    other = write_sample(tmp_path / "d")
    raw = bytearray((other / "seg-000001.fps").read_bytes())
    raw[48:64] = b"another save id!"
    (path / "seg-000001.fps").write_bytes(raw)
    assert refuse(path).clause == "HDR-2"


def manifest_sizes(path: Path) -> list[int]:
    state = json.loads((path / "manifest.json").read_bytes())
    return [record["nbytes"] for record in state["checkpoint"]["segments"]]


@pytest.mark.clause("EXT-7")
def test_a_box_that_is_the_whole_tensor(sample, tmp_path):
    def whole(t: dict[int, Table]) -> None:
        struct.pack_into("<QQQQ", t[3].body, 14 * 8, 0, 0, 4, 3)

    assert refuse(Forge(sample, **tables(whole)).write(tmp_path / "c")).clause == "EXT-7"


@pytest.mark.clause("IDX-12", "TEN-10")
def test_every_row_of_the_faults_is_a_known_clause():
    for clause, _ in (*FAULTS.values(), *DATA_FAULTS.values(), *IGNORED.values()):
        assert clause in CLAUSE_CLASS or clause == "HDR-12"
    assert HIDDEN_ROW == 6


@pytest.mark.clause("DIR-2")
def test_a_segment_on_another_volume(sample, tmp_path):
    path = Forge(sample).write(tmp_path / "c")
    roots = [tmp_path / "disk1", tmp_path / "disk2"]
    folder = roots[1] / bytes(range(16)).hex()
    folder.mkdir(parents=True)
    os.rename(path / "seg-000001.fps", folder / "seg-000001.fps")
    with pytest.raises(FormatError, match="DIR-2"):
        open_checkpoint(path)
    with pytest.raises(FormatError, match=r"disk1.*DIR-2"):
        open_checkpoint(path, volumes=[str(roots[0])])
    with open_checkpoint(path, volumes=list(map(str, roots))) as checkpoint:
        assert len(checkpoint.read("grid")) == 48
    assert verify_checkpoint(path, volumes=list(map(str, roots))).problems == ()
