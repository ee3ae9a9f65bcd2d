"""Text, lock, code and tests of the specification agree.

Every clause that a reader can find broken has code that enforces it and a test that is marked with
it; every id that anybody mentions exists; the tables of the text are the structures of the code.
"""

import struct
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from fpformat import limits
from fpformat.clauses import CLAUSE_CLASS, ErrorClass
from fpformat.dtypes import DTYPES
from fpformat.names import name_of
from fpformat.records import index, manifest, wire
from fpformat.records.tree import parse_tree
from fpspec.trace import (
    LOCK,
    SPEC,
    Clause,
    collect_evidence,
    dump_lock,
    lint,
    marked_ids,
    parse_clauses,
    parse_tables,
    unknown_ids,
)

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / SPEC).read_text(encoding="utf-8")
CLAUSES = parse_clauses(TEXT)
TABLES = parse_tables(TEXT)
EVIDENCE = collect_evidence(ROOT, CLAUSES)
CLASSED = [clause for clause in CLAUSES if clause.error_class is not None]
INTEGERS = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q"}

Layout = list[tuple[str, int, int]]


def text_layout(table: str) -> Layout:
    """Return name, offset and size of each field of a byte table, types checked against sizes."""
    layout = []
    for row in TABLES[table]:
        size = int(row["size"])
        expected = f"bytes[{size}]" if row["type"].startswith("bytes") else f"u{8 * size}"
        assert row["type"] == expected, f"{table}: {row['field']}"
        layout.append((row["field"], int(row["offset"]), size))
    return layout


def fields_layout(fields: tuple[tuple[str, str], ...]) -> Layout:
    layout, offset = [], 0
    for name, code in fields:
        size = struct.calcsize(f"<{code}")
        layout.append((name, offset, size))
        offset += size
    return layout


def dtype_layout(dtype: "np.dtype[Any]") -> Layout:
    assert dtype.fields is not None
    return [(name, at, part.itemsize) for name, (part, at, *_) in dtype.fields.items()]


def struct_sizes(code: str) -> list[int]:
    """Return the sizes of the fields of a struct format without padding."""
    sizes, digits = [], ""
    for letter in code.lstrip("<"):
        if letter.isdigit():
            digits += letter
            continue
        sizes.append(struct.calcsize(f"<{digits}{letter}"))
        digits = ""
    return sizes


def test_text_has_no_lint() -> None:
    assert lint(TEXT) == []


def test_lock_matches_text() -> None:
    lock = (ROOT / LOCK).read_text(encoding="utf-8")
    assert lock == dump_lock(CLAUSES, lock), (
        "a clause was reworded; review, then: python tools/fpspec lock"
    )


def test_classes_of_text_and_code_agree() -> None:
    assert {clause.id: clause.error_class for clause in CLASSED} == CLAUSE_CLASS
    assert [row["class"] for row in TABLES["table-error-classes"]] == list(get_args(ErrorClass))


def test_every_mentioned_id_exists() -> None:
    assert unknown_ids(ROOT, CLAUSES) == []


@pytest.mark.parametrize("clause", CLASSED, ids=lambda clause: clause.id)
def test_clause_is_enforced_in_code(clause: Clause) -> None:
    core = [place for place in EVIDENCE[clause.id].code if not place.startswith("tools")]
    assert core, f"nothing in fpformat/ raises {clause.id}"


@pytest.mark.parametrize("clause", CLASSED, ids=lambda clause: clause.id)
def test_clause_has_a_marked_test(clause: Clause) -> None:
    assert EVIDENCE[clause.id].tests, f"no test is marked with {clause.id}"


@pytest.mark.parametrize(
    ("table", "layout"),
    [
        ("table-header", fields_layout(wire.HEADER_FIELDS)),
        ("table-footer", fields_layout(wire.FOOTER_FIELDS)),
        ("table-tensor", dtype_layout(index.TENSOR)),
        ("table-extent", dtype_layout(index.EXTENT)),
        ("table-object", dtype_layout(index.OBJECT)),
        ("table-object-ranks", dtype_layout(index.OBJECT_RANKS)),
    ],
)
def test_byte_table_is_the_structure_of_the_code(table: str, layout: Layout) -> None:
    assert text_layout(table) == layout


@pytest.mark.parametrize(
    ("table", "code"),
    [
        ("table-directory-header", index._DIRECTORY_HEADER),
        ("table-directory-entry", index._ENTRY),
    ],
)
def test_directory_table_has_the_sizes_of_the_code(table: str, code: struct.Struct) -> None:
    layout = text_layout(table)
    assert [size for _, _, size in layout] == struct_sizes(code.format)
    offsets = [0, *np.cumsum([size for _, _, size in layout]).tolist()]
    assert [offset for _, offset, _ in layout] == offsets[:-1]
    assert offsets[-1] == code.size


