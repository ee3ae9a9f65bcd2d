"""The command line of fpconvert: formats, selection, reports, exit codes, bounded resources."""

import fcntl
import os
import pty
import resource
import select
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tool_inputs import save_zip

import fpformat
from fpformat_io.torch import load, save
from fpformat_tools.commands import fpconvert


def script(name: str, *arguments: object, **keywords: Any) -> "subprocess.CompletedProcess[str]":
    code = f"import sys; from fpformat_tools.commands.{name} import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        **keywords,
    )


def test_the_commands_as_programs(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "m.safetensors")
    ran = script("fpconvert", tmp_path / "m.safetensors", tmp_path / "ckpt")
    assert ran.returncode == 0
    assert ran.stderr == ""
    assert ran.stdout.count("\n") == 1
    assert "1 tensor, 12 B from safetensors to fpformat" in ran.stdout
    assert script("fpverify", tmp_path / "ckpt").returncode == 0
    assert "a  F32 [3]" in script("fpinspect", tmp_path / "ckpt").stdout
    again = script("fpconvert", tmp_path / "m.safetensors", tmp_path / "ckpt")
    assert again.returncode == 1
    assert again.stdout == ""
    assert again.stderr.startswith("fpconvert: ")
    assert again.stderr.count("\n") == 1


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    save_zip({"a": torch.ones(3)}, tmp_path / "m.pt")
    code = (
        "import sys; from fpformat_tools.commands.fpconvert import main;"
        "assert main(sys.argv[1:3]) == 0;"
        "assert main(sys.argv[2:]) == 0;"
        "assert not {'torch', 'safetensors', 'numba'} & set(sys.modules)"
    )
    arguments = [tmp_path / "m.pt", tmp_path / "ckpt", tmp_path / "n.pt"]
    ran = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_formats_by_ending_and_option(tmp_path: Path, convert: Any, run: Any) -> None:
    source = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(3)}, source)
    for target, to in (
        ("plain", "fpformat"),
        ("x.fpformat", "fpformat"),
        ("x.pt", "torch"),
        ("x.PTH", "torch"),
        ("x.bin", "torch"),
        ("x.ckpt", "torch"),
        ("y.safetensors", "safetensors"),
    ):
        assert convert(source, tmp_path / target, "--json").json["target_format"] == to
    assert torch.load(tmp_path / "x.PTH", weights_only=True)["a"].tolist() == [1, 1, 1]
    outcome = run("fpconvert", source, tmp_path / "x.unknown")
    assert outcome.code == 2
    assert "--to" in outcome.err
    convert(tmp_path / "plain", tmp_path / "again")
    assert load(tmp_path / "again")["a"].tolist() == [1, 1, 1]
    convert(source, tmp_path / "x.unknown", "--to", "torch")
    convert(source, tmp_path / "z.pt", "--to", "fpformat")
    assert (tmp_path / "z.pt").is_dir()
    convert(tmp_path / "x.pt", tmp_path / "w.safetensors")
    assert load_file(tmp_path / "w.safetensors")["a"].tolist() == [1, 1, 1]


def test_usage_errors(tmp_path: Path, run: Any) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "m.safetensors")
    for arguments in (
        [],
        ["m"],
        ["m", "x", "--to", "onnx"],
        [tmp_path / "m.safetensors", tmp_path / "x.pt", "--max-shard-size", "5GB"],
        [tmp_path / "m.safetensors", tmp_path / "x.safetensors", "--max-shard-size", "5GB"],
        [tmp_path / "m.safetensors", tmp_path / "x", "--max-shard-size", "many"],
        [tmp_path / "m.safetensors", tmp_path / "x", "--max-shard-size", "0"],
        [tmp_path / "m.safetensors", tmp_path / "x", "--key", "b"],
    ):
        outcome = run("fpconvert", *arguments)
        assert outcome.code == 2, arguments
        assert outcome.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.safetensors"]


def test_help(run: Any) -> None:
    shown = run("fpconvert", "--help")
    assert shown.code == 0
    for words in ("examples:", "exit codes:", "--skip-unsupported", "nothing is ever overwritten"):
        assert words in shown.out


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("5GB", 5 * 10**9),
        ("500MB", 500 * 10**6),
        ("2GiB", 2 * 2**30),
        ("1.5k", 1500),
        ("17", 17),
        ("3 tb", 3 * 10**12),
        ("10B", 10),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert fpconvert.parse_nbytes(text) == nbytes


def test_keys(tmp_path: Path, convert: Any, run: Any) -> None:
    state = {
        "state_dict": {"a.b": {"w": torch.ones(1)}, "a": {"w": torch.zeros(1)}},
        "list": [{"x": torch.ones(2)}],
        "opt": {0: torch.ones(3)},
        "epoch": 3,
    }
    save(state, tmp_path / "ckpt")
    for number, (key, value) in enumerate(
        {
            "state_dict/a.b": {"w": [1]},
            "state_dict/a": {"w": [0]},
            "state_dict/a.b/w": [1],
            "list/0": {"x": [1, 1]},
            "list/~l0": {"x": [1, 1]},
            "opt/0": [1, 1, 1],
            "opt/~i0": [1, 1, 1],
        }.items()
    ):
        outcome = convert(tmp_path / "ckpt", tmp_path / f"{number}.pt", "--key", key)
        assert "left out by --key: " in outcome.err
        assert "epoch" in outcome.err
        read = torch.load(tmp_path / f"{number}.pt", weights_only=True)
        found = read.tolist() if torch.is_tensor(read) else {k: v.tolist() for k, v in read.items()}
        assert found == value
    for key, words in (
        ("nothing", "'state_dict', 'list', 'opt', 'epoch'"),
        ("state_dict.a.b.w", "close: state_dict/a.b/w"),
        ("opt/1", "close: opt/~i0"),
        ("stat_dict", "close: state_dict"),
        ("epoch", "epoch is an int, not a state"),
        ("epoch/x", "'epoch/x' is not in it"),
        ("", "'' is not in it"),
    ):
        outcome = run("fpconvert", tmp_path / "ckpt", tmp_path / "x.pt", "--key", key)
        assert outcome.code == 2
        assert words in outcome.err


