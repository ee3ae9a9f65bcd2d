"""Outputs appear whole or not at all, and nothing is ever overwritten."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fpformat_io.torch import save
from fpformat_tools import output, safetensors_output
from fpformat_tools.errors import TargetError
from fpformat_tools.output import check_space, new_directory, new_file

TARGETS = (
    ["out.safetensors"],
    ["out.pt"],
    ["out"],
    ["hub", "--to", "safetensors", "--max-shard-size", "100kB"],
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save({f"t{i}": torch.arange(50_000.0) + i for i in range(5)}, tmp_path / "ckpt")
    save_file({f"t{i}": torch.arange(50_000.0) + i for i in range(5)}, tmp_path / "m.safetensors")
    return tmp_path / "ckpt"


def source_for(target: list[str], checkpoint: Path) -> Path:
    return checkpoint.parent / "m.safetensors" if target == ["out"] else checkpoint


@pytest.mark.clause("CNV-4")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["file", "directory", "dangling link"])
def test_what_exists_is_refused_before_anything_is_read(
    tmp_path: Path, refuse: Any, target: list[str], kind: str
) -> None:
    path = tmp_path / target[0]
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "nowhere")
    text = refuse(tmp_path / "no such source", path, *target[1:])
    assert "exists already" in text
    assert not path.is_file() or path.read_text() == "precious"


@pytest.mark.clause("CNV-4")
@pytest.mark.parametrize("target", TARGETS[:2] + TARGETS[3:])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failing_disk_leaves_nothing(
    checkpoint: Path, refuse: Any, monkeypatch: pytest.MonkeyPatch, target: list[str], code: int
) -> None:
    real, calls = os.fsync, iter(range(100))

    def fail(descriptor: int) -> None:
        if next(calls) >= (2 if len(target) > 1 else 0):
            raise OSError(code, os.strerror(code))
        real(descriptor)

    monkeypatch.setattr(output.os, "fsync", fail)
    text = refuse(checkpoint, checkpoint.parent / target[0], *target[1:])
    assert os.strerror(code) in text
    assert "[io]" in text


@pytest.mark.clause("CNV-4")
@pytest.mark.parametrize("target", TARGETS)
def test_damage_found_on_the_way_leaves_nothing(
    checkpoint: Path, refuse: Any, target: list[str]
) -> None:
    segment = checkpoint / "seg-000000.fps"
    content = bytearray(segment.read_bytes())
    content[600_000] ^= 4
    segment.write_bytes(content)
    if target == ["out"]:
        target = ["out", "--to", "fpformat"]
    text = refuse(checkpoint, checkpoint.parent / target[0], *target[1:])
    assert "SUM-2" in text
    assert "corrupt" in text


@pytest.mark.clause("CNV-4")
def test_an_interrupt_leaves_nothing(
    checkpoint: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any, **keywords: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors_output, "source_of", interrupt)
    before = sorted(checkpoint.parent.iterdir())
    outcome = run("fpconvert", checkpoint, checkpoint.parent / "out.safetensors")
    assert outcome.code == 130
    assert "interrupted" in outcome.err
    assert sorted(checkpoint.parent.iterdir()) == before


@pytest.mark.clause("CNV-4")
def test_a_request_to_terminate_leaves_nothing(tmp_path: Path) -> None:
    """The process gets SIGTERM while it waits for its input in the middle of writing."""
    script = f"""
import os, signal, sys
from pathlib import Path
from fpformat_tools.fpconvert import main
from fpformat_tools.ranges import StoredRange
def stop(self, *, offset, nbytes):
    print([p.name for p in Path({str(tmp_path)!r}).glob(".f*")], flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    return bytes(nbytes)
StoredRange.read_at = stop
sys.exit(main([{str(tmp_path / "m.safetensors")!r}, {str(tmp_path)!r} + "/" + sys.argv[1]]))
"""
    save_file({"a": torch.ones(1000)}, tmp_path / "m.safetensors")
    for target in ("out", "out.pt", "again.safetensors"):
        ran = subprocess.run(
            [sys.executable, "-c", script, target], capture_output=True, text=True, check=False
        )
        assert ran.returncode == 143, ran.stderr
        assert ".f" in ran.stdout
        assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


@pytest.mark.clause("CNV-4")
def test_what_comes_to_exist_meanwhile_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "x"
    with pytest.raises(TargetError, match="left alone"), new_file(target) as opened:
        opened.write(b"new")
        target.write_bytes(b"old")
    assert target.read_bytes() == b"old"
    folder = tmp_path / "y"
    with pytest.raises(TargetError, match="exists already"), new_directory(folder):
        folder.mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "y"]


def test_file_systems_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(output.os, "link", refuse)
    with new_file(tmp_path / "x") as opened:
        opened.write(b"new")
    assert (tmp_path / "x").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(output.os, "write", lambda fd, view: real(fd, view[:7]))
    with new_file(tmp_path / "x") as opened:
        opened.write(bytes(range(100)))
    assert (tmp_path / "x").read_bytes() == bytes(range(100))


def test_room_is_checked(tmp_path: Path, refuse: Any, checkpoint: Path, monkeypatch: Any) -> None:
    with pytest.raises(TargetError, match=r"needs 1e\+03 PB|needs 1000 PB"):
        check_space(tmp_path / "x", nbytes=10**18)
    real = os.statvfs

    def little(path: Any) -> Any:
        status = list(real(path))
        status[4] = 10
        return os.statvfs_result(status)

    monkeypatch.setattr(output.os, "statvfs", little)
    for target in TARGETS:
        source = source_for(target, checkpoint)
        text = refuse(source, checkpoint.parent / target[0], *target[1:])
        assert "free" in text


def test_a_missing_directory(tmp_path: Path, run: Any, checkpoint: Path) -> None:
    outcome = run("fpconvert", checkpoint, tmp_path / "no" / "x.pt")
    assert outcome.code == 1
    assert "directory does not exist" in outcome.err


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with new_file(tmp_path / "x") as opened:
            opened.write(b"")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_outputs_are_deterministic(tmp_path: Path, convert: Any) -> None:
    save({"a": torch.ones(3)}, tmp_path / "ckpt")
    for name in ("a.pt", "b.pt"):
        convert(tmp_path / "ckpt", tmp_path / name)
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