def test_kinds_of_tables_are_those_of_the_code() -> None:
    rows = [row for row in TABLES["table-kinds"] if row["kind"].isdigit()]
    found = {int(row["kind"]): (row["table"], int(row["record"])) for row in rows}
    assert found == {
        kind: (index.TABLE_NAMES[kind], dtype.itemsize) for kind, dtype in index.TABLES.items()
    }


def test_data_types_are_those_of_the_code() -> None:
    found = [(int(row["code"]), row["name"], int(row["size"])) for row in TABLES["table-dtypes"]]
    assert found == [(dtype.code, dtype.name, dtype.nbytes) for dtype in DTYPES.values()]


def test_tags_are_those_of_the_code() -> None:
    listed = {int(row["tag"]) for row in TABLES["table-tags"]}
    known = set()
    for tag in range(256):
        try:
            parse_tree(bytes([tag]), "tree")
        except Exception as error:
            if getattr(error, "clause", None) == "TRE-1":
                continue
        known.add(tag)
    assert known == listed


def test_manifest_keys_are_those_of_the_code() -> None:
    keys = {row["key"] for row in TABLES["table-manifest"]}
    assert keys == manifest._KEYS | {"step"}
    assert {row["key"] for row in TABLES["table-manifest-segment"]} == manifest._SEGMENT_KEYS


def test_registered_features_are_those_of_the_code() -> None:
    bits = {
        row["name"]: 1 << int(row["bit"])
        for row in TABLES["table-features"]
        if row["bit"].isdigit() and row["name"].isidentifier()
    }
    assert bits == limits.INCOMPAT_BITS


@pytest.mark.parametrize(
    ("row", "value"),
    [
        ("size of ``manifest.json``", "16 MiB"),
        ("levels of JSON", str(limits.MAX_JSON_DEPTH)),
        ("segments of a checkpoint", str(limits.MAX_SEGMENTS)),
        ("bytes of a name", str(limits.MAX_NAME_NBYTES)),
        ("dimensions of a tensor", str(limits.MAX_NDIM)),
        ("cut dimensions of a tensor", str(limits.MAX_CUT_DIMS)),
        ("depth of a state tree", str(limits.MAX_TREE_DEPTH)),
    ],
)
def test_limits_are_those_of_the_code(row: str, value: str) -> None:
    limits_of_text = {line["what"]: line for line in TABLES["table-limits"]}
    assert limits_of_text[row]["a Reader supports at least"] == value
    assert limits.MAX_MANIFEST_NBYTES == 16 << 20
    assert limits.MAX_ENTRIES >= 1 << 21


@pytest.mark.clause("NAM-4")
def test_examples_of_path_elements_are_those_of_the_code() -> None:
    elements: list[list[Any]] = [
        [("key", "weight")],
        [("key", 5), ("key", -5)],
        [("key", True)],
        [("key", None)],
        [("index", 0)],
        [("attr", "_metadata")],
        [("part", "_data")],
        [("context", None)],
    ]
    for row, group in zip(TABLES["table-path-elements"], elements, strict=True):
        assert row["example"] == ", ".join(f"``{name_of((one,))}``" for one in group)


def test_lint_finds_each_kind_of_fault() -> None:
    clause = ".. clause:: {}\n\n   {}\n\n   :class: {}\n   :roles: Reader\n\n"
    good = clause.format("AAA-1", "It MUST be.", "invalid")
    assert lint(good) == []
    faults = {
        clause.format("AAA-2", "It MUST be.", "invalid"): "expected each once",
        good + good: "expected each once",
        clause.format("aaa", "It MUST be.", "invalid"): "not a clause id",
        clause.format("AAA-1", "It MUST be and MUST do.", "invalid"): "2 of MUST",
        clause.format("AAA-1", "It is.", "invalid"): "0 of MUST",
        clause.format("AAA-1", "It MUST be.", "wrong"): "unknown class",
        clause.format("AAA-1", "It MUST be", "invalid"): "full stop",
        good.replace("Reader", "Nobody"): "has the roles",
        good + "It MUST be.\n": "outside a clause",
        good + "See :clause:`BBB-1`.\n": "no clause BBB-1",
    }
    for text, expected in faults.items():
        assert any(expected in line for line in lint(text)), expected


def test_marks_are_read_from_literals_and_from_tables() -> None:
    assert marked_ids('@pytest.mark.clause("AAA-1", "BBB-2")\n"CCC-3"') == {"AAA-1", "BBB-2"}
    computed = 'CASES = ["AAA-1", "BBB-2"]\nmarks=pytest.mark.clause(case.clause)'
    assert marked_ids(computed) == {"AAA-1", "BBB-2"}
