"""Nesting, order, types of keys and of plain values come back exactly."""

import random
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from torch_states import differences

from fpformat_io.torch import load, save

KEYS = [
    "",
    " ",
    "__metadata__",
    "../../etc/passwd",
    "/abs",
    "a/b\\c",
    "nul\0byte",
    "new\nline",
    'quo"te',
    "caf\u00e9",
    "cafe\u0301",
    "\U0001f600",
    "\u202eRTL",
    "CASE",
    "case",
    "trailing.",
    ".leading",
    "x" * 5000,
    "manifest.json",
    "seg-000000.fps",
    "~l5",
    "~h",
    "~",
    "%2e%2e",
    "5",
    5,
    -5,
    2**63 - 1,
    -(2**63),
    True,
    False,
    None,
    "None",
]


def round_trip(state, path):
    save(state, path)
    return load(path)


def test_plain_values(tmp_path):
    state = {
        "int": 3,
        "big": 2**70,
        "huge": -(7**9999),
        "edges": [2**63 - 1, 2**63, -(2**63), -(2**63) - 1],
        "floats": [0.1, float("nan"), float("-inf"), -0.0, 5e-324],
        "flag": True,
        "none": None,
        "text": "r\u00e9sum\u00e9 \U0001f600 \0",
        "bytes": b"\x00\xff" * 40,
        "complex": complex(-0.0, float("nan")),
        "size": torch.Size([2, 3]),
        "no_size": torch.Size([]),
        "dtype": [torch.bfloat16, torch.float8_e5m2, torch.bool],
        "device": [torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")],
        "tuple": (1, (2, [3, {"k": torch.ones(2)}])),
        "empty": [{}, [], (), OrderedDict(), Counter(), "", b""],
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
        "counter": Counter({30: 1, 80: 2}),
        "shared_twice": [[1], [1]],
    }
    again = round_trip(state, tmp_path / "c")
    assert not differences(state, again)
    del again["huge"], state["huge"]  # Python prints no integer of this size
    assert repr(again) == repr(state)


@pytest.mark.parametrize("root", [None, 5, "text", [], (), {}, [1, (2,)]], ids=repr)
def test_any_root(root, tmp_path):
    again = round_trip(root, tmp_path / "c")
    assert type(again) is type(root)
    assert again == root


def test_a_tensor_as_root(tmp_path):
    assert torch.equal(round_trip(torch.arange(3), tmp_path / "c"), torch.arange(3))


def test_hostile_keys(tmp_path):
    state = {key: torch.tensor([float(place)]) for place, key in enumerate(KEYS)}
    again = round_trip({"deep": {"": state}, "top": state}, tmp_path / "c")
    for found in (again["deep"][""], again["top"]):
        assert not differences(state, found)
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "c",
        "manifest.json",
        "seg-000000.fps",
    ]


def test_order_of_keys_is_kept(tmp_path):
    state = {key: torch.tensor(0) for key in ("b", "a", "c", "B")}
    assert list(round_trip(state, tmp_path / "c")) == ["b", "a", "c", "B"]


def test_numpy_scalars_and_types(tmp_path):
    state = {
        "f8": np.float64(1.5),
        "nan": np.array([0x7FF0000000000001], dtype=np.uint64).view(np.float64)[0],
        "bool": np.bool_(True),
        "i8": np.int64(-7),
        "u1": np.uint8(255),
        "c8": np.complex64(1 - 2j),
        "f2": np.float16(0.5),
        "dtype": np.dtype("float32"),
        "dtypes": [np.dtype("bool"), np.dtype("complex128")],
    }
    assert not differences(state, round_trip(state, tmp_path / "c"))


def model(*, keep_vars):
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Linear(2, 2, bias=False)
    )
    net[2].weight.requires_grad_(False)
    net.register_buffer("temporary", torch.ones(1), persistent=False)
    return net, net.state_dict(keep_vars=keep_vars)


@pytest.mark.parametrize("keep_vars", [False, True])
def test_the_state_of_a_model(keep_vars, tmp_path):
    net, state = model(keep_vars=keep_vars)
    again = round_trip(state, tmp_path / "c")
    assert type(again) is OrderedDict
    assert again._metadata == state._metadata
    assert type(again._metadata) is OrderedDict
    assert not differences(state, again)
    assert [value.requires_grad for value in again.values()] == [
        value.requires_grad for value in state.values()
    ]
    net.load_state_dict(again, strict=True)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_the_state_of_an_optimizer(make, tmp_path):
    def build():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        groups = [
            {"params": net[0].parameters(), "lr": 1e-3},
            {"params": net[1].parameters(), "weight_decay": 0.0},
        ]
        return net, make(groups, lr=1e-3)

    def train(net, optimizer):
        optimizer.zero_grad()
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    net, optimizer = build()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    train(net, optimizer)
    scheduler.step()
    state = {"o": optimizer.state_dict(), "n": net.state_dict(), "s": scheduler.state_dict()}
    again = round_trip(state, tmp_path / "c")
    assert not differences(state, again)
    other, resumed = build()
    other.load_state_dict(again["n"])
    resumed.load_state_dict(again["o"])
    torch.optim.lr_scheduler.MultiStepLR(resumed, [1, 3]).load_state_dict(again["s"])
    train(net, optimizer)
    train(other, resumed)
    assert not differences(net.state_dict(), other.state_dict())


def test_a_learning_rate_that_is_a_tensor(tmp_path):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=torch.tensor(1e-3))
    state = optimizer.state_dict()
    again = round_trip(state, tmp_path / "c")
    assert not differences(state, again)
    optimizer.load_state_dict(again)


def test_random_number_generators_go_on(tmp_path):
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    state = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "generator": np.random.default_rng(4).bit_generator.state,
        "python": random.getstate(),
    }
    again = round_trip(state, tmp_path / "c")
    assert not differences(state, again)
    expected = (torch.rand(3), np.random.rand(3), random.random())
    torch.set_rng_state(again["torch"])
    np.random.set_state(again["numpy"])
    random.setstate(again["python"])
    assert torch.equal(torch.rand(3), expected[0])
    assert (np.random.rand(3) == expected[1]).all()
    assert random.random() == expected[2]
    np.random.default_rng().bit_generator.state = again["generator"]


def test_depth_127_of_containers(tmp_path):
    state = torch.ones(1)
    for _ in range(127):
        state = [state]
    again = round_trip(state, tmp_path / "c")
    for _ in range(127):
        again = again[0]
    assert torch.equal(again, torch.ones(1))
