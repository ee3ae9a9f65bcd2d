"""Outputs appear whole or not at all, and nothing is ever overwritten."""

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fpformat_io.torch import save
from fpformat_tools.errors import TargetError
from fpformat_tools.formats.safetensors import write as safetensors_output
from fpformat_tools.streams import output
from fpformat_tools.streams.leftovers import collect, find, temporary_name
from fpformat_tools.streams.output import check_space, new_directory, new_file

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


INTERRUPTED_CONVERSION = """
import os, signal, sys, time
from pathlib import Path
from fpformat_tools.commands.fpconvert import main
from fpformat_tools.streams.ranges import StoredRange
folder = Path(sys.argv[1])
def stop(self, *, offset, nbytes):
    print([path.name for path in folder.glob(".f*")], flush=True)
    for name in sys.argv[3:]:
        os.kill(os.getpid(), getattr(signal, name))
        time.sleep(0.05)  # so that the main thread gets it
    return bytes(nbytes)
StoredRange.read_at = stop
sys.exit(main([str(folder / "m.safetensors"), str(folder / sys.argv[2])]))
"""
OUTPUTS = ("out", "out.pt", "again.safetensors")


def interrupt_conversion(folder: Path, target: str, *signals: str) -> "subprocess.Popen[str]":
    """Convert in another process, which sends itself signals in the middle of writing."""
    save_file({"a": torch.ones(1000)}, folder / "m.safetensors")
    return subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED_CONVERSION, str(folder), target, *signals],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


INTERRUPTED_CALL = """
import os, signal, sys, time
from fpformat_tools.commands.fpconvert import main
real = getattr(os, sys.argv[1])
def interrupted(*args, **options):
    result = real(*args, **options)
    if any(name in str(arg) for arg in args for name in (".fps-", ".fpconvert-")):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)  # so that the main thread gets it
    return result
setattr(os, sys.argv[1], interrupted)
sys.exit(main(["m.safetensors", *sys.argv[2:]]))
"""
FPFORMAT = ["out", "--to", "fpformat"]


@pytest.mark.clause("CNV-4")
@pytest.mark.parametrize(
    ("call", "target", "code"),
    [
        ("mkdir", FPFORMAT, 130),
        ("open", FPFORMAT, 130),
        ("rename", FPFORMAT, 0),
        ("open", ["again.safetensors"], 130),
        ("link", ["again.safetensors"], 0),
        ("mkdir", ["sharded/"], 130),
        ("open", ["sharded/"], 130),
        ("rename", ["sharded/"], 0),
        ("open", ["out.pt"], 130),
    ],
    ids=str,
)
def test_an_interrupt_behind_a_call_leaves_nothing_or_the_whole(
    call: str, target: list[str], code: int, tmp_path: Path
) -> None:
    save_file({"a": torch.ones(1000)}, tmp_path / "m.safetensors")
    command = [sys.executable, "-c", INTERRUPTED_CALL, call, *target]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    left = sorted(path.name for path in tmp_path.iterdir())
    if code:
        assert left == ["m.safetensors"]
        assert "interrupted; nothing was left behind" in done.stderr
    else:
        assert left == sorted(["m.safetensors", target[0].rstrip("/")])
        assert done.stderr == ""


@pytest.mark.parametrize("command", ["fpconvert m.safetensors out.pt", "fpconvert out out.pt"])
def test_no_working_directory(command: str, tmp_path: Path) -> None:
    code = """
import os, sys
from fpformat_tools.commands.fpconvert import main
os.mkdir("gone")
os.chdir("gone")
os.rmdir("../gone")
sys.exit(main(sys.argv[1:]))
"""
    arguments = [sys.executable, "-c", code, *command.split()[1:]]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("fpconvert: out.pt: ")
    assert "working directory" in done.stderr


