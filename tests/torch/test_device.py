"""Live tensors as sources: ranges of any layout, and copies from a device in the right order."""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fpformat_io.torch as fpt
from fpformat.dtypes import by_name
from fpformat_io.torch import device as device_module
from fpformat_io.torch.device import DeviceCopier, DeviceCopiers
from fpformat_io.torch.dtypes import copy_range
from fpformat_io.torch.flatten import Slot
from fpformat_io.torch.sources import live_sources

BASE = torch.arange(2 * 3 * 5 * 4, dtype=torch.float32).view(2, 3, 5, 4)
LAYOUTS = {
    "contiguous": BASE,
    "transposed": BASE.transpose(0, 2),
    "reversed": BASE.permute(3, 2, 1, 0),
    "steps": BASE[:, ::2, 1::2],
    "conjugate": torch.complex(BASE, BASE + 0.5).conj().transpose(1, 3),
    "negative": torch.complex(BASE, BASE + 0.5).conj().imag,
    "half": BASE.to(torch.bfloat16).transpose(0, 3),
    "bool": (BASE % 3 == 0).transpose(1, 2),
    "scalar": BASE[0, 0, 0, 1],
    "empty": BASE[:0].transpose(1, 2),
}


def bytes_of(tensor):
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(sorted(LAYOUTS)),
    bounds=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    shift=st.integers(0, 8),
)
def test_any_range_of_any_layout(name, bounds, shift):
    tensor = LAYOUTS[name]
    whole = bytes_of(tensor)
    start, stop = sorted(int(bound * len(whole)) for bound in bounds)
    memory = np.full(shift + stop - start, 0xEE, dtype="u1")
    copy_range(memory[shift:], tensor, offset=start)
    assert memory[shift:].tobytes() == whole[start:stop]
    assert (memory[:shift] == 0xEE).all()


@pytest.mark.parametrize("kind", [">f4", "<i2", "?"])
def test_arrays_in_any_order(kind):
    array = np.arange(60).reshape(3, 4, 5).astype(kind).transpose(2, 0, 1)
    names = {">f4": "F32", "<i2": "I16", "?": "BOOL"}
    slot = Slot(name="a", value=array, dtype=by_name(names[kind]))
    source = live_sources([slot])["a"]
    whole = np.ascontiguousarray(array).astype(np.dtype(kind).newbyteorder("<")).tobytes()
    for offset, nbytes in [(0, len(whole)), (1, 7), (len(whole) - 3, 3), (8, 0)]:
        assert bytes(source.read(offset=offset, nbytes=nbytes)) == whole[offset : offset + nbytes]


class FakeStream:
    """A stream of an accelerator that notes what is asked of it."""

    def __init__(self, notes, name):
        self.notes = notes
        self.name = name

    def wait_stream(self, other):
        self.notes.append(f"{self.name} waits for {other.name}")

    def synchronize(self):
        self.notes.append(f"host waits for {self.name}")


class FakeModule:
    """What torch has for a kind of accelerator, as far as a copier uses it."""

    def __init__(self):
        self.notes = []
        self._current = "caller"

    def Stream(self, device):  # noqa: N802
        return FakeStream(self.notes, "side")

    def current_stream(self, device):
        return FakeStream(self.notes, self._current)

    @contextmanager
    def stream(self, stream):
        self.notes.append(f"on {stream.name}")
        before, self._current = self._current, stream.name
        yield
        self._current = before


@pytest.fixture
def module(monkeypatch):
    """Take every tensor for one of an accelerator."""
    module = FakeModule()
    copier = DeviceCopier(torch.device("cpu"), module)
    monkeypatch.setattr(DeviceCopiers, "of", lambda self, value: copier)
    monkeypatch.setattr("fpformat_io.torch.sources.is_plain", lambda tensor: False)
    return module


def test_copies_run_on_a_stream_behind_the_callers_and_are_waited_for(module, tmp_path):
    state = {"w": torch.randn(300, 70), "v": torch.arange(5)}
    fpt.save(state, tmp_path / "c")
    assert module.notes[0] == "side waits for caller"
    assert module.notes[1:] == ["on side", "on side", "host waits for side"]
    loaded = fpt.load(tmp_path / "c")
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_a_plain_read_waits_for_its_copy(module):
    slot = Slot(name="w", value=torch.arange(6.0), dtype=by_name("F32"))
    source = live_sources([slot])["w"]
    assert bytes(source.read(offset=4, nbytes=8)) == torch.tensor([1.0, 2.0]).numpy().tobytes()
    assert module.notes[1:] == ["on side", "host waits for side"]


def test_memory_begins_at_a_page_also_where_pinned_memory_does_not(monkeypatch):
    copier = DeviceCopier(torch.device("cpu"), FakeModule())
    for shift in (0, 64):
        base = torch.empty(40_000 + 8192, dtype=torch.uint8)
        aligned = base[-base.data_ptr() % 4096 :][shift:]
        monkeypatch.setattr(device_module, "_pinned", lambda nbytes, a=aligned: a[:nbytes])
        memory = copier.memory(20_000)
        assert memory.__array_interface__["data"][0] % 4096 == 0
        assert len(memory) == 20_000


def test_no_pinned_memory_is_no_failure(monkeypatch):
    """A build without an accelerator refuses pinned memory; copies are slower without it."""
    assert len(DeviceCopier(torch.device("cpu"), FakeModule()).memory(5000)) == 5000


def test_a_device_without_streams_is_copied_at_once():
    copiers = DeviceCopiers()
    assert copiers.of(torch.empty(3, device="meta")) is None
    assert copiers.of(torch.empty(3)) is None
    assert copiers.of(np.zeros(3)) is None


PEAK = """
import resource, sys, torch, fpformat_io.torch as fpt
from pathlib import Path
folder = Path(sys.argv[1])
fpt.save({"w": torch.zeros(1000, 30).t()}, folder / "first")
w = torch.zeros(20_000, 3_000).t()
w += 1
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
fpt.save({"w": w}, folder / "c")
print(peak() - before)
"""


def test_a_large_tensor_that_is_not_contiguous_needs_the_ring_and_no_copy(tmp_path):
    """240 MB in another order; a copy of it would show."""
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 120e6
