"""Strided tensors in C order: the same bytes as numpy's, whatever the pieces, in bounded memory."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tool_inputs import archive, save_zip, storage, tensor_call

from fpformat.dtypes import by_name
from fpformat_tools.streams import gather
from fpformat_tools.streams.ranges import HeldRange
from fpformat_tools.streams.state import Tensor


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    axes = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 12)), max_size=5))
    return Tensor(
        base=0,
        dtype=by_name(draw(st.sampled_from(["U8", "I16", "F32", "F64", "C128"]))),
        shape=tuple(dim for dim, _ in axes),
        strides=tuple(stride for _, stride in axes),
        offset=draw(st.integers(0, 3)),
    )


@given(
    tensor=tensors(),
    block=st.integers(1, 3000),
    step=st.integers(1, 3000),
    span=st.integers(16, 1000),
)
def test_pieces_are_those_of_numpy(tensor: Tensor, block: int, step: int, span: int) -> None:
    raw = np.random.default_rng(5).bytes(tensor.reach[1])
    itemsize = tensor.dtype.nbytes
    elements = np.frombuffer(raw, f"V{itemsize}")[tensor.offset :]
    strides = tuple(stride * itemsize for stride in tensor.strides)
    expected = np.lib.stride_tricks.as_strided(elements, tensor.shape, strides).tobytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "_BLOCK_NBYTES", block)
        patch.setattr(gather, "_LARGE_BLOCK_NBYTES", block)
        patch.setattr(gather, "_SPAN_LIMIT_NBYTES", span)
        source = gather.GatheredSource(HeldRange(raw), tensor)
        offsets = range(0, tensor.nbytes, step)
        parts = [source.read(offset=o, nbytes=min(step, tensor.nbytes - o)) for o in offsets]
        assert b"".join(parts) == expected
        for offset in reversed(offsets):
            nbytes = min(step, tensor.nbytes - offset)
            part = source.read(offset=offset, nbytes=nbytes)
            assert part == expected[offset : offset + nbytes]


def test_expanded_tensors_take_little_memory(tmp_path: Path, run_alone: Any) -> None:
    path = save_zip({"a": torch.arange(4.0).expand(1 << 26, 4)}, tmp_path / "x.pt")
    outcome = run_alone(path, tmp_path / "x.safetensors", "--quiet")
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "x.safetensors").stat().st_size > 1 << 30
    read = np.memmap(tmp_path / "x.safetensors", "<f4", mode="r")[-4 * 1000 :]
    assert (read.reshape(-1, 4) == np.arange(4)).all()
    (tmp_path / "x.safetensors").unlink()


def test_windows_over_a_small_storage(tmp_path: Path, convert: Any) -> None:
    windows = torch.arange(3000.0).unfold(0, 1000, 1)
    path = save_zip({"a": windows}, tmp_path / "x.pt")
    convert(path, tmp_path / "x.safetensors")
    raw = (tmp_path / "x.safetensors").read_bytes()[-windows.numel() * 4 :]
    assert raw == windows.contiguous().numpy().tobytes()


@pytest.mark.parametrize("shape", [(1 << 31,), (1 << 16, 1 << 15)])
@pytest.mark.parametrize("directory", [False, True])
def test_repeats_without_measure(
    tmp_path: Path, run_alone: Any, shape: tuple[int, ...], directory: bool
) -> None:
    call = tensor_call(shape=shape, strides=(0,) * len(shape), storage=storage())
    path = archive(tmp_path / "x.pt", {"layer": {"a": call}})
    arguments = ("--to", "safetensors") if directory else ()
    target = tmp_path / ("out" if directory else "out.safetensors")
    outcome = run_alone(path, target, *arguments)
    assert outcome.code == 1
    nbytes = math.prod(shape) * 4
    assert f"layer/a: would be written out to {nbytes:,} bytes, its storage has 16" in outcome.err
    assert not target.exists()
    for other in ("ckpt", "y.pt"):
        assert run_alone(path, tmp_path / other).code == 0
