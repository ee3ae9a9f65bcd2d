"""Safetensors in and out: bytes, names, metadata, ties, several files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tool_inputs import entry, model_state, plain_tensors, same_tensor, share_memory, write_raw

from fpformat.read.reader import open_checkpoint
from fpformat_io.torch import load, save


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as opened:
        return dict(opened.metadata() or {})


@pytest.mark.clause("CNV-1", "CNV-9")
def test_a_file_of_the_library_comes_back_byte_for_byte(tmp_path: Path, convert: Any) -> None:
    path = tmp_path / "model.safetensors"
    save_file(plain_tensors(), path, metadata={"format": "pt"})
    convert(path, tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "back.safetensors")
    assert (tmp_path / "back.safetensors").read_bytes() == path.read_bytes()
    state = load(tmp_path / "ckpt")
    assert type(state) is dict
    assert set(state) == set(plain_tensors())
    assert all(same_tensor(state[name], tensor) for name, tensor in plain_tensors().items())


def test_every_data_type_of_safetensors(tmp_path: Path, convert: Any) -> None:
    raw = torch.arange(256, dtype=torch.uint8).repeat(2)
    names = [
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e4m3fnuz"),
        *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "complex64"),
    ]
    tensors = {name: raw.clone().view(getattr(torch, name)) for name in names}
    save_file(tensors, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    for name, tensor in load(tmp_path / "ckpt").items():
        assert same_tensor(tensor, tensors[name]), name


@pytest.mark.clause("CNV-18", "CNV-2")
def test_types_that_safetensors_lacks_are_refused_together(tmp_path: Path, refuse: Any) -> None:
    state = {"a": torch.zeros(2, dtype=torch.complex128), "b": {"c": torch.ones(2).to(torch.half)}}
    state["b"]["d"] = torch.zeros(1, dtype=torch.complex128)  # type: ignore[index]
    save(state, tmp_path / "ckpt")
    text = refuse(tmp_path / "ckpt", tmp_path / "out.safetensors")
    assert "'a' is C128" in text
    assert "'b.d' is C128" in text


@pytest.mark.clause("CNV-15", "CNV-16", "CNV-17")
def test_ties_survive(tmp_path: Path, convert: Any) -> None:
    weight = torch.arange(32.0).view(8, 4)
    save({"emb": {"w": weight}, "head": {"w": weight}, "norm": torch.ones(4)}, tmp_path / "ckpt")
    report = convert(tmp_path / "ckpt", tmp_path / "a.safetensors", "--json").json
    assert "'head.w'" in report["warnings"][0]
    read = load_file(tmp_path / "a.safetensors")
    assert set(read) == {"emb.w", "head.w", "norm"}
    assert torch.equal(read["emb.w"], weight)
    assert torch.equal(read["head.w"], weight)
    record = metadata_of(tmp_path / "a.safetensors")["fpformat.aliases"]
    assert json.loads(record) == {"head.w": "emb.w"}
    convert(tmp_path / "a.safetensors", tmp_path / "again")
    state = load(tmp_path / "again")
    assert share_memory(state["emb.w"], state["head.w"])
    with open_checkpoint(tmp_path / "again") as checkpoint:
        assert checkpoint.manifest.user == {"format": "pt"}
    convert(tmp_path / "again", tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@pytest.mark.clause("CNV-17")
def test_ties_that_were_cut_stay_cut(tmp_path: Path, convert: Any) -> None:
    tensors = {"a": torch.ones(3), "b": torch.zeros(3), "c": torch.ones(3, dtype=torch.int32)}
    record = json.dumps({"a": "b", "c": "b", "gone": "b"})
    save_file(tensors, tmp_path / "x", metadata={"fpformat.aliases": record, "k": "v"})
    report = convert(tmp_path / "x", tmp_path / "ckpt", "--json").json
    assert "'a', 'c' were tied and differ now" in report["warnings"][0]
    state = load(tmp_path / "ckpt")
    assert state["a"].tolist() == [1, 1, 1]
    assert not share_memory(state["a"], state["b"])


def test_reserved_metadata(tmp_path: Path, convert: Any) -> None:
    metadata = {"fpformat.aliases": "[", "fpformat.step": "12", "fpformat.x": "y", "k": "v"}
    save_file({"a": torch.ones(3)}, tmp_path / "x", metadata=metadata)
    outcome = convert(tmp_path / "x", tmp_path / "ckpt")
    assert "no JSON object" in outcome.err
    assert "'fpformat.x'" in outcome.err
    with open_checkpoint(tmp_path / "ckpt") as checkpoint:
        assert checkpoint.manifest.user == {"k": "v"}
        assert checkpoint.manifest.step == 12
    convert(tmp_path / "ckpt", tmp_path / "y.safetensors")
    expected = {"k": "v", "fpformat.step": "12", "format": "pt"}
    assert metadata_of(tmp_path / "y.safetensors") == expected


@pytest.mark.clause("CNV-11")
def test_metadata_survives_both_ways(tmp_path: Path, convert: Any) -> None:
    metadata = {"format": "pt", "x": "\u00e9\n\U0001f600", "": "empty", "long": "z" * 10_000}
    save_file({"a": torch.ones(3)}, tmp_path / "x", metadata=metadata)
    convert(tmp_path / "x", tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "m.pt")
    convert(tmp_path / "m.pt", tmp_path / "again")
    convert(tmp_path / "again", tmp_path / "y.safetensors")
    assert metadata_of(tmp_path / "y.safetensors") == metadata


@pytest.mark.parametrize("metadata", [None, {}, {"k": "v"}])
def test_files_without_tensors(tmp_path: Path, convert: Any, metadata: Any) -> None:
    header = {} if metadata is None else {"__metadata__": metadata}
    write_raw(tmp_path / "x.safetensors", header)
    convert(tmp_path / "x.safetensors", tmp_path / "ckpt")
    assert load(tmp_path / "ckpt") == {}
    convert(tmp_path / "ckpt", tmp_path / "y.safetensors")
    expected = {"k": "v", "format": "pt"} if metadata else {}
    assert metadata_of(tmp_path / "y.safetensors") == expected


@pytest.mark.clause("CNV-11")
def test_the_format_that_transformers_asks_for(tmp_path: Path, convert: Any) -> None:
    """Files of torch get it always, others with any metadata; one that is there stays."""
    tensors = {"a": torch.ones(3)}
    torch.save(tensors, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "x.safetensors")
    assert metadata_of(tmp_path / "x.safetensors") == {"format": "pt"}
    convert(tmp_path / "x.pt", tmp_path / "hub", "--to", "safetensors")
    assert metadata_of(tmp_path / "hub" / "model.safetensors") == {"format": "pt"}
    save(tensors, tmp_path / "step", step=3)
    convert(tmp_path / "step", tmp_path / "step.safetensors")
    assert metadata_of(tmp_path / "step.safetensors") == {"format": "pt", "fpformat.step": "3"}
    save_file(tensors, tmp_path / "mlx.safetensors", metadata={"format": "mlx", "k": "v"})
    convert(tmp_path / "mlx.safetensors", tmp_path / "mlx")
    convert(tmp_path / "mlx", tmp_path / "back.safetensors")
    assert metadata_of(tmp_path / "back.safetensors") == {"format": "mlx", "k": "v"}
    save_file(tensors, tmp_path / "bare.safetensors")
    convert(tmp_path / "bare.safetensors", tmp_path / "bare")
    convert(tmp_path / "bare", tmp_path / "again.safetensors")
    bare, again = tmp_path / "bare.safetensors", tmp_path / "again.safetensors"
    assert bare.read_bytes() == again.read_bytes()


NAMES = (
    ["", " ", "../../etc/passwd", "/abs", "a/b\\c", "nul\0byte", "new\nline", 'quo"te', "caf\u00e9"]
    + ["cafe\u0301", "\U0001f600", "\u202eRTL", "CASE", "case", "trailing.", ".leading", "x" * 5000]
    + ["manifest.json", "~", "~l0", "~0", "tree", "a.b.c", "\x7f", "fpformat.aliases"]
)


@pytest.mark.clause("CNV-13")
def test_any_name_survives(tmp_path: Path, convert: Any) -> None:
    save_file({name: torch.tensor([float(i)]) for i, name in enumerate(NAMES)}, tmp_path / "x")
    convert(tmp_path / "x", tmp_path / "ckpt")
    assert {name: int(tensor) for name, tensor in load(tmp_path / "ckpt").items()} == {
        name: i for i, name in enumerate(NAMES)
    }
    convert(tmp_path / "ckpt", tmp_path / "y.safetensors")
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y.safetensors").read_bytes()


@pytest.mark.clause("CNV-14")
def test_names_that_safetensors_cannot_hold(tmp_path: Path, refuse: Any) -> None:
    one, two = torch.ones(1), torch.zeros(1)
    save({"a": {"b": one}, "a.b": two, "__metadata__": one.clone()}, tmp_path / "ckpt")
    text = refuse(tmp_path / "ckpt", tmp_path / "out.safetensors")
    assert "'a.b' would name two tensors" in text
    assert "'__metadata__' is reserved" in text


def test_a_name_over_the_limit_of_fpformat(tmp_path: Path, refuse: Any) -> None:
    save_file({"x" * 65_536: torch.ones(1)}, tmp_path / "m.safetensors")
    assert "65,535" in refuse(tmp_path / "m.safetensors", tmp_path / "out").replace(
        "65535", "65,535"
    )


@pytest.mark.clause("CNV-13", "CNV-20", "CNV-2")
def test_nested_names_and_other_values(tmp_path: Path, convert: Any, refuse: Any) -> None:
    state = {
        "model": {"w": torch.ones(2)},
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "lr": 0.1},
        "list": [torch.zeros(1), "text"],
        "epoch": 3,
        "rng": (1, (2, 3), None),
        "flag": {True: torch.ones(1), None: torch.zeros(2)},
        "empty": {},
    }
    save(state, tmp_path / "ckpt")
    text = refuse(tmp_path / "ckpt", tmp_path / "out.safetensors")
    for words in (
        "optimizer/lr: the float 0.1",
        "list/~l1: a str of length 4",
        "epoch: the int 3",
        "rng: a tuple with 4 values and no tensor",
    ):
        assert words in text
    report = convert(
        tmp_path / "ckpt", tmp_path / "out.safetensors", "--skip-unsupported", "--json"
    ).json
    assert len(report["skipped"]) == 4
    names = {"model.w", "optimizer.state.0.step", "list.0", "flag.True", "flag.None"}
    assert set(load_file(tmp_path / "out.safetensors")) == names
    convert(tmp_path / "ckpt", tmp_path / "model.safetensors", "--key", "model")
    assert set(load_file(tmp_path / "model.safetensors")) == {"w"}


@pytest.mark.clause("CNV-20")
def test_numpy_values_and_attributes(tmp_path: Path, convert: Any, refuse: Any) -> None:
    import numpy as np

    module = torch.nn.Linear(2, 2)
    save({"model": module.state_dict(), "a": np.ones(2)}, tmp_path / "ckpt")
    text = refuse(tmp_path / "ckpt", tmp_path / "out.safetensors")
    assert "a: a numpy array" in text
    outcome = convert(tmp_path / "ckpt", tmp_path / "m.safetensors", "--key", "model")
    assert outcome.err == "fpconvert: left out by --key: a\n"
    assert set(load_file(tmp_path / "m.safetensors")) == {"weight", "bias"}
    ordered = module.state_dict()
    ordered.note = "x"  # type: ignore[attr-defined]
    save(ordered, tmp_path / "other")
    outcome = convert(tmp_path / "other", tmp_path / "n.safetensors")
    assert "attributes of ordered dictionaries are not kept in safetensors: ~anote" in outcome.err
    assert "_metadata" not in outcome.err


def test_a_lone_tensor(tmp_path: Path, convert: Any) -> None:
    save(torch.ones(2, 3), tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "x.safetensors")
    assert load_file(tmp_path / "x.safetensors")["tensor"].shape == (2, 3)


def test_strided_tensors_become_plain(tmp_path: Path, convert: Any) -> None:
    state = model_state()
    save(state, tmp_path / "ckpt")
    outcome = convert(tmp_path / "ckpt", tmp_path / "x.safetensors")
    assert "share memory with others are written as copies" in outcome.err
    read = load_file(tmp_path / "x.safetensors")
    for name, tensor in state.items():
        assert same_tensor(read[name], tensor.detach()), name


@pytest.mark.clause("CNV-21")
def test_several_files(tmp_path: Path, convert: Any) -> None:
    tensors = {f"t{i}": torch.full((100,), float(i)) for i in range(7)}
    tensors["huge"] = torch.arange(1000.0)
    save({**tensors, "tied": tensors["t0"]}, tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "hub", "--to", "safetensors", "--max-shard-size", "1kB")
    index = json.loads((tmp_path / "hub" / "model.safetensors.index.json").read_text())
    placed = index["weight_map"]
    found: dict[str, str] = {}
    for path in sorted((tmp_path / "hub").glob("*.safetensors")):
        names = set(load_file(path))
        assert names
        assert sum(t.nbytes for t in load_file(path).values()) <= 1000 or names == {"huge"}
        found.update(dict.fromkeys(names, path.name))
    assert found == placed
    assert set(placed) == {*tensors, "tied"}
    count = len(set(placed.values()))
    assert set(placed.values()) == {
        f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)
    }
    assert index["metadata"]["total_size"] == 400 * 8 + 4000
    report = convert(tmp_path / "hub", tmp_path / "again", "--json").json
    assert report["warnings"] == []
    state = load(tmp_path / "again")
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())
    assert share_memory(state["t0"], state["tied"])


@pytest.mark.clause("CNV-21")
def test_one_file_needs_no_index(tmp_path: Path, convert: Any) -> None:
    save_file(plain_tensors(), tmp_path / "x.safetensors")
    convert(tmp_path / "x.safetensors", tmp_path / "hub", "--to", "safetensors")
    assert [path.name for path in (tmp_path / "hub").iterdir()] == ["model.safetensors"]
    convert(tmp_path / "hub", tmp_path / "ckpt")


def test_files_that_the_library_would_order_otherwise(tmp_path: Path, convert: Any) -> None:
    """A file of another writer keeps its values; its order becomes the library's."""
    header = {"u": entry("U8", [3], 0, 3), "f": entry("F64", [1], 3, 11)}
    write_raw(tmp_path / "x.safetensors", header, bytes(range(11)))
    convert(tmp_path / "x.safetensors", tmp_path / "ckpt")
    assert list(load(tmp_path / "ckpt")) == ["u", "f"]
    convert(tmp_path / "ckpt", tmp_path / "y.safetensors")
    save_file(load(tmp_path / "ckpt"), tmp_path / "z.safetensors")
    assert (tmp_path / "y.safetensors").read_bytes() == (tmp_path / "z.safetensors").read_bytes()
