"""Every fault of a safetensors file is one line that names the file, the tensor and the reason."""

import json
import re
import resource
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tool_inputs import entry, write_raw

from fpformat_tools.errors import SourceError
from fpformat_tools.formats.safetensors.file import open_safetensors

TWO = {"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 8, 16)}


def fault_of(path: Path) -> str:
    with pytest.raises(SourceError) as caught:
        open_safetensors(path)
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text
    return text


@pytest.mark.clause("CNV-10")
@pytest.mark.parametrize(
    ("header", "nbytes", "words"),
    [
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, 12, "'b'.*overlaps.*'a'"),
        (
            {"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 12, 20)},
            20,
            "'b'.*hole after.*'a'",
        ),
        ({"a": entry("F32", [2], 4, 12)}, 12, "'a'.*hole after the header"),
        ({"a": entry("F32", [2], 8, 0)}, 8, "'a'.*reversed"),
        ({"a": entry("F32", [2], -8, 0)}, 8, "'a'.*data_offsets"),
        ({"a": entry("F32", [2], 0.0, 8.0)}, 8, "'a'.*data_offsets"),
        ({"a": entry("F32", [2], False, 8)}, 8, "'a'.*data_offsets"),
        ({"a": entry("F32", [1000, 1000], 0, 4)}, 4, "'a'.*span 4 bytes.*4,000,000"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "'a'.*must have dtype, shape"),
        ({"a": {**entry("F32", [2], 0, 8), "more": 1}}, 8, "'a'.*nothing else"),
        ({"a": entry("F32", [2.0], 0, 8)}, 8, "'a'.*shape"),
        ({"a": entry("F32", [True, 2], 0, 8)}, 8, "'a'.*shape"),
        ({"a": entry("F32", [-2], 0, 8)}, 8, "'a'.*shape"),
        ({"a": entry("F32", "2", 0, 8)}, 8, "'a'.*shape"),
        ({"a": entry("F32", [1] * 65, 0, 4)}, 4, "'a'.*65 dimensions"),
        ({"a": entry("F32", [2**40, 2**40], 0, 8)}, 8, "'a'.*too large"),
        ({"a": entry("F32", [0, 2**60], 0, 0)}, 0, "'a'.*too large"),
        ({"a": entry("FLOAT", [2], 0, 8)}, 8, "'a'.*dtype 'FLOAT'"),
        ({"a": entry(5, [2], 0, 8)}, 8, "'a'.*dtype"),
        ({"a": entry("F6_E2M3", [4], 0, 3)}, 3, "'a'.*6 bits"),
        ({"a": entry("C128", [1], 0, 16)}, 16, "'a'.*not one of safetensors"),
        ({"a": entry("F4_E2M1_X2", [1], 0, 1)}, 1, "'a'.*not one of safetensors"),
        ({"tied": entry("", [], 0, 0), "a": entry("F32", [2], 0, 8)}, 8, "'tied'.*''.*tied tensor"),
        ({"a": [1, 2]}, 0, "'a'.*flat object"),
        ({"a": {"dtype": {"x": 1}}}, 0, "'a'.*flat object"),
        ({"a": None}, 0, "'a'.*flat object"),
        ([], 0, "must begin with '{'"),
        ('{"a": {"dtype": NaN, "shape": [], "data_offsets": [0, 0]}}', 0, "'a'.*dtype"),
        ('{"a": {"dtype":"F32","dtype":"F32"}}', 0, "'a'.*twice"),
        ("{'a': 1}", 0, "not JSON"),
        ('{"a": {"dtype"}}', 0, "'a'.*not JSON"),
        ('{"a', 0, "not JSON"),
        ('{"a": {}', 0, "'a'.*must have"),
        ("{} {}", 0, "text follows"),
        ('{"\\ud800": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', 0, "lone surrogate"),
        (b'{"\xff\xfe": 1}', 0, "not UTF-8"),
    ],
)
def test_bad_headers(tmp_path: Path, header: Any, nbytes: int, words: str) -> None:
    text = fault_of(write_raw(tmp_path / "x.safetensors", header, bytes(nbytes)))
    assert re.search(words, text), text


@pytest.mark.clause("CNV-10")
def test_duplicate_names_are_refused(tmp_path: Path) -> None:
    one = json.dumps(entry("F32", [2], 0, 8))
    two = json.dumps(entry("F32", [2], 8, 16))
    path = write_raw(tmp_path / "x", f'{{"a":{one},"a":{two}}}', bytes(16))
    assert "'a' stands there twice" in fault_of(path)
    text = '{"__metadata__":{},"__metadata__":{}}'
    assert "'__metadata__' stands there twice" in fault_of(write_raw(tmp_path / "y", text))
    text = '{"__metadata__":{"k":"1","k":"2"}}'
    assert "'k' stands there twice" in fault_of(write_raw(tmp_path / "z", text))


def test_sizes_are_told(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", TWO, bytes(12))
    whole = path.stat().st_size + 4
    text = fault_of(path)
    assert f"expected {whole:,} bytes, found {whole - 4:,}" in text
    assert "truncated" in text
    assert "'b'" in text
    text = fault_of(write_raw(tmp_path / "x.safetensors", TWO, bytes(19)))
    assert "3 bytes follow the last tensor" in text
    assert f"found {whole + 3:,}" in text


@pytest.mark.parametrize("cut", [100, 4040, 4128, 4165, 4168])
def test_truncated_files(tmp_path: Path, cut: int, refuse: Any) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(1000.0), "b": torch.ones(10)}, path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - cut])
    text = refuse(path, tmp_path / "out")
    assert str(path) in text
    assert "truncated" in text or "empty" in text
    assert f"{len(content) - cut:,}" in text