def test_what_a_key_leaves_out_is_shortened(tmp_path: Path, convert: Any) -> None:
    save({"w": {0: torch.ones(1)}, **{f"k{i}": i for i in range(20)}}, tmp_path / "ckpt")
    outcome = convert(tmp_path / "ckpt", tmp_path / "x.pt", "--key", "w/0")
    assert outcome.err == "fpconvert: left out by --key: k0, k1, k2, k3, k4 and 15 more\n"
    report = convert(tmp_path / "ckpt", tmp_path / "y.pt", "--key", "w", "--json").json
    assert len(report["left_out"]) == 20


@pytest.mark.parametrize("command", ["fpconvert", "fpinspect", "fpverify"])
def test_version_and_usage(run: Any, command: str) -> None:
    outcome = run(command, "--version")
    assert (outcome.code, outcome.out) == (0, f"{command} {fpformat.__version__} (format 1.0)\n")
    required = "SRC, DST" if command == "fpconvert" else "DIR"
    assert f"the following arguments are required: {required}\n" in run(command).err
    if command != "fpverify":
        assert "elements joined by /" in run(command, "--help").out


def test_reports(tmp_path: Path, convert: Any, run: Any) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "m.safetensors")
    report = convert(tmp_path / "m.safetensors", tmp_path / "a", "--json").json
    assert report["source_format"] == "safetensors"
    assert report["tensors"] == 1
    assert report["tensor_nbytes"] == 12
    assert len(report["checkpoint_id"]) == 64
    assert report["nbytes"] == sum(path.stat().st_size for path in (tmp_path / "a").iterdir())
    quiet = convert(tmp_path / "m.safetensors", tmp_path / "b", "--quiet")
    assert (quiet.out, quiet.err) == ("", "")
    failed = run("fpconvert", tmp_path / "none", tmp_path / "c", "--json")
    assert failed.code == 1
    assert failed.json["error"]["class"] == "io"
    assert "none" in failed.json["error"]["where"]


def test_long_lists_are_cut_for_people(tmp_path: Path, run: Any) -> None:
    save({"w": torch.ones(1), "x": {f"k{i}": i for i in range(99)}} | {
        f"v{i}": i for i in range(200)
    }, tmp_path / "ckpt")  # fmt: skip
    outcome = run("fpconvert", tmp_path / "ckpt", tmp_path / "x.safetensors")
    assert outcome.err.count("\n") < 60
    assert "more" in outcome.err
    outcome = run("fpconvert", tmp_path / "ckpt", tmp_path / "x.safetensors", "--json")
    assert len(outcome.json["error"]["problems"]) == 201


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    pytest.importorskip("tqdm")
    save_file({"a": torch.ones(3_000_000)}, tmp_path / "m.safetensors")
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    code = "import sys; from fpformat_tools.commands.fpconvert import main; sys.exit(main())"
    arguments = [str(tmp_path / "m.safetensors"), str(tmp_path / "ckpt")]
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        stderr=follower,
        stdout=subprocess.PIPE,
        check=False,
    )
    ready = select.select([leader], [], [], 5)[0]
    shown = os.read(leader, 100_000) if ready else b""
    os.close(follower)
    os.close(leader)
    assert ran.returncode == 0
    assert b"ckpt:" in shown
    assert b"/12.0M" in shown


@pytest.mark.clause("CNV-8")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Three hundred megabytes pass through a process that may not hold them."""
    tensors = {f"t{i}": torch.zeros(10_000_000) for i in range(4)}
    tensors["one"] = torch.zeros(35_000_000)
    save_file(tensors, tmp_path / "m.safetensors")
    del tensors

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (250 << 20, 250 << 20))

    steps = (
        (tmp_path / "m.safetensors", tmp_path / "ckpt"),
        (tmp_path / "ckpt", tmp_path / "m.pt"),
        (tmp_path / "m.pt", tmp_path / "again"),
        (tmp_path / "again", tmp_path / "n.safetensors"),
    )
    for source, target in steps:
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        ran = script("fpconvert", source, target, preexec_fn=limit, env=environment)
        assert ran.returncode == 0, ran.stderr
    one, two = tmp_path / "m.safetensors", tmp_path / "n.safetensors"
    assert subprocess.run(["cmp", one, two], check=False).returncode == 0


@pytest.mark.parametrize("size", ["9" * 400, "9" * 5000, "1" + "0" * 400 + "GB"])
def test_sizes_without_measure(tmp_path: Path, run: Any, size: str) -> None:
    arguments = ("--to", "safetensors", "--max-shard-size", size)
    outcome = run("fpconvert", tmp_path / "x", tmp_path / "out", *arguments)
    assert outcome.code == 2
    assert "is no size" in outcome.err
    assert len(outcome.err) < 1000
