"""fpinspect: what it shows, how it folds, and that it starts fast."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tool_inputs import two_ranks

from fpformat.dtypes import by_name
from fpformat.read.source import BytesSource
from fpformat.records.layout import plan_checkpoint
from fpformat.records.model import ObjectEntry, TensorEntry
from fpformat.write.writer import write_checkpoint
from fpformat_io.torch import save


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    weight = torch.arange(600.0).view(30, 20)
    state = {
        "model": {"emb": weight, "head": weight, "part": weight[2:4], "big": torch.ones(300, 300)},
        "param": torch.nn.Parameter(torch.ones(2)),
        "opt": {"lr": 0.5, "betas": (0.9, 0.99), "steps": list(range(100))},
        "rng": np.arange(4),
        "odd\nname\u202e": torch.zeros(1),
        "note": "x" * 500,
        "size": torch.Size([3]),
    }
    save(state, tmp_path / "ckpt", step=7, metadata={"run": "a b", "evil\x1b[2J": "\x1b[1m"})
    return tmp_path / "ckpt"


def test_the_summary(checkpoint: Path, run: Any) -> None:
    outcome = run("fpinspect", checkpoint)
    assert outcome.code == 0
    assert outcome.err == ""
    for words in (
        "checkpoint of fpformat 1.0",
        "step        7",
        "world size  1",
        "run = 'a b'",
        "1 alias, 1 view",
        "F32",
        "I64",
        "seg-000000.fps",
        "emb  F32 [30, 20]  2.4 kB",
        "head  F32 [30, 20] -> model/emb",
        "part  F32 [2, 20] -> model/emb (view, offset 40)",
        "param  F32 [2]  8 B  parameter",
        "betas: (0.9, 0.99)",
        "lr: 0.5",
        "steps: list of 100",
        "93 more entries",
        "rng  I64 [4]  32 B  numpy",
        "note: str of 500 characters",
        "size: torch.Size [3]",
        r"'odd\nname\u202e'",
    ):
        assert words in outcome.out, words
    assert "\x1b" not in outcome.out
    assert "\u202e" not in outcome.out


def test_the_whole_tree(checkpoint: Path, run: Any) -> None:
    out = run("fpinspect", checkpoint, "--tree").out
    assert "~l99: 99" in out
    assert "more" not in out


def test_parts_and_tensors(checkpoint: Path, run: Any) -> None:
    out = run("fpinspect", checkpoint, "model/part", "model/big", "opt").out
    for words in (
        "model/part",
        "view of",
        "model/emb, strides [20, 1], offset 40",
        "model/big",
        "360 kB (360,000 bytes)",
        "seg-000000.fps, bytes",
        "~l99: 99",
    ):
        assert words in out, out


def test_values_and_numbers(tmp_path: Path, run: Any) -> None:
    state = {
        "opt": {
            "state": {0: {"step": 5, "m.v": torch.ones(3)}},
            "groups": [{"betas": (0.9, 0.99)}],
        },
        "both": {0: "int", "0": "str", 1: True},
        "np": [np.float64(1.5), np.bool_(True), np.int32(-3)],
        "a/b~c": {None: 1},
        "text": "x" * 500,
        "dtype": torch.bfloat16,
        "ordered": torch.nn.Linear(1, 1).state_dict(),
    }
    save(state, tmp_path / "ckpt")
    for name, words in (
        ("opt/state/0/step", "opt/state/~i0/step: 5\n"),
        ("opt/state/~i0/step", "opt/state/~i0/step: 5\n"),
        ("opt/state/0/m.v", "opt/state/~i0/m.v\n  dtype       F32"),
        ("opt/groups/0/betas/1", "opt/groups/~l0/betas/~l1: 0.99\n"),
        ("both/0", "both/0: 'str'\n"),
        ("both/~i0", "both/~i0: 'int'\n"),
        ("both/1", "both/~i1: True\n"),
        ("np/0", "np/~l0: 1.5 (numpy F64)\n"),
        ("np/1", "np/~l1: True (numpy BOOL)\n"),
        ("np/2", "np/~l2: -3 (numpy I32)\n"),
        ("a~1b~0c", "a~1b~0c: {~n: 1}\n"),
        ("a/b~c", "a~1b~0c: {~n: 1}\n"),
        ("a~1b~0c/~n", "a~1b~0c/~n: 1\n"),
        ("text", f"text: '{'x' * 500}'\n"),
        ("dtype", "dtype: torch dtype BF16\n"),
        ("ordered/~a_metadata", "ordered/~a_metadata: OrderedDict of 1\n"),
    ):
        outcome = run("fpinspect", tmp_path / "ckpt", name)
        assert (outcome.code, outcome.err) == (0, ""), name
        assert outcome.out.startswith(words), outcome.out


def test_unknown_names_are_listed_together(checkpoint: Path, run: Any) -> None:
    outcome = run("fpinspect", checkpoint, "model.emb", "model/big", "modle/big", "no", "opt/lr")
    assert outcome.code == 1
    assert "model/big\n  dtype" in outcome.out
    assert outcome.out.endswith("opt/lr: 0.5\n")
    lines = outcome.err.splitlines()
    assert "3 names are not in it" in lines[0]
    assert lines[1] == "  'model.emb' is not in it; close: model/emb, model"
    assert lines[2].startswith("  'modle/big' is not in it; close: model")
    assert "model/big" in lines[2]
    assert lines[3].startswith("  'no' is not in it")
    assert len(lines) == 4
    outcome = run("fpinspect", checkpoint, "model/bg")
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert "close: model/big" in outcome.err


def test_a_directory_that_holds_checkpoints(checkpoint: Path, run: Any) -> None:
    for command in ("fpinspect", "fpverify"):
        outcome = run(command, checkpoint.parent)
        assert outcome.code == 1
        text = outcome.out + outcome.err
        assert f"the directory holds 1 checkpoint: name one, such as {checkpoint}" in text
        assert "DIR-1" in text
    outcome = run("fpconvert", checkpoint.parent, checkpoint.parent / "x")
    assert "the directory holds 1 checkpoint" in outcome.err


def test_the_layout(checkpoint: Path, run: Any) -> None:
    out = run("fpinspect", checkpoint, "--layout").out
    assert "H header" in out
    assert "padding" in out
    assert "           4,096           360,000          0  model/big" in out
    assert "object tree" in out


def test_json(checkpoint: Path, run: Any) -> None:
    document = run("fpinspect", checkpoint, "--json").json
    tensors = {tensor["name"]: tensor for tensor in document["tensors"]}
    assert document["step"] == 7
    assert document["user"]["run"] == "a b"
    assert tensors["model/head"]["target"] == "model/emb"
    assert tensors["model/part"]["strides"] == [20, 1]
    assert tensors["model/big"]["shape"] == [300, 300]
    (segment,) = document["segments"]
    stored = sum(extent["nbytes"] for extent in segment["extents"])
    assert stored == segment["data_nbytes"]
    error = run("fpinspect", checkpoint / "none", "--json")
    assert error.code == 1
    assert json.loads(error.out)["error"]["class"] == "io"


def test_several_ranks(tmp_path: Path, run: Any, convert: Any, refuse: Any) -> None:
    path = two_ranks(tmp_path / "ckpt")
    out = run("fpinspect", path, "--layout", "--tree").out
    for words in ("world size  2", "state of rank 0", "state of rank 1", "of rank 1", "a box"):
        assert words in out
    out = run("fpinspect", path, "b", "w").out
    assert [line for line in out.splitlines() if "rank" in line] == [
        "  rank        0",
        "  rank        1",
    ]
    assert out.count("w\n  dtype") == 1
    assert run("fpverify", path).code == 0
    assert "the separate state of rank 1" in refuse(path, tmp_path / "x.safetensors")
    report = convert(path, tmp_path / "x.safetensors", "--skip-unsupported", "--json").json
    assert report["skipped"] == ["the separate state of rank 1"]
    from safetensors.torch import load_file

    assert load_file(tmp_path / "x.safetensors")["w"].reshape(-1).tolist() == list(range(16))


def test_no_tree_and_other_objects(tmp_path: Path, run: Any, convert: Any, refuse: Any) -> None:
    entry = TensorEntry(name="a/b", dtype=by_name("U8"), shape=(3,))
    plan = plan_checkpoint([entry], [ObjectEntry(name="log", kind=2, payload=b"text")])
    write_checkpoint(tmp_path / "ckpt", plan, {(entry.key, None): BytesSource(b"abc")})
    out = run("fpinspect", tmp_path / "ckpt").out
    assert "no state tree" in out
    assert "a/b  U8 [3]" in out
    assert run("fpinspect", tmp_path / "ckpt", "a/b").out.startswith("a/b\n")
    assert "object 'log'" in refuse(tmp_path / "ckpt", tmp_path / "x.pt")
    convert(tmp_path / "ckpt", tmp_path / "x.pt", "--skip-unsupported")
    read = torch.load(tmp_path / "x.pt", weights_only=True)
    assert bytes(read["a/b"].tolist()) == b"abc"


def test_a_wide_state_is_folded_and_fast(tmp_path: Path, run: Any) -> None:
    save({f"layer.{i}": torch.ones(2) for i in range(5000)}, tmp_path / "ckpt")
    out = run("fpinspect", tmp_path / "ckpt").out
    assert out.count("\n") < 60
    assert "4,984 more entries, 4,984 tensors, 39.9 kB" in out
    out = run("fpinspect", tmp_path / "ckpt", "--layout").out
    assert out.count("\n") < 80


def test_it_starts_without_torch_and_numba(checkpoint: Path) -> None:
    script = (
        "import sys, fpformat_tools.commands.fpinspect as tool; code = tool.main(sys.argv[1:]);"
        "assert not {'torch', 'numba', 'safetensors', 'tqdm'} & set(sys.modules); sys.exit(code)"
    )
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        ran = subprocess.run(
            [sys.executable, "-c", script, str(checkpoint)], capture_output=True, check=False
        )
        times.append(time.perf_counter() - begin)
        assert ran.returncode == 0, ran.stderr
        assert b"more entries" in ran.stdout
    # The target is 0.3 s on an idle machine; a loaded one gets some room.
    assert min(times) < 0.9


def test_output_without_unicode(checkpoint: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "fpformat_tools.commands.fpinspect", str(checkpoint)],
        capture_output=True,
        check=False,
        env={"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin"},
    )
    assert ran.returncode == 0, ran.stderr
    assert b"`- " in ran.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("fpinspect", "{}", "--tree"),
        ("fpinspect", "{}", "opt", "nothing"),
        ("fpinspect", "{}", "--json"),
        ("fpinspect", "{}/none", "--json"),
        ("fpinspect", "--help"),
        ("fpverify", "{}", "{}"),
        ("fpverify", "{}", "--json"),
        ("fpverify", "--version"),
        ("fpconvert", "{}", "{}.pt", "--json", "--skip-unsupported"),
        ("fpconvert", "{}", "{}.pt", "--skip-unsupported"),
        ("fpconvert", "--help"),
    ],
)
def test_a_reader_that_leaves_early(checkpoint: Path, arguments: tuple[str, ...]) -> None:
    """Nobody reads at all: the pipe is closed before the command begins."""
    name, *rest = [argument.format(checkpoint) for argument in arguments]
    reading, writing = os.pipe()
    os.close(reading)
    ran = subprocess.run(
        [sys.executable, "-m", f"fpformat_tools.commands.{name}", *rest],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert ran.returncode == (1 if "none" in rest[0] else 0)
    for words in (b"Broken", b"Traceback", b"Exception"):
        assert words not in ran.stderr


def test_damage_is_told_when_nobody_reads(checkpoint: Path) -> None:
    """The exit code is that of the verification, and both streams may be closed."""
    path = checkpoint / "seg-000000.fps"
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    verify = f"{sys.executable} -m fpformat_tools.commands.fpverify"
    command = f"set -o pipefail; {verify} {checkpoint} 2>&1 | true"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, check=False)
    assert (ran.returncode, ran.stderr) == (1, b"")


def test_the_digests_are_of_the_state(checkpoint: Path, run: Any, convert: Any) -> None:
    outcome = run("fpinspect", checkpoint, "--digest")
    assert outcome.err == ""
    (first, tensors), (second, state) = (line.split() for line in outcome.out.splitlines())
    assert (first, second) == ("tensors", "state")
    found = run("fpinspect", checkpoint, "--digest", "--json").json["digest"]
    assert found == {"tensors": tensors, "state": state}
    assert "digest" not in run("fpinspect", checkpoint, "--json").json
    convert(checkpoint, checkpoint.parent / "again")
    assert run("fpinspect", checkpoint.parent / "again", "--digest").out == outcome.out


def test_the_digest_of_tensors_outlives_other_formats(tmp_path: Path, run: Any) -> None:
    weight = torch.arange(600.0).view(30, 20)
    module = torch.nn.Linear(3, 2)
    state = {**module.state_dict(), "view": weight[2:4], "whole": weight, "turned": weight.t()}
    save(state, tmp_path / "ckpt", step=7)
    save_file({name: each.contiguous().clone() for name, each in state.items()}, tmp_path / "m.st")
    torch.save(module.state_dict() | state, tmp_path / "m.pt")
    for name in ("m.st", "m.pt"):
        assert run("fpconvert", tmp_path / name, tmp_path / f"{name}.fp").code == 0
    found = {
        name: run("fpinspect", tmp_path / name, "--digest", "--json").json["digest"]["tensors"]
        for name in ("ckpt", "m.st.fp", "m.pt.fp")
    }
    assert len(set(found.values())) == 1


@pytest.mark.parametrize("other", ["--tree", "--layout", "model"])
def test_a_digest_of_a_part_is_refused(checkpoint: Path, run: Any, other: str) -> None:
    assert run("fpinspect", checkpoint, "--digest", other).code == 2


def test_a_digest_of_damage_is_an_error(checkpoint: Path, run: Any) -> None:
    raw = bytearray((checkpoint / "seg-000000.fps").read_bytes())
    raw[4096] ^= 1
    (checkpoint / "seg-000000.fps").write_bytes(raw)
    outcome = run("fpinspect", checkpoint, "--digest")
    assert (outcome.code, outcome.out) == (1, "")
    assert "SUM-2" in outcome.err
