"""Any flat dict of tensors, through the library, fpformat and back, is equal to the byte."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tool_inputs import same_tensor

from fpformat_io.torch import load
from fpformat_tools.commands.fpconvert import main
from fpformat_tools.formats.safetensors.file import open_safetensors

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    nbytes = int(np.prod(shape, dtype=int)) * dtype.itemsize
    raw = draw(st.binary(min_size=nbytes, max_size=nbytes))
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.tensor(list(raw), dtype=torch.uint8).view(dtype).reshape(shape)


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=30).filter(
    lambda name: name != "__metadata__"
)
metadata = st.text(max_size=5).map(lambda text: {"format": text}) | st.dictionaries(
    st.text(max_size=5).filter(lambda key: not key.startswith("fpformat.")),
    st.text(max_size=20),
    max_size=1,
)


def convert(source: Path, target: Path) -> None:
    assert main([str(source), str(target), "--quiet"]) == 0


@pytest.mark.clause("CNV-1", "CNV-9", "CNV-11")
@settings(max_examples=60)
@given(state=st.dictionaries(names, tensors(), max_size=6), strings=metadata)
def test_safetensors(state: dict[str, torch.Tensor], strings: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        save_file(state, root / "a.safetensors", metadata=strings or None)
        convert(root / "a.safetensors", root / "ckpt")
        convert(root / "ckpt", root / "b.safetensors")
        one, two = parts_of(root / "a.safetensors"), parts_of(root / "b.safetensors")
        if strings and "format" not in strings:
            # Metadata without a format gets one.
            one[0]["format"] = "pt"
        else:
            assert (root / "a.safetensors").read_bytes() == (root / "b.safetensors").read_bytes()
        assert one == two
        read = load(root / "ckpt")
        assert list(read) == order_of(root / "a.safetensors")
        assert all(same_tensor(read[name], tensor) for name, tensor in state.items())


def parts_of(path: Path) -> tuple[dict[str, str], Any, bytes]:
    opened = open_safetensors(path)
    opened.source.close()
    return opened.header.metadata, opened.header.entries, path.read_bytes()[opened.start :]


def order_of(path: Path) -> list[str]:
    opened = open_safetensors(path)
    opened.source.close()
    return [entry.name for entry in opened.header.entries]


@pytest.mark.clause("CNV-1", "CNV-23", "CNV-25")
@settings(max_examples=60)
@given(state=st.dictionaries(names, tensors(), max_size=6), pick=st.randoms(use_true_random=False))
def test_torch(state: dict[str, torch.Tensor], pick: Any) -> None:
    """Nested states with views of every kind come back with equal values and equal sharing."""
    views: dict[str, Any] = dict(state)
    for number, tensor in enumerate(list(state.values())):
        choice = pick.randrange(4)
        if choice == 0:
            views[f"tie {number}"] = tensor
        elif choice == 1 and tensor.dim() > 1:
            views[f"turned {number}"] = [tensor.transpose(0, 1)]
        elif choice == 2 and tensor.dim():
            views[f"part {number}"] = {"x": tensor[1:]}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        torch.save(views, root / "a.pt")
        convert(root / "a.pt", root / "ckpt")
        convert(root / "ckpt", root / "b.pt")
        convert(root / "a.pt", root / "c.pt")
        assert (root / "b.pt").read_bytes() == (root / "c.pt").read_bytes()
        expected = torch.load(root / "a.pt", weights_only=True)
        for read in (load(root / "ckpt"), torch.load(root / "b.pt", weights_only=True)):
            assert list(read) == list(expected)
            for (one, first), (two, second) in zip(flat(expected), flat(read), strict=True):
                assert one == two
                assert same_tensor(first, second)
            assert groups(read) == groups(expected)


def flat(state: dict[str, Any]) -> Any:
    for name, value in state.items():
        inner = value[0] if isinstance(value, list) else value
        yield name, inner["x"] if isinstance(inner, dict) else inner


def groups(state: dict[str, Any]) -> set[frozenset[str]]:
    found: dict[int, set[str]] = {}
    for name, tensor in flat(state):
        if tensor.numel():
            found.setdefault(tensor.untyped_storage().data_ptr(), set()).add(name)
    return {frozenset(group) for group in found.values() if len(group) > 1}
