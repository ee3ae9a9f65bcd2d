"""Directories with an index: the index decides, nothing outside is read, no model is partial."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tool_inputs import INDEX, SHARDS, indexed_directory, save_zip


def test_the_directory_and_the_index_give_the_same(tmp_path: Path, convert: Any) -> None:
    folder = indexed_directory(tmp_path / "dir")
    one = convert(folder, tmp_path / "one.safetensors", "--json").json
    assert one["warnings"] == []
    assert one["tensors"] == 3
    convert(folder / INDEX, tmp_path / "two.safetensors")
    assert (tmp_path / "one.safetensors").read_bytes() == (
        tmp_path / "two.safetensors"
    ).read_bytes()
    read = load_file(tmp_path / "one.safetensors")
    assert {name: tensor.tolist() for name, tensor in read.items()} == {
        "a": [1, 1, 1],
        "b": [0, 0],
        "c": [2, 2, 2, 2],
    }


@pytest.mark.clause("CNV-12")
def test_what_disagrees_is_refused(tmp_path: Path, refuse: Any) -> None:
    folder = indexed_directory(tmp_path / "missing", drop=SHARDS[1])
    text = refuse(folder, tmp_path / "out")
    assert SHARDS[1] in text
    assert "which holds 1 of 3 tensors" in text
    assert "[incomplete]" in text
    placed = {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1]}
    folder = indexed_directory(tmp_path / "absent", {**placed, "mtp.fc.weight": SHARDS[1]})
    assert "'mtp.fc.weight' is not in" in refuse(folder, tmp_path / "out")
    folder = indexed_directory(tmp_path / "wrong", {**placed, "a": SHARDS[1], "b": SHARDS[1]})
    text = refuse(folder, tmp_path / "out")
    assert "'a' is not in" in text
    assert "'b' is not in" in text


@pytest.mark.clause("CNV-5")
@pytest.mark.parametrize(
    "value",
    [
        "../secret.safetensors",
        "sub/../../secret.safetensors",
        "",
        ".",
        "..",
        "./model.safetensors",
        "sub//ok.safetensors",
        "sub/",
        "sub\\ok.safetensors",
        "nul\0.safetensors",
        "\ud800.safetensors",
        "link.safetensors",
        "linked/secret.safetensors",
    ],
)
def test_paths_that_lead_out(tmp_path: Path, refuse: Any, value: str) -> None:
    save_file({"w": torch.full((2,), 666.0)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "dir"
    (folder / "sub").mkdir(parents=True)
    (folder / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    (folder / "linked").symlink_to(tmp_path)
    save_file({"w": torch.ones(2)}, folder / "sub" / "ok.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": value}}))
    text = refuse(folder, tmp_path / "out")
    assert "'w'" in text
    assert "[invalid]" in text


@pytest.mark.clause("CNV-5")
def test_an_absolute_path(tmp_path: Path, refuse: Any) -> None:
    folder = tmp_path / "dir"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, folder / "ok.safetensors")
    value = str(folder / "ok.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": value}}))
    assert "is absolute" in refuse(folder, tmp_path / "out")


def test_plain_folders_and_the_cache_of_the_hub_are_allowed(tmp_path: Path, convert: Any) -> None:
    folder = tmp_path / "cache" / "snapshots" / "0123"
    (folder / "sub").mkdir(parents=True)
    blobs = tmp_path / "cache" / "blobs"
    blobs.mkdir()
    save_file({"a": torch.ones(2)}, blobs / "feed")
    (folder / "linked.safetensors").symlink_to(Path("../../blobs/feed"))
    save_file({"b": torch.ones(2)}, folder / "sub" / "ok.safetensors")
    placed = {"a": "linked.safetensors", "b": "sub/ok.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}))
    assert convert(folder, tmp_path / "out", "--json").json["tensors"] == 2


@pytest.mark.clause("CNV-12")
def test_left_overs_are_reported(tmp_path: Path, convert: Any) -> None:
    folder = indexed_directory(tmp_path / "dir", total=1)
    save_file({"a": torch.full((3,), 9.0)}, folder / "model.safetensors")
    save_file({"old": torch.ones(1)}, folder / "model-00003-of-00005.safetensors")
    save_zip({"a": torch.zeros(3)}, folder / "pytorch_model.bin")
    report = convert(folder, tmp_path / "out.safetensors", "--json").json
    text = "\n".join(report["warnings"])
    assert "total_size is 1, the tensors have 36 bytes" in text
    for name in ("model.safetensors", "model-00003-of-00005.safetensors", "pytorch_model.bin"):
        assert f"'{name}'" in text
    assert load_file(tmp_path / "out.safetensors")["a"].tolist() == [1, 1, 1]


def test_tensors_that_the_index_leaves_out(tmp_path: Path, convert: Any) -> None:
    folder = indexed_directory(tmp_path / "dir", {"a": SHARDS[0], "c": SHARDS[1]}, total=28)
    outcome = convert(folder, tmp_path / "out")
    assert "does not name, left out: 'b'" in outcome.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "is neither"),
        ('{"weight_map": []}', "no object 'weight_map'"),
        ('{"weight_map": {"w": 5}}', "'w' is not a string"),
        ('{"weight_map": {"w": "a", "w": "b"}}', "stands twice"),
        ('{"weight_map": ' + "[" * 100_000, "not JSON"),
    ],
)
def test_bad_indexes(tmp_path: Path, refuse: Any, text: str, words: str) -> None:
    folder = tmp_path / "dir"
    folder.mkdir()
    (folder / INDEX).write_text(text)
    if words != "is neither":
        assert words in refuse(folder, tmp_path / "out")
    else:
        assert "no object 'weight_map'" in refuse(folder, tmp_path / "out")


def test_conflicting_metadata(tmp_path: Path, convert: Any) -> None:
    folder = indexed_directory(tmp_path / "dir")
    save_file({"c": torch.ones(4)}, folder / SHARDS[1], metadata={"format": "tf"})
    report = convert(folder, tmp_path / "out", "--json").json
    assert "'format' differs" in report["warnings"][0]
