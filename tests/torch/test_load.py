"""Loading a part, to another device, without a tree, with damage, with unknown classes."""

import numpy as np
import pytest
import torch
from torch_states import differences, shared

from fpformat.dtypes import by_name
from fpformat.errors import (
    ChecksumError,
    FormatError,
    NotFpformatError,
    PlanError,
    UncommittedError,
)
from fpformat.read.reader import open_checkpoint
from fpformat.read.source import BytesSource
from fpformat.records.layout import plan_checkpoint
from fpformat.records.model import TensorEntry
from fpformat.write.writer import write_checkpoint
from fpformat_io.torch import load, register_subclass, save


@pytest.fixture(scope="module")
def state():
    weight = torch.arange(6.0).view(2, 3)
    return {
        "model": {"a.weight": weight, "b": torch.ones(2), "tied": weight},
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}, 1: {"step": torch.tensor(2.0)}}},
        "list": [torch.zeros(1), 5, {"x": torch.ones(3)}],
        "pair": (1, torch.ones(1)),
        "epoch": 3,
        "array": np.arange(3),
    }


@pytest.fixture(scope="module")
def path(state, tmp_path_factory):
    path = tmp_path_factory.mktemp("load") / "c"
    save(state, path, step=7, metadata={"who": "me"})
    return path


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["model"], lambda state: {"model": state["model"]}),
        (["model/b"], lambda state: {"model": {"b": state["model"]["b"]}}),
        (["epoch", "array"], lambda state: {"epoch": 3, "array": state["array"]}),
        (["list/~l1"], lambda state: {"list": [None, 5, None]}),
        (["list/~l2/x"], lambda state: {"list": [None, None, state["list"][2]]}),
        (["pair/~l0"], lambda state: {"pair": (1, None)}),
        (
            ["optimizer/state/~i1"],
            lambda state: {"optimizer": {"state": {1: state["optimizer"]["state"][1]}}},
        ),
        (["model", "model/b"], lambda state: {"model": state["model"]}),
        ([], lambda state: {}),
    ],
)
def test_keys_choose_a_part(path, state, keys, expected):
    assert not differences(expected(state), load(path, keys=iter(keys)))


def test_an_ordered_dict_keeps_its_attributes(tmp_path):
    model = torch.nn.BatchNorm1d(2)
    save(model.state_dict(), tmp_path / "c")
    part = load(tmp_path / "c", keys=["weight"])
    assert list(part) == ["weight"]
    assert part._metadata == model.state_dict()._metadata


def test_unknown_keys_are_named_with_similar_ones(path):
    with pytest.raises(PlanError) as caught:
        load(path, keys=["model/b", "model/a.weigth", "nothing", "mod"])
    assert len(caught.value.problems) == 3
    assert "close: 'model/a.weight'" in str(caught.value)
    with pytest.raises(PlanError, match="names"):
        load(path, keys=[1])


def test_the_empty_key(tmp_path):
    save({"": torch.ones(1), "a": 1}, tmp_path / "c")
    assert list(load(tmp_path / "c", keys=[""])) == [""]
    save(torch.ones(1), tmp_path / "root")
    assert torch.equal(load(tmp_path / "root", keys=[""]), torch.ones(1))


def test_on_the_meta_device_no_tensor_is_read(path, state):
    with (path / "seg-000000.fps").open("r+b") as segment:
        segment.seek(4096)
        original = segment.read(64)
        segment.seek(4096)
        segment.write(bytes(byte ^ 255 for byte in original))
    try:
        found = load(path, device="meta", keys=["model", "optimizer", "list", "pair", "epoch"])
        with pytest.raises(ChecksumError):
            load(path)
    finally:
        with (path / "seg-000000.fps").open("r+b") as segment:
            segment.seek(4096)
            segment.write(original)
    assert found["epoch"] == 3
    assert found["model"]["b"].device.type == "meta"
    assert found["model"]["a.weight"].shape == (2, 3)


def test_a_device_that_torch_does_not_know(path):
    with pytest.raises(PlanError, match="device"):
        load(path, device="nowhere")