@pytest.mark.clause("CNV-4")
@pytest.mark.parametrize(
    ("signals", "code"),
    [
        (["SIGTERM"], 143),
        (["SIGHUP"], 129),
        (["SIGINT"], 130),
        (["SIGINT"] * 5, 130),
        (["SIGTERM", "SIGINT", "SIGHUP", "SIGTERM"], 143),
    ],
    ids=str,
)
def test_a_request_to_end_leaves_nothing(tmp_path: Path, signals: list[str], code: int) -> None:
    for target in OUTPUTS:
        ran = interrupt_conversion(tmp_path, target, *signals)
        out, errors = ran.communicate(timeout=60)
        assert ran.returncode == code, errors
        assert ".f" in out
        assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


def test_a_hang_up_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        ran = interrupt_conversion(tmp_path, "out.pt", "SIGHUP")
        _, errors = ran.communicate(timeout=60)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ran.returncode == 0, errors


def test_what_a_killed_conversion_left_goes_with_the_next(tmp_path: Path, convert: Any) -> None:
    for target in OUTPUTS:
        ran = interrupt_conversion(tmp_path, target, "SIGKILL")
        ran.communicate(timeout=60)
        assert len(list(tmp_path.glob(".f*"))) == 1
        (left,) = tmp_path.glob(".f*")
        os.utime(left, (1, 1))
        outcome = convert(tmp_path / "m.safetensors", tmp_path / target)
        assert "which a writer that died left behind" in outcome.err
        assert not list(tmp_path.glob(".f*"))


def test_what_another_conversion_writes_is_left_alone(tmp_path: Path, convert: Any) -> None:
    with new_file(tmp_path / "x", warn=pytest.fail), new_directory(tmp_path / "y", warn=print):
        for path in tmp_path.glob(".f*"):
            os.utime(path, (1, 1))
        assert [left.is_dead for left in find(tmp_path)] == [False, False]
        assert collect(tmp_path, warn=pytest.fail) == ()


def test_only_what_the_converter_wrote_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / temporary_name()
    folder.mkdir()
    (folder / "model-00001-of-00002.safetensors").touch()
    (folder / "mine.txt").touch()
    (tmp_path / temporary_name()).symlink_to(folder)
    os.mkfifo(tmp_path / temporary_name())
    problems: list[str] = []
    assert collect(tmp_path, warn=problems.append, min_age_s=0) == ()
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    assert len(problems) == 2  # the directory, and the link


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL], ids=errno.errorcode.get)
def test_file_systems_without_locks_and_syncs_of_directories(
    tmp_path: Path, convert: Any, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    fsync = os.fsync

    def no_lock(*arguments: Any) -> None:
        raise OSError(code, os.strerror(code))

    def no_sync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    save_file({"a": torch.ones(10)}, tmp_path / "m.safetensors")
    monkeypatch.setattr(fcntl, "flock", no_lock)
    monkeypatch.setattr(os, "fsync", no_sync)
    for target in OUTPUTS:
        outcome = convert(tmp_path / "m.safetensors", tmp_path / target)
        assert "no locks" in outcome.err
        assert "cannot sync directories" in outcome.err


@pytest.mark.clause("CNV-4")
def test_what_comes_to_exist_meanwhile_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "x"
    with (
        pytest.raises(TargetError, match="left alone"),
        new_file(target, warn=pytest.fail) as opened,
    ):
        opened.write(b"new")
        target.write_bytes(b"old")
    assert target.read_bytes() == b"old"
    folder = tmp_path / "y"
    with (
        pytest.raises(TargetError, match="exists already"),
        new_directory(folder, warn=pytest.fail),
    ):
        folder.mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "y"]


def test_file_systems_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(output.os, "link", refuse)
    with new_file(tmp_path / "x", warn=pytest.fail) as opened:
        opened.write(b"new")
    assert (tmp_path / "x").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(output.os, "write", lambda fd, view: real(fd, view[:7]))
    with new_file(tmp_path / "x", warn=pytest.fail) as opened:
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
        with new_file(tmp_path / "x", warn=pytest.fail) as opened:
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
