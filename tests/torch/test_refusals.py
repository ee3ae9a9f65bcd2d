"""What has no representation is refused with every path, before anything is on disk."""

import argparse
import dataclasses
import enum
import functools
import pathlib
import warnings
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch

from fpformat.errors import PlanError
from fpformat_io.errors import WriteError
from fpformat_io.torch import Checkpointer, load, load_into, save

pytestmark = pytest.mark.clause("TRE-10")

Pair = namedtuple("Pair", "a b")


class Color(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Settings:
    rate: float = 1e-3


def refused(state, folder, **more):
    with pytest.raises(PlanError) as caught:
        save(state, folder / "c", **more)
    assert list(folder.iterdir()) == []
    return caught.value


def loop():
    inner = {}
    inner["self"] = [inner]
    return inner


def freed():
    tensor = torch.ones(10)
    tensor.untyped_storage().resize_(0)
    return tensor


def deep(depth):
    value = None
    for _ in range(depth):
        value = [value]
    return value


def bad_counter():
    counter = Counter()
    counter.note = 1
    return counter


# torch warns of each of these kinds when the first tensor of it is made.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    COO = torch.sparse_coo_tensor(torch.tensor([[0, 2], [1, 0]]), torch.ones(2), (3, 4))
    CSR = COO.to_sparse_csr()
    NESTED = torch.nested.nested_tensor([torch.ones(2)])
    QUANTIZED = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)

BAD = {
    "namespace": (argparse.Namespace(a=1), "argparse.Namespace"),
    "path": (pathlib.PurePosixPath("a/b"), "PurePosixPath"),
    "dataclass": (Settings(), "Settings"),
    "function": (len, "builtin_function"),
    "partial": (functools.partial(int), "partial"),
    "class": (int, "type"),
    "namedtuple": (Pair(1, 2), "Pair"),
    "enum": (Color.RED, "Color"),
    "set": ({1}, "set"),
    "defaultdict": (defaultdict(list), "defaultdict"),
    "bytearray": (bytearray(b"a"), "bytearray"),
    "generator": (torch.Generator(), "Generator"),
    "coo": (COO, "sparse_coo"),
    "csr": (CSR, "sparse_csr"),
    "nested": (NESTED, "nested"),
    "quantized": (QUANTIZED, "qint8"),
    "meta": (torch.empty(2, device="meta"), "meta"),
    "freed": (freed(), "freed"),
    "functional": (torch._to_functional_tensor(torch.ones(3)), "no memory behind"),
    "object_array": (np.array([{}, None], dtype=object), "object"),
    "str_array": (np.array(["ab", "c"]), "<U2"),
    "record_array": (np.zeros(2, dtype=[("a", "f4")]), "not registered"),
    "matrix": (np.ma.masked_array([1]), "Masked"),
    "date": (np.datetime64("2020-01-01"), "datetime64"),
    "longdouble": (np.longdouble(1), "longdouble"),
    "np_str": (np.str_("a"), "str_"),
    "swapped_dtype": (np.dtype(">f4"), ">f4"),
    "qint8": (torch.qint8, "qint8"),
    "surrogate": ("a\ud800", "surrogate"),
    "loop": (loop(), "contains itself"),
    "deep": (deep(128), "deeper than 128"),
    "counter": (bad_counter(), "note"),
    "key_float": ({1.5: 1}, "1.5"),
    "key_tuple": ({(1, 2): 1}, "tuple"),
    "key_enum": ({Color.RED: 1}, "Color"),
    "key_numpy": ({np.int64(1): 1}, "int64"),
    "key_surrogate": ({"\udfff": 1}, "surrogate"),
    "key_long": ({"x" * 70_000: torch.ones(1)}, "NAM-4"),
    "key_huge": ({10**9999: torch.ones(1)}, "bits"),
}


@pytest.mark.parametrize("name", BAD)
def test_one_value(name, tmp_path):
    value, reason = BAD[name]
    error = refused({"good": torch.ones(2), name: value}, tmp_path)
    assert len(error.problems) == 1
    assert name in error.problems[0] or name == "key_long"
    assert reason in error.problems[0]
    assert error.error_class == "invalid"