def test_a_rank_that_was_not_there(path):
    with pytest.raises(PlanError, match="rank"):
        load(path, rank=1)


def test_the_manifest_has_step_and_metadata(path):
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.manifest.step == 7
        assert checkpoint.manifest.user == {"who": "me"}


def test_without_a_tree_a_flat_dict_comes(tmp_path):
    entries = [
        TensorEntry(name="b/x", dtype=by_name("F32"), shape=(2,)),
        TensorEntry(name="a", dtype=by_name("BF16"), shape=()),
        TensorEntry(name="c", dtype=by_name("F32"), shape=(2,), alias=("b/x", None)),
    ]
    sources = {
        (("b/x", None), None): BytesSource(np.ones(2, dtype="<f4")),
        (("a", None), None): BytesSource(b"\x80\x3f"),
    }
    write_checkpoint(tmp_path / "c", plan_checkpoint(entries), sources)
    found = load(tmp_path / "c")
    assert list(found) == ["a", "b/x", "c"]
    assert shared(found) == [["b/x", "c"]]
    assert found["a"] == torch.tensor(1, dtype=torch.bfloat16)
    with pytest.raises(PlanError, match="unknown keys"):
        load(tmp_path / "c", keys=["b"])


def test_every_damaged_byte_of_a_tensor_is_an_error(tmp_path):
    save({"a": torch.arange(100), "b": 1}, tmp_path / "c")
    segment = tmp_path / "c" / "seg-000000.fps"
    content = segment.read_bytes()
    for place in (4096, 4096 + 400, 4096 + 799):
        broken = bytearray(content)
        broken[place] ^= 1
        segment.write_bytes(broken)
        with pytest.raises(FormatError, match="'a'"):
            load(tmp_path / "c")


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(UncommittedError):
        load(tmp_path)
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(NotFpformatError):
        load(tmp_path / "file")


class Scaled(torch.Tensor):
    """A tensor of two parts: integers and a scale."""

    @staticmethod
    def __new__(cls, words, scale, note):
        return torch.Tensor._make_wrapper_subclass(cls, words.shape, dtype=scale.dtype)

    def __init__(self, words, scale, note):
        self.words, self.scale, self.note = words, scale, note

    def __tensor_flatten__(self):
        return ["words", "scale"], {"note": self.note}

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        return cls(parts["words"], parts["scale"], context["note"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            (value,) = args
            return cls(value.words, value.scale, value.note)
        raise NotImplementedError(str(function))


class Unknown(Scaled):
    """The same, never registered."""


def test_a_registered_subclass_is_rebuilt(tmp_path):
    register_subclass(Scaled)
    words = torch.arange(6, dtype=torch.int8).view(2, 3)
    value = Scaled(words, torch.tensor(0.5), ("x", 1))
    state = {"plain": value, "p": torch.nn.Parameter(value, requires_grad=False), "words": words}
    save(state, tmp_path / "c")
    found = load(tmp_path / "c")
    assert type(found["plain"]) is Scaled
    assert found["plain"].note == ("x", 1)
    assert torch.equal(found["plain"].words, words)
    assert isinstance(found["p"], torch.nn.Parameter)
    assert found["plain"].words.data_ptr() == found["words"].data_ptr()
    assert type(load(tmp_path / "c", keys=["plain"])["plain"]) is Scaled


def test_a_subclass_that_is_not_registered_is_named(tmp_path):
    value = Unknown(torch.arange(2), torch.tensor(0.5), None)
    save({"x": value, "y": torch.ones(1)}, tmp_path / "c")
    with pytest.raises(PlanError, match=r"Unknown.*register_subclass"):
        load(tmp_path / "c")
    assert torch.equal(load(tmp_path / "c", keys=["y"])["y"], torch.ones(1))


def test_only_classes_that_come_apart_can_be_registered():
    for cls in (int, torch.Tensor, "Scaled"):
        with pytest.raises(PlanError, match="__tensor_flatten__"):
            register_subclass(cls)
