"""Values, data types and layouts come back to the bit."""

import shutil

import numpy as np
import pytest
import torch
from torch_states import differences, raw_bytes, shared

from fpformat.dtypes import DTYPES
from fpformat.read.reader import open_checkpoint
from fpformat.read.verify import verify_checkpoint
from fpformat_io.torch import load, save
from fpformat_io.torch.dtypes import to_torch

# torch says so once for every process that makes a tensor of this type.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

TYPES = [to_torch(dtype, where="test") for dtype in DTYPES.values()]
SIZES = (1, 3, 511, 512, 513, 4095, 4096, 4097, 65535, 65536, 65537)


def every_byte(dtype):
    """Return a tensor in which every byte has had every value."""
    return torch.arange(256, dtype=torch.uint8).repeat(16).view(dtype)


def round_trip(state, path):
    save(state, path)
    assert not verify_checkpoint(path).problems
    return load(path)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_bit_pattern_of_every_type(dtype, tmp_path):
    state = {"all": every_byte(dtype), "scalar": every_byte(dtype)[7].clone()}
    again = round_trip(state, tmp_path / "c")
    assert not differences(state, again)
    assert again["scalar"].shape == ()


def test_special_floats(tmp_path):
    words = [0x7FC00001, -0x3FFFF9, -(2**31), 1, 0x7F800000, 0x7F800001]
    state = {"f32": torch.tensor(words, dtype=torch.int32).view(torch.float32)}
    assert not differences(state, round_trip(state, tmp_path / "c"))


def test_bools_keep_their_bytes(tmp_path):
    state = {"b": torch.tensor([0, 1, 2, 255], dtype=torch.uint8).view(torch.bool)}
    assert raw_bytes(round_trip(state, tmp_path / "c")["b"]) == b"\0\1\2\xff"


def test_empty_tensors_keep_shape_and_type_and_are_not_tied(tmp_path):
    state = {
        "a": torch.tensor([]),
        "b": torch.tensor([]),
        "int": torch.empty(0, dtype=torch.int64),
        "2x0": torch.empty(2, 0),
        "3x0x5": torch.empty(3, 0, 5, dtype=torch.bool),
        "slice": torch.arange(10.0)[:0],
        "f8": torch.empty(0, dtype=torch.float8_e4m3fn),
        "parameter": torch.nn.Parameter(torch.empty(0, 7)),
        "array": np.empty((0, 3), dtype=np.int16),
    }
    again = round_trip(state, tmp_path / "c")
    assert not differences(state, again)
    with open_checkpoint(tmp_path / "c") as checkpoint:
        assert all(checkpoint.entry(key).alias is None for key in checkpoint.keys())  # noqa: SIM118


def test_layouts_come_back_in_c_order(tmp_path):
    base = torch.randn(8, 4, 3, 5)
    state = {
        "channels_last": base.to(memory_format=torch.channels_last),
        "transposed": torch.randn(7, 9).t(),
        "every_second": torch.arange(101.0)[::2],
        "permuted": base.clone().permute(3, 1, 0, 2).flip(0),
        "diagonal": torch.arange(25.0).view(5, 5).diagonal(),
    }
    before = {name: (value.stride(), value.data_ptr()) for name, value in state.items()}
    again = round_trip(state, tmp_path / "c")
    assert not differences(state, again)
    assert all(value.is_contiguous() for value in again.values())
    assert before == {name: (value.stride(), value.data_ptr()) for name, value in state.items()}


def test_an_expanded_tensor_costs_what_it_repeats(tmp_path):
    state = {"mask": torch.tensor([True, False]).expand(1_000_000, 2)}
    report = save(state, tmp_path / "c")
    assert report.data_nbytes < 100
    again = load(tmp_path / "c")["mask"]
    assert (again.shape, again.stride()) == ((1_000_000, 2), (0, 1))
    assert torch.equal(again[:3], state["mask"][:3])


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_conjugate_and_negative_views_are_resolved(dtype, tmp_path):
    base = every_byte(torch.float16)[:64].nan_to_num(0, 0, 0).to(torch.float32)
    value = torch.view_as_complex(base.view(-1, 2)).to(dtype)
    state = {"conj": value.conj()}
    if dtype is not torch.complex32:
        state["negative"] = value.clone().conj().imag
    again = round_trip(state, tmp_path / "c")
    assert not differences(state, again)
    assert not again["conj"].is_conj()


def test_numpy_arrays_of_any_layout_and_byte_order(tmp_path):
    array = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)
    frozen = array.copy()
    frozen.flags.writeable = False
    state = {
        "c": array,
        "fortran": np.asfortranarray(array),
        "reversed": array[::-1],
        "column": array[:, 3],
        "frozen": frozen,
        "0d": np.array(7, dtype=np.int16),
        "big": array.astype(">f4"),
        "longlong": np.arange(4, dtype=np.longlong),
        "complex": np.array([1 + 2j]),
        "bool": np.array([True, False]),
    }
    assert not differences(state, round_trip(state, tmp_path / "c"))


def test_odd_sizes_do_not_leak_padding_and_stay_aligned(tmp_path):
    state = {}
    for size in SIZES:
        state[f"u8_{size}"] = (torch.arange(size) % 251).to(torch.uint8)
        state[f"f64_{size}"] = torch.arange(3, dtype=torch.float64) + size
    again = round_trip(state, tmp_path / "c")
    assert not differences(state, again)
    assert all(value.data_ptr() % 64 == 0 for value in again.values())
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in again.values())


def test_more_than_one_batch_of_pieces(tmp_path):
    value = torch.arange(5_000_001, dtype=torch.int32)
    assert not differences({"x": value}, round_trip({"x": value}, tmp_path / "c"))


def test_more_than_2_gib_and_2_to_the_31_elements(tmp_path):
    count = 2**31 + 4097
    big = torch.zeros(count, dtype=torch.int8)
    marks = (0, 1, count // 2, 0x7FFFF000 - 1, 0x7FFFF000, 2**31 - 1, 2**31, count - 1)
    for number, place in enumerate(marks):
        big[place] = number + 1
    report = save({"big": big, "after": torch.arange(5)}, tmp_path / "c")
    assert report.data_nbytes > count
    again = load(tmp_path / "c")
    shutil.rmtree(tmp_path / "c")  # pytest would keep the gigabytes for three more runs
    assert torch.equal(again["after"], torch.arange(5))
    assert torch.equal(again["big"], big)


def test_a_slice_costs_only_its_own_bytes(tmp_path):
    big = torch.arange(2 * 1024 * 1024, dtype=torch.float32)
    state = {
        "slice": big[1000:1010],
        "row": big.view(1024, 2048).narrow(0, 5, 1),
        "chunk": torch.chunk(big, 4096)[7],
    }
    report = save(state, tmp_path / "c")
    assert report.nbytes < 256 * 1024
    assert report.untied == ()
    again = load(tmp_path / "c")
    assert not differences(state, again)
    assert shared(again) == []


def test_saving_leaves_the_state_alone(tmp_path):
    weight = torch.nn.Parameter(torch.randn(3, 4).t())
    state = {"w": weight, "twice": weight, "list": [1, weight]}
    version = weight._version
    save(state, tmp_path / "c")
    assert state["w"] is weight
    assert (weight.stride(), weight._version, weight.grad_fn) == ((1, 4), version, None)