def inside_grad(function):
    torch.func.grad(function)(torch.ones(3))


def inside_vmap(function):
    torch.func.vmap(function)(torch.ones(2, 3))


def inside_functionalize(function):
    torch.func.functionalize(function)(torch.ones(3))


@pytest.mark.parametrize("inside", [inside_grad, inside_vmap, inside_functionalize])
def test_a_tensor_inside_a_transform(tmp_path, inside):
    def function(tensor):
        (reason,) = refused({"x": tensor}, tmp_path).problems
        assert "torch.func" in reason
        assert "freed" not in reason
        return tensor.sum()

    inside(function)


def test_a_functional_tensor_in_a_template(tmp_path):
    save({"x": torch.ones(3)}, tmp_path / "c")
    with pytest.raises(PlanError, match="no memory behind"):
        load_into(tmp_path / "c", {"x": torch._to_functional_tensor(torch.ones(3))})


def test_all_paths_stand_in_one_message(tmp_path):
    state = {"model": {"w": torch.ones(2)}}
    state.update((name, [{"x": value}]) for name, (value, _) in BAD.items())
    state["again"] = OrderedDict(a=(len, len))
    error = refused(state, tmp_path)
    assert len(error.problems) == len(BAD) + 2
    text = str(error)
    assert "namespace/~l0/x: " in text
    assert "again/a/~l0: " in text
    assert "again/a/~l1: " in text


def test_an_attribute_of_an_ordered_dict(tmp_path):
    state = OrderedDict(a=1)
    state.hook = len
    error = refused(state, tmp_path)
    assert "~ahook" in error.problems[0]


def test_a_list_inside_itself_twice_ends(tmp_path):
    value = []
    value += [value, value]
    assert len(refused({"x": value}, tmp_path).problems) == 2


def test_deep_ordered_dicts(tmp_path):
    value = OrderedDict()
    for _ in range(127):
        value = [value]
    assert "too deep" in refused(value, tmp_path).problems[0]


@pytest.mark.parametrize(
    "metadata",
    [{"a": 1}, {1: "a"}, {"a": None}, {"a": b"x"}, {"a": "\ud800"}, [("a", "b")], "ab"],
    ids=repr,
)
def test_metadata_that_is_no_mapping_of_strings(metadata, tmp_path):
    assert "metadata" in str(refused({}, tmp_path, metadata=metadata))


@pytest.mark.parametrize("step", [-1, 2**53, 1.0, True, "1"], ids=repr)
def test_a_step_that_a_manifest_cannot_hold(step, tmp_path):
    assert "step" in str(refused({}, tmp_path, step=step))
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(PlanError, match="step"):
        checkpointer.save(step, {})


def test_an_existing_path(tmp_path):
    (tmp_path / "c").mkdir()
    with pytest.raises(PlanError, match="exists"):
        save({"a": 1}, tmp_path / "c")
    assert list((tmp_path / "c").iterdir()) == []


def test_an_attribute_with_a_name_that_is_no_str(tmp_path):
    ordered = OrderedDict(a=1)
    ordered.__dict__[5] = 3
    with pytest.raises(PlanError, match="is no str"):
        save({"o": ordered}, tmp_path / "c")


@pytest.mark.parametrize("device", [None, "nonsense", "cuda:99", 3.5])
def test_a_device_that_is_not_there(tmp_path, device):
    save({}, tmp_path / "c")
    with pytest.raises(PlanError, match="device="):
        load(tmp_path / "c", device=device)


@pytest.mark.parametrize("rank", ["0", 1, -1, None, True])
def test_a_rank_that_is_none(tmp_path, rank):
    save({}, tmp_path / "c")
    with pytest.raises(PlanError, match="rank="):
        load(tmp_path / "c", rank=rank)


def test_a_working_directory_that_was_removed(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(WriteError) as caught:
        save({"a": 1}, "c")
    assert (caught.value.path, caught.value.errno) == ("c", 2)
