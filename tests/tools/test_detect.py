"""Inputs are told apart by content, and what is no model is named for what it is."""

import gzip
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tool_inputs import (
    PAGE,
    POINTER,
    indexed_directory,
    model_state,
    plain_tensors,
    save_legacy,
    save_zip,
    write_raw,
)

from fpformat_tools.errors import SourceError
from fpformat_tools.formats.detect import find_source, kind_of


@pytest.mark.clause("CNV-3")
def test_names_play_no_part(tmp_path: Path) -> None:
    save_file(plain_tensors(), tmp_path / "model.pt")
    save_zip(model_state(), tmp_path / "model.safetensors")
    save_legacy(model_state(), tmp_path / "model.zip")
    indexed_directory(tmp_path / "dir")
    assert kind_of(tmp_path / "model.pt") == "safetensors"
    assert kind_of(tmp_path / "model.safetensors") == "torch_zip"
    assert kind_of(tmp_path / "model.zip") == "torch_legacy"
    assert kind_of(tmp_path / "dir" / "model.safetensors.index.json") == "index"


@pytest.mark.parametrize("length", range(0x180, 0x588, 8))
def test_a_header_length_may_look_like_a_pickle(tmp_path: Path, length: int) -> None:
    path = write_raw(tmp_path / "x", '{"__metadata__":{}}'.ljust(length))
    assert kind_of(path) == "safetensors"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["empty", "0 bytes"]),
        (b"1234567", ["7 bytes", "truncated"]),
        (POINTER, ["git-lfs pointer", "sha256:" + "cd" * 32, "123456789", "git lfs pull"]),
        (PAGE, ["HTML page"]),
        (b"\xef\xbb\xbf\n  <html>", ["HTML page"]),
        (b"GGUF" + bytes(60), ["GGUF"]),
        (b"\x89HDF\r\n\x1a\n" + bytes(60), ["HDF5"]),
        (b"\x93NUMPY\x01\x00" + bytes(60), [".npy"]),
        (gzip.compress(b"x" * 100, mtime=0), ["gzip"]),
        (pickle.dumps({"w": [1.0]}), ["pickle", "never executed"]),
        (b"\x89FPS\r\n\x1a\n" + bytes(4088), ["segment", "directory"]),
        (b'{"checkpoint":{},"id":""}', ["manifest", "directory"]),
        (b"just some text that is no model at all", ["not a safetensors file"]),
        (b"\xff" * 64, ["not a safetensors file"]),
        (bytes(257) + b"ustar" + bytes(250), ["tar archive"]),
    ],
)
@pytest.mark.parametrize("name", ["m.safetensors", "m.pt", "m.bin"])
def test_what_is_no_model_is_named(
    tmp_path: Path, name: str, content: bytes, words: list[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(SourceError) as caught:
        find_source(path)
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    assert all(word in text for word in words), text


def test_directories_that_offer_a_choice(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no manifest.json, no index and no model"):
        find_source(tmp_path)
    save_file({"w": torch.ones(2)}, tmp_path / "one.safetensors")
    assert find_source(tmp_path) == ("safetensors", tmp_path / "one.safetensors")
    (tmp_path / "README.md").write_text("text")
    assert find_source(tmp_path)[0] == "safetensors"
    save_zip({"w": torch.ones(2)}, tmp_path / "two.bin")
    with pytest.raises(SourceError, match=r"several models.*'one.safetensors', 'two.bin'"):
        find_source(tmp_path)


def test_directories_with_several_indexes(tmp_path: Path) -> None:
    folder = indexed_directory(tmp_path / "dir")
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    assert find_source(folder) == ("index", folder / "model.safetensors.index.json")
    (folder / "model.fp16.safetensors.index.json").write_text("{}")
    with pytest.raises(SourceError, match="several indexes"):
        find_source(folder)


def test_directories_of_other_kinds(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    with pytest.raises(SourceError, match="index of torch files"):
        find_source(tmp_path)
    (tmp_path / "pytorch_model.bin.index.json").unlink()
    (tmp_path / ".metadata").write_bytes(b"")
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(SourceError, match="DCP directory"):
        find_source(tmp_path)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="No such file"):
        find_source(tmp_path / "absent")
    with pytest.raises(SourceError, match="regular file"):
        find_source(Path("/dev/null"))


@pytest.mark.parametrize(
    ("members", "words"),
    [
        (["m/data.pkl", "m/constants.pkl", "m/code/x.py"], "TorchScript"),
        (["m/archive_format", "m/models/model.json"], "torch.export"),
        (["a.npy", "b.npy"], "npz"),
        (["word/document.xml"], "not one of torch.save"),
        (["a/data.pkl", "b/data.pkl"], "several data.pkl"),
    ],
)
def test_other_zip_archives(tmp_path: Path, refuse: object, members: list[str], words: str) -> None:
    path = tmp_path / "m.pt"
    with zipfile.ZipFile(path, "w") as zipped:
        for name in members:
            zipped.writestr(name, b"N.")
    assert words in refuse(path, tmp_path / "out")  # type: ignore[operator]
