"""Any state of any nesting, data type, layout and sharing comes back equal to the bit."""

import struct
from collections import Counter, OrderedDict
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_states import differences, leaves, shared

from fpformat.dtypes import DTYPES, numpy_dtype
from fpformat.read.verify import verify_checkpoint
from fpformat_io.torch import load, load_into, save
from fpformat_io.torch.dtypes import to_torch

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

TORCH_TYPES = [to_torch(dtype, where="test") for dtype in DTYPES.values()]
NUMPY_TYPES = [found for dtype in DTYPES.values() if (found := numpy_dtype(dtype))]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=4) | st.text(
    "~/\0il0", max_size=3
)
KEYS = TEXT | st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.none()
FLOATS = st.binary(min_size=8, max_size=8).map(lambda raw: struct.unpack("<d", raw)[0])
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    FLOATS,
    TEXT,
    st.binary(max_size=4),
    st.sampled_from([*TORCH_TYPES, torch.device("cpu"), torch.Size([1, 2])]),
)
POOLS = [torch.randint(0, 256, (4096,), dtype=torch.uint8) for _ in range(2)]


@st.composite
def tensors(draw):
    """Draw a window of one of two pools, so that windows often overlap, or a copy of one."""
    dtype = draw(st.sampled_from(TORCH_TYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    strides = [draw(st.integers(0, 6)) for _ in shape]
    offset = draw(st.integers(0, 20))
    pool = draw(st.sampled_from(POOLS))
    window = torch.empty(0, dtype=dtype).set_(pool.untyped_storage(), offset, shape, strides)
    if draw(st.booleans()):
        return window
    if dtype.is_complex and dtype is not torch.complex32 and draw(st.booleans()):
        return window.conj()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    view = window.view(bits.get(dtype.itemsize, torch.complex128))
    return view.contiguous().clone().view(dtype)


@st.composite
def parameters(draw):
    tensor = draw(tensors())
    trains = draw(st.booleans()) and (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    return torch.nn.Parameter(tensor, requires_grad=trains)


@st.composite
def arrays(draw):
    dtype = draw(st.sampled_from(NUMPY_TYPES))
    count = draw(st.integers(0, 24))
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    array = np.frombuffer(raw, dtype=dtype)
    form = draw(st.sampled_from(["plain", "reversed", "fortran", "swapped", "scalar"]))
    if form == "reversed":
        return array[::-2]
    if form == "fortran" and count % 2 == 0:
        return np.asfortranarray(array.reshape(2, -1))
    if form == "swapped":
        return array.astype(dtype.newbyteorder(">"))
    return array[0] if form == "scalar" and count else array


def containers(values):
    items = st.dictionaries(KEYS, values, max_size=3)
    return st.one_of(
        items,
        items.map(OrderedDict),
        items.map(lambda found: Counter() | Counter(dict.fromkeys(found, 3))),
        st.lists(values, max_size=3),
        st.lists(values, max_size=3).map(tuple),
    )


STATES = st.recursive(PLAIN | tensors() | parameters() | arrays(), containers, max_leaves=10)


def blank(state):
    """Return a state of the same shape with other values, to load into."""
    if isinstance(state, torch.Tensor):
        made = torch.zeros(state.nbytes, dtype=torch.uint8).view(state.dtype).view(state.shape)
        if type(state) is torch.nn.Parameter:
            return torch.nn.Parameter(made, state.requires_grad)
        return made
    if isinstance(state, np.ndarray):
        return np.zeros(state.shape, dtype=state.dtype)
    if type(state) in (dict, OrderedDict, Counter):
        return type(state)({key: blank(value) for key, value in state.items()})
    if type(state) in (list, tuple):
        return type(state)(blank(value) for value in state)
    return state


@settings(max_examples=150)
@given(state=STATES)
def test_save_and_load(state):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "c"
        report = save(state, path)
        assert not verify_checkpoint(path).problems
        again = load(path)
        assert not differences(state, again)
        lazy = {
            name
            for name, value in names(state)
            if isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg())
        }
        if not lazy and not report.untied:
            assert_ties_kept(state, again)


def names(state):
    for path, value in leaves(state):
        yield "/".join(str(key) for *_, key in path), value


def overlap(one, other):
    """Return whether two tensors have a byte in common, by listing their addresses."""
    return bool(addresses(one) & addresses(other))


def addresses(tensor):
    found = {tensor.data_ptr()} if tensor.numel() else set()
    for dim, step in zip(tensor.shape, tensor.stride(), strict=True):
        found = {at + place * step * tensor.itemsize for at in found for place in range(dim)}
    return {at + byte for at in found for byte in range(tensor.itemsize)}


def assert_ties_kept(state, again):
    """Where two tensors had bytes in common, the loaded ones do, at the same distance."""
    pairs = [
        (value, other)
        for (_, value), (_, other) in zip(leaves(state), leaves(again), strict=True)
        if isinstance(value, torch.Tensor) and value.numel()
    ]
    for place, (one, one_again) in enumerate(pairs):
        for other, other_again in pairs[:place]:
            if overlap(one, other):
                distance = one.data_ptr() - other.data_ptr()
                assert one_again.data_ptr() - other_again.data_ptr() == distance


@settings(max_examples=60)
@given(state=st.dictionaries(TEXT, STATES, max_size=3))
def test_load_into_a_blank_of_it(state):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "c"
        save(state, path)
        template = blank(state)
        report = load_into(path, template)
        assert (report.missing, report.unexpected, report.mismatched) == ((), (), ())
        assert not differences(state, template)


@settings(max_examples=40)
@given(state=st.dictionaries(TEXT, STATES, min_size=1, max_size=3), data=st.data())
def test_any_flipped_bit_of_a_file_is_an_error_on_load_or_verification(state, data):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "c"
        save(state, path)
        victim = data.draw(st.sampled_from(sorted(path.iterdir())))
        content = bytearray(victim.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= 1 << data.draw(st.integers(0, 7))
        victim.write_bytes(content)
        assert verify_checkpoint(path).problems


def test_shared_lists_groups():
    base = torch.ones(3)
    assert shared({"a": base, "b": [base]}) == [["a", "b/0"]]
