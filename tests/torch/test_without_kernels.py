"""The torch face saves where there are no native workers."""

import torch

from fpformat_io import engine
from fpformat_io.torch import Checkpointer, latest, load, save


def test_saving_goes_on_without_native_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "_native", lambda: None)
    state = {"w": torch.arange(6.0).reshape(2, 3).t(), "half": torch.ones(5, dtype=torch.bfloat16)}
    report = save(state, tmp_path / "once")
    assert report.mode == "buffered"
    assert report.bandwidth_bytes_per_s > 0
    with Checkpointer(tmp_path / "runs") as checkpointer:
        checkpointer.save(1, state).wait_durable()
    for path in (tmp_path / "once", latest(tmp_path / "runs", verify="full")):
        again = load(path)
        assert all(torch.equal(again[name], value) for name, value in state.items())
