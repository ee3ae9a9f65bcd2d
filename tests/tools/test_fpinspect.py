"""fpinspect: what it shows, how it folds, and that it starts fast."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fpformat.dtypes import by_name
from fpformat.layout import plan_checkpoint
from fpformat.model import Box, ObjectEntry, Part, SavePlan, SegmentPlan, TensorEntry
from fpformat.source import BytesSource
from fpformat.tree import TensorRef, dump_tree
from fpformat.writer import write_checkpoint
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
    assert "[99]: 99" in out
    assert "more" not in out


def test_parts_and_tensors(checkpoint: Path, run: Any) -> None:
    out = run("fpinspect", checkpoint, "model.part", "model/big", "opt").out
    for words in (
        "model/part",
        "view of",
        "model/emb, strides [20, 1], offset 40",
        "model/big",
        "360 kB (360,000 bytes)",
        "seg-000000.fps, bytes",
        "[99]: 99",
    ):
        assert words in out, out
    outcome = run("fpinspect", checkpoint, "model.nothing")
    assert outcome.code == 1
    assert "no tensor and no part 'model.nothing'" in outcome.err


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


def two_ranks(path: Path) -> Path:
    """Write a checkpoint of two ranks with a tree each and a tensor in two boxes."""
    dtype = by_name("F32")
    shared = TensorEntry(name="w", dtype=dtype, shape=(4, 4))
    own = [TensorEntry(name="b", dtype=dtype, shape=(2,), scope=rank) for rank in (0, 1)]
    top = Box(start=(0, 0), shape=(2, 4))
    low = Box(start=(2, 0), shape=(2, 4))
    segments = []
    for rank, box in enumerate((top, low)):
        tree = dump_tree({"b": TensorRef(0), "w": TensorRef(1)})
        segments.append(
            SegmentPlan(
                entries=(own[rank], shared),
                parts=(
                    Part(key=("w", None), box=box, shard_offset=0, nbytes=32),
                    Part(key=("b", rank), box=None, shard_offset=0, nbytes=8),
                ),
                objects=(
                    ObjectEntry(
                        name="tree", kind=1, payload=tree, scope=rank, ranks=((rank, rank + 1),)
                    ),
                ),
            )
        )
    plan = SavePlan(segments=tuple(segments), world_size=2)
    values = np.arange(16, dtype="f4")
    sources = {
        (("w", None), top): BytesSource(values[:8]),
        (("w", None), low): BytesSource(values[8:]),
        (("b", 0), None): BytesSource(np.zeros(2, "f4")),
        (("b", 1), None): BytesSource(np.ones(2, "f4")),
    }
    write_checkpoint(path, plan, sources)
    return path


def test_several_ranks(tmp_path: Path, run: Any, convert: Any, refuse: Any) -> None:
    path = two_ranks(tmp_path / "ckpt")
    out = run("fpinspect", path, "--layout", "--tree").out
    for words in ("world size  2", "state of rank 0", "state of rank 1", "of rank 1", "a box"):
        assert words in out
    assert "rank" in run("fpinspect", path, "b").out
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
        "import sys, fpformat_tools.fpinspect as tool; code = tool.main(sys.argv[1:]);"
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
        [sys.executable, "-m", "fpformat_tools.fpinspect", str(checkpoint)],
        capture_output=True,
        check=False,
        env={"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin"},
    )
    assert ran.returncode == 0, ran.stderr
    assert b"`- " in ran.stdout


def test_a_reader_that_leaves_early(checkpoint: Path) -> None:
    command = f"{sys.executable} -m fpformat_tools.fpinspect {checkpoint} --tree | head -1"
    ran = subprocess.run(command, shell=True, capture_output=True, check=False)
    assert ran.stderr == b""
    assert b"checkpoint of fpformat" in ran.stdout
