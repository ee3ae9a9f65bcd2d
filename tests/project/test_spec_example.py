"""The worked examples of the specification are what the plain writer makes."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from fpformat import open_checkpoint, verify_checkpoint
from fpformat.records.checksum import combine, crc32c, mask, slow_crc32c
from fpformat.records.tree import ArrayRef, ParameterRef, TensorRef
from fpspec.example import EXAMPLES, pattern, render_example, write_example
from fpspec.trace import SPEC, example_of, parse_tables, replace_example

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / SPEC).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_in_the_text_is_regenerated(name: str) -> None:
    assert render_example(name) == example_of(TEXT, name), (
        "run: python tools/fpspec example --write"
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_replacing_the_example_keeps_the_rest(name: str) -> None:
    assert replace_example(TEXT, name, example_of(TEXT, name)) == TEXT
    replaced = replace_example(TEXT, name, "other\n")
    for other in EXAMPLES:
        expected = "other\n" if other == name else example_of(TEXT, other)
        assert example_of(replaced, other) == expected


def test_first_example_is_sound_and_says_what_the_text_says(tmp_path: Path) -> None:
    checkpoint_id = write_example(tmp_path / "example", "first")
    assert not verify_checkpoint(tmp_path / "example").problems
    with open_checkpoint(tmp_path / "example") as checkpoint:
        assert checkpoint.checkpoint_id == checkpoint_id
        assert bytes(checkpoint.read("w")) == bytes(checkpoint.read("w2")) == pattern(8192)
        assert checkpoint.read("scale").view(np.float32).tolist() == [0.5]
        tree = checkpoint.tree(rank=1)
        assert tree is not None
        assert tree.node == {
            "w": ParameterRef(1, True),
            "w2": TensorRef(2),
            "scale": TensorRef(0),
            "step": 7,
            "lr": 0.5,
        }


def test_second_example_is_sound_and_says_what_the_text_says(tmp_path: Path) -> None:
    write_example(tmp_path / "example", "second")
    assert not verify_checkpoint(tmp_path / "example").problems
    with open_checkpoint(tmp_path / "example") as checkpoint:
        assert bytes(checkpoint.read("a")) == bytes((4, 5, 6, 7, 12, 13, 14, 15))
        assert bytes(checkpoint.read("b")) == bytes((0, 1, 4, 5, 8, 9, 12, 13))
        assert bytes(checkpoint.read("w")) == pattern(64)
        assert checkpoint.read_object("note") == b"resumed"
        for rank in range(2):
            assert bytes(checkpoint.read(("rng/~l0", rank))) == bytes((rank,)) * 8
            tree = checkpoint.tree(rank=rank)
            assert tree is not None
            assert tree.node == {
                "a": TensorRef(0),
                "b": TensorRef(1),
                "rng": [ArrayRef(2)],
                "w": ParameterRef(3, True),
                "rank": rank,
            }


@pytest.mark.parametrize("name", EXAMPLES)
def test_manifest_in_the_text_has_its_own_digest(name: str) -> None:
    _, _, listing = example_of(TEXT, name).partition("Content::")
    document = "".join(line.strip() for line in listing.splitlines())
    parsed = json.loads(document)
    content = document[len('{"checkpoint":') : -len(f',"id":"{parsed["id"]}"}}')]
    assert hashlib.sha256(content.encode()).hexdigest() == parsed["id"]


@pytest.mark.clause("SUM-1", "SUM-6")
def test_crc_vectors_of_the_text() -> None:
    contents = (
        b"",
        b"a",
        b"123456789",
        bytes(32),
        b"\xff" * 32,
        bytes(range(32)),
        bytes(range(31, -1, -1)),
        bytes(4096),
        pattern(4096),
    )
    rows = parse_tables(TEXT)["table-crc-vectors"]
    for content, row in zip(contents, rows, strict=True):
        assert f"{crc32c(content):08x}" == f"{slow_crc32c(content):08x}" == row["crc32c"]
        assert f"{mask(crc32c(content)):08x}" == row["masked"]
    assert f"{combine(0x18D12335, 0xC27E5DB2, second_nbytes=4):08x}" == "e3069283"
    assert '18d12335 and crc32c("6789") = c27e5db2 combine to e3069283' in TEXT
