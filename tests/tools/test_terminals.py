"""Terminals that lack the characters of a name, and file names that have none."""

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fpformat_io.torch import save

_C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
_ASCII = {"PYTHONIOENCODING": "ascii"}
_LATIN = {"PYTHONIOENCODING": "latin-1:strict"}
_TERMINALS = pytest.mark.parametrize("terminal", [_C, _ASCII, _LATIN], ids=["C", "ascii", "latin"])
_NAME = "weight-\u017c\U0001f600"
_ESCAPED = r"weight-\u017c\U0001f600"


def command(
    name: str, *arguments: object, terminal: Mapping[str, str]
) -> "subprocess.CompletedProcess[bytes]":
    code = f"import sys; from fpformat_tools.commands.{name} import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, *(os.fsencode(str(argument)) for argument in arguments)],
        capture_output=True,
        check=False,
        env={**os.environ, **terminal},
    )
    assert b"internal error" not in done.stderr
    assert b"Traceback" not in done.stderr
    return done


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tied = torch.ones(4)
    state = {_NAME: tied, "other": tied, "text": _NAME, "deep": {_NAME: {"a": 1, "b": tied}}}
    save(state, tmp_path / "ckpt", metadata={"run": _NAME})
    return tmp_path / "ckpt"


@_TERMINALS
def test_converting(tmp_path: Path, terminal: dict[str, str]) -> None:
    folder = tmp_path / _NAME
    folder.mkdir()
    save_file({_NAME: torch.ones(3)}, folder / "m.safetensors")
    ran = command("fpconvert", folder / "m.safetensors", folder / _NAME, terminal=terminal)
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert ran.stdout.count(b"\n") == 1
    assert (folder / _NAME).is_dir()
    again = command("fpconvert", folder / "m.safetensors", folder / _NAME, terminal=terminal)
    assert again.returncode == 1
    assert again.stderr.isascii()
    assert b"exists already" in again.stderr


@_TERMINALS
def test_warnings_and_what_is_left_out(
    checkpoint: Path, tmp_path: Path, terminal: dict[str, str]
) -> None:
    target = tmp_path / "out.safetensors"
    ran = command("fpconvert", checkpoint, target, "--skip-unsupported", terminal=terminal)
    assert ran.returncode == 0
    assert f"skipped: deep/{_ESCAPED}/a".encode() in ran.stderr
    ran = command("fpconvert", checkpoint, tmp_path / "x", "--key", _NAME, terminal=terminal)
    assert ran.returncode == 0, ran.stderr


@_TERMINALS
@pytest.mark.parametrize("option", [(), ("--tree",), ("--layout",), (_NAME,), (f"deep/{_NAME}",)])
def test_inspecting(checkpoint: Path, terminal: dict[str, str], option: tuple[str, ...]) -> None:
    ran = command("fpinspect", checkpoint, *option, terminal=terminal)
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert _ESCAPED.encode() in ran.stdout
    assert ran.stdout.isascii()


@_TERMINALS
def test_json_is_the_same_everywhere(checkpoint: Path, terminal: dict[str, str]) -> None:
    ran = command("fpinspect", checkpoint, "--json", terminal=terminal)
    assert _NAME in [row["name"] for row in json.loads(ran.stdout)["tensors"]]


@_TERMINALS
def test_unknown_names(checkpoint: Path, terminal: dict[str, str]) -> None:
    ran = command("fpinspect", checkpoint, f"{_NAME}/x", terminal=terminal)
    assert ran.returncode == 1
    assert rf"'{_ESCAPED}/x' is not in it".encode() in ran.stderr
    ran = command("fpconvert", checkpoint, checkpoint / "x", "--key", "\u017c", terminal=terminal)
    assert ran.returncode == 2
    assert rb"'\u017c' is not in it" in ran.stderr


@_TERMINALS
def test_verifying(checkpoint: Path, terminal: dict[str, str]) -> None:
    named = checkpoint.rename(checkpoint.with_name(_NAME))
    ran = command("fpverify", named, terminal=terminal)
    assert (ran.returncode, ran.stderr) == (0, b"")
    segment = bytearray((named / "seg-000000.fps").read_bytes())
    segment[4096] ^= 1
    (named / "seg-000000.fps").write_bytes(segment)
    ran = command("fpverify", named, terminal=terminal)
    assert (ran.returncode, ran.stderr) == (1, b"")
    assert _ESCAPED.encode() in ran.stdout
    assert ran.stdout.isascii()


@pytest.mark.parametrize("terminal", [{}, _C, _ASCII, _LATIN])
@pytest.mark.parametrize("name", ["fpconvert", "fpinspect", "fpverify"])
def test_file_names_without_characters(tmp_path: Path, name: str, terminal: dict[str, str]) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe")
    arguments = (path, tmp_path / "out") if name == "fpconvert" else (path,)
    ran = command(name, *arguments, terminal=terminal)
    assert ran.returncode == 1
    assert rb"\udcff\udcfe" in ran.stdout + ran.stderr


@_TERMINALS
def test_files_that_an_index_names(tmp_path: Path, terminal: dict[str, str]) -> None:
    part = f"{_NAME}.safetensors"
    save_file({"a": torch.ones(3)}, tmp_path / part)
    index = {"metadata": {"total_size": 12}, "weight_map": {"a": part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    ran = command("fpconvert", tmp_path, tmp_path / "ckpt", terminal=terminal)
    assert (ran.returncode, ran.stderr) == (0, b"")


@_TERMINALS
def test_a_narrow_terminal(checkpoint: Path, terminal: dict[str, str]) -> None:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 30, 0, 0))
    code = "import sys; from fpformat_tools.commands.fpinspect import main; sys.exit(main())"
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    ran = subprocess.run(
        [sys.executable, "-c", code, str(checkpoint), "--tree"],
        stdout=follower,
        check=False,
        env={**environment, **terminal},
    )
    os.close(follower)
    shown = os.read(leader, 100_000).decode("latin-1")
    os.close(leader)
    assert ran.returncode == 0
    assert max(map(len, shown.splitlines())) == 30


@_TERMINALS
def test_the_bar(tmp_path: Path, terminal: dict[str, str]) -> None:
    pytest.importorskip("tqdm")
    save_file({_NAME: torch.ones(3_000_000)}, tmp_path / "m.safetensors")
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    code = "import sys; from fpformat_tools.commands.fpconvert import main; sys.exit(main())"
    ran = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "m.safetensors", os.fsencode(tmp_path / _NAME)],
        stderr=follower,
        stdout=subprocess.PIPE,
        check=False,
        env={**os.environ, **terminal},
    )
    os.close(follower)
    shown = os.read(leader, 100_000)
    os.close(leader)
    assert ran.returncode == 0
    assert b"/12.0M" in shown
    assert shown.isascii()
