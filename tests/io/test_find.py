"""The newest checkpoint: which one it is, what is skipped, and when there is none."""

import os

import pytest

from fpformat.errors import PlanError, StorageError
from fpformat_io.session.latest import latest
from fpformat_io.torch import load, save


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_no_root_and_an_empty_root(tmp_path):
    assert latest(tmp_path / "none") is None
    assert latest(tmp_path) is None


def test_the_highest_step_wins_whatever_the_name_and_the_time(tmp_path):
    for step, name in ((5, "b"), (30, "a"), (4, "step-0000000004")):
        save({"step": step}, tmp_path / name, step=step)
    found = latest(tmp_path)
    assert (found.path, found.step) == (tmp_path / "a", 30)
    assert os.fspath(found) == str(tmp_path / "a")
    assert load(found) == {"step": 30}


def test_without_a_step_the_time_decides(tmp_path):
    save({"x": 1}, tmp_path / "b")
    save({"x": 2}, tmp_path / "a")
    assert load(latest(tmp_path)) == {"x": 2}


def test_broken_ones_are_skipped_with_their_reasons(tmp_path, caplog):
    for step in range(1, 6):
        save({"step": step}, tmp_path / f"step-{step:010d}", step=step)
    (tmp_path / "step-0000000005" / "manifest.json").unlink()
    (tmp_path / "step-0000000004" / "seg-000000.fps").unlink()
    os.truncate(tmp_path / "step-0000000003" / "seg-000000.fps", 8192)
    found = latest(tmp_path)
    assert found.step == 2
    assert [path.name for path, _ in found.skipped] == [
        "step-0000000005",
        "step-0000000004",
        "step-0000000003",
    ]
    assert all("[" in reason for _, reason in found.skipped)
    assert "DIR-1" in found.skipped[0][1]
    assert len(caplog.records) == 3


def test_only_full_verification_reads_the_data(tmp_path):
    for step in (1, 2):
        save({"step": step}, tmp_path / str(step), step=step)
    flip(tmp_path / "2" / "seg-000000.fps", 4096)
    assert latest(tmp_path).step == 2
    assert latest(tmp_path, verify="full").step == 1
    with pytest.raises(PlanError, match="verify"):
        latest(tmp_path, verify="quick")


def test_what_is_no_candidate(tmp_path):
    save({"x": 1}, tmp_path / "good", step=1)
    for name in (".fps-" + "0" * 32, ".fps-trash-" + "1" * 32, "step-0000000009.bad-" + "2" * 32):
        save({"x": 2}, tmp_path / name, step=9)
    (tmp_path / "logs").mkdir()
    (tmp_path / "step-0000000010").write_text("a file")
    found = latest(tmp_path)
    assert (found.step, found.skipped) == (1, ())


ENDLESS = b'{"checkpoint":{"created_us":Infinity}}'


@pytest.mark.parametrize(
    "content", [b"", b"[" * 100_000, b"{}", b'{"checkpoint":7}', b"\xff", ENDLESS]
)
def test_a_manifest_of_anything(tmp_path, content):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "manifest.json").write_bytes(content)
    assert latest(tmp_path) is None
    save({}, tmp_path / "good")
    assert latest(tmp_path).path.name == "good"


def test_a_file_system_that_fails_is_not_taken_for_an_empty_root(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError):
        latest(tmp_path / "file")
    save({}, tmp_path / "good", step=1)
    opened = os.open

    def refuse(path, *args, **more):
        if "good" in str(path):
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match="Permission denied"):
        latest(tmp_path)


def test_a_checkpoint_is_no_root(tmp_path):
    path = tmp_path / "c"
    save({}, path)
    with pytest.raises(PlanError, match="is itself a checkpoint"):
        latest(path)


def test_a_candidate_that_cannot_even_be_examined_is_reported_at_once(tmp_path, monkeypatch):
    save({}, tmp_path / "step-0000000001", step=1)
    opened, examined = os.open, os.stat

    def refused(real):
        def call(path, *args, **more):
            if str(path).endswith("step-0000000001"):
                raise OSError(5, "Input/output error")
            return real(path, *args, **more)

        return call

    monkeypatch.setattr(os, "open", refused(opened))
    monkeypatch.setattr(os, "stat", refused(examined))
    with pytest.raises(StorageError, match="Input/output error") as caught:
        latest(tmp_path)
    assert caught.value.errno == 5
