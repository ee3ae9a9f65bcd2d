"""The same saves from a real accelerator; skipped where there is none."""

import pytest
import torch

import fpformat_io.torch as fpt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def state_on(device):
    torch.manual_seed(1)
    return {
        "big": torch.randn(4000, 5000, device=device),
        "turned": torch.randn(700, 900, device=device).t(),
        "half": torch.randn(33, device=device, dtype=torch.bfloat16),
        "host": torch.randn(100),
        "many": [torch.randn(17, device=device) for _ in range(300)],
    }


def test_a_state_on_the_device_comes_back(tmp_path):
    state = state_on("cuda")
    fpt.save(state, tmp_path / "c")
    loaded = fpt.load(tmp_path / "c", device="cuda")
    for name in ("big", "turned", "half", "host"):
        assert torch.equal(loaded[name].cpu(), state[name].cpu())
    assert all(map(torch.equal, loaded["many"], state["many"]))


def test_the_state_is_that_of_the_call(tmp_path):
    """Work that was queued before the call belongs to the state, and needs no synchronization."""
    tensor = torch.zeros(8_000_000, device="cuda")
    torch.cuda._sleep(200_000_000)
    tensor.add_(1)
    fpt.save({"w": tensor}, tmp_path / "c")
    assert torch.equal(fpt.load(tmp_path / "c")["w"], torch.ones(8_000_000))


def test_a_caller_on_a_stream_of_its_own(tmp_path):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.zeros(1_000_000, device="cuda")
        torch.cuda._sleep(100_000_000)
        tensor.add_(2)
        fpt.save({"w": tensor}, tmp_path / "c")
    assert fpt.load(tmp_path / "c")["w"].eq(2).all()