@pytest.mark.clause("CNV-7")
@pytest.mark.parametrize(
    ("length", "words"),
    [
        (2**63, "over the limit"),
        (2**64 - 1, "over the limit"),
        (100_000_001, "over the limit"),
        (9, "truncated"),
        (100_000_000, "truncated"),
        (1, "too short"),
    ],
)
def test_header_lengths(tmp_path: Path, length: int, words: str) -> None:
    begin = time.perf_counter()
    assert words in fault_of(write_raw(tmp_path / "x", "{}", length=length))
    assert time.perf_counter() - begin < 1


def test_a_sparse_header_over_the_limit_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with path.open("wb") as opened:
        opened.write(struct.pack("<Q", 100_000_001) + b"{}")
        opened.truncate(8 + 100_000_001)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "over the limit of 100,000,000" in fault_of(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


@pytest.mark.parametrize(
    "header",
    [
        '{"w":' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"w":' + '{"x":' * 100_000 + "1" + "}" * 100_001,
        '{"w":{"dtype":"F32","shape":' + "[" * 30_000 + "]" * 30_000 + ',"data_offsets":[0,0]}}',
        '{"w":{"dtype":"F32","shape":[' + "1" * 5000 + '],"data_offsets":[0,0]}}',
        '{"w":{"dtype":"F32","shape":[' + "1," * 100_000 + '1],"data_offsets":[0,4]}}',
    ],
)
def test_deep_and_long_json(tmp_path: Path, header: str) -> None:
    begin = time.perf_counter()
    assert "'w'" in fault_of(write_raw(tmp_path / "x", header, bytes(4)))
    assert time.perf_counter() - begin < 1


@pytest.mark.clause("CNV-11")
def test_metadata_variants(tmp_path: Path) -> None:
    def read(metadata: Any) -> Any:
        header = {"__metadata__": metadata, "w": entry("F32", [2], 0, 8)}
        opened = open_safetensors(write_raw(tmp_path / "x", header, bytes(8)))
        opened.source.close()
        return opened.header

    assert read({}).metadata == {}
    assert read({"format": "pt", "x": "\u00e9\n"}).metadata == {"format": "pt", "x": "\u00e9\n"}
    header = read(None)
    assert header.metadata == {}
    assert "null" in header.warnings[0]
    for metadata, words in (
        ({"step": 5}, "'step' is a number"),
        ({"a": {"b": "c"}}, "'a' is an object"),
        ({"a": ["b"]}, "'a' is a list"),
        ({"a": None}, "'a' is null"),
        ({"a": True}, "'a' is true"),
        ([], "must be an object of strings"),
        ("text", "must be an object of strings"),
    ):
        with pytest.raises(SourceError, match=words):
            read(metadata)


def test_zero_size_tensors_share_a_place(tmp_path: Path) -> None:
    header = {
        "a": entry("F32", [0], 0, 0),
        "b": entry("F32", [2], 0, 8),
        "c": entry("I64", [3, 0], 8, 8),
        "d": entry("I64", [0, 3], 8, 8),
    }
    opened = open_safetensors(write_raw(tmp_path / "x", header, bytes(8)))
    opened.source.close()
    assert [e.name for e in opened.header.entries] == ["a", "b", "c", "d"]


@pytest.mark.clause("CNV-19")
def test_two_values_in_a_byte(tmp_path: Path) -> None:
    opened = open_safetensors(
        write_raw(tmp_path / "x", {"a": entry("F4", [3, 8], 0, 12)}, bytes(12))
    )
    opened.source.close()
    assert opened.header.entries[0].shape == (3, 4)
    for shape, stop in (([3, 3], 5), ([], 1)):
        path = write_raw(tmp_path / "y", {"a": entry("F4", shape, 0, stop)}, bytes(stop))
        assert "whole bytes" in fault_of(path)
