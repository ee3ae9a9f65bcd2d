"""Digests of a state: what they do not depend on, and that everything else changes them."""

import hashlib
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from format.samples import BASE, ENTRIES, GRID, RANK, TREE, write_sample

from fpformat import (
    Box,
    BytesSource,
    Checkpoint,
    FormatError,
    Geometry,
    ObjectEntry,
    Part,
    StateDigest,
    TensorEntry,
    View,
    open_checkpoint,
    plan_checkpoint,
    state_digest,
    write_checkpoint,
)
from fpformat.dtypes import by_name
from fpformat.limits import NONE
from fpformat.read import digest
from fpformat.records.nodes import Node, ParameterRef, TensorRef
from fpformat.records.tree import dump_tree
from fpspec.example import EXAMPLES, pattern, write_example
from fpspec.trace import SPEC, parse_tables

ROOT = Path(__file__).resolve().parents[2]
ROWS = parse_tables((ROOT / SPEC).read_text(encoding="utf-8"))
F32, U8, I32 = by_name("F32"), by_name("U8"), by_name("I32")
BIG = np.arange(300_000, dtype="<f4").reshape(3, 100_000)
TWO: Node = {"big": TensorRef(0), "flag": TensorRef(1), "lr": 0.5}


def digest_of(path: Path) -> StateDigest:
    with open_checkpoint(path) as checkpoint:
        return state_digest(checkpoint)


def write(
    path: Path,
    *,
    arrays: dict[str, Any] | None = None,
    node: Node = TWO,
    objects: tuple[ObjectEntry, ...] = (),
    **keywords: Any,
) -> StateDigest:
    """Write arrays with a tree and return the digests of the state."""
    given = {"big": BIG, "flag": np.ones(3, "u1")} if arrays is None else arrays
    types = {"f4": F32, "u1": U8, "i4": I32}
    entries = [
        TensorEntry(name=name, dtype=types[array.dtype.str[1:]], shape=array.shape)
        for name, array in given.items()
    ]
    sources = {((name, None), None): BytesSource(array) for name, array in given.items()}
    tree = ObjectEntry(name="tree", kind=1, payload=dump_tree(node))
    plan = plan_checkpoint(entries, [*objects, tree], **keywords)
    write_checkpoint(path, plan, sources)
    return digest_of(path)


@pytest.mark.clause("DIG-1")
@pytest.mark.parametrize(
    "keywords",
    [
        {"segment_count": 3},
        {"segment_count": 7},
        {"geometry": Geometry(align=65536, tensor_align=4096, piece_nbytes=16384)},
        {"geometry": Geometry(piece_nbytes=1 << 20)},
        {"step": 7, "user": {"run": "other"}},
        {"world_size": 5},
    ],
)
def test_files_do_not_matter(tmp_path: Path, keywords: dict[str, Any]) -> None:
    assert write(tmp_path / "one") == write(tmp_path / "two", **keywords)


def _changed_byte() -> dict[str, Any]:
    big = BIG.copy()
    big[2, 99_999] = 1
    return {"arrays": {"big": big, "flag": np.ones(3, "u1")}}


@pytest.mark.parametrize(
    "change",
    [
        _changed_byte,
        lambda: {"arrays": {"big": BIG, "flag": np.array([1, 1, 2], "u1")}},
        lambda: {"arrays": {"big": BIG.view("i4"), "flag": np.ones(3, "u1")}},
        lambda: {"arrays": {"big": BIG.reshape(100_000, 3), "flag": np.ones(3, "u1")}},
        lambda: {"arrays": {"big": BIG.reshape(1, 3, -1), "flag": np.ones(3, "u1")}},
        lambda: {
            "arrays": {"big": BIG, "flap": np.ones(3, "u1")},
            "node": {"big": TensorRef(0), "flap": TensorRef(1), "lr": 0.5},
        },
        lambda: {"arrays": {"big": BIG}, "node": {"big": TensorRef(0), "lr": 0.5}},
    ],
)
def test_tensors_matter(tmp_path: Path, change: Callable[[], dict[str, Any]]) -> None:
    one, two = write(tmp_path / "one"), write(tmp_path / "two", **change())
    assert one.tensors != two.tensors
    assert one.state != two.state


@pytest.mark.parametrize(
    "change",
    [
        {"node": {"big": TensorRef(0), "flag": TensorRef(1), "lr": 0.25}},
        {"node": {"big": TensorRef(0), "flag": TensorRef(1)}},
        {"node": {"flag": TensorRef(1), "big": TensorRef(0), "lr": 0.5}},
        {"node": {"big": ParameterRef(0, True), "flag": TensorRef(1), "lr": 0.5}},
        {"objects": (ObjectEntry(name="loader", kind=2, payload=b""),)},
    ],
)
def test_the_rest_matters_to_the_state_alone(tmp_path: Path, change: dict[str, Any]) -> None:
    one, two = write(tmp_path / "one"), write(tmp_path / "two", **change)
    assert one.tensors == two.tensors
    assert one.state != two.state


def test_ties_are_values_of_their_own(tmp_path: Path) -> None:
    """Which name owns bytes, and whether two share them, is how a state is stored."""
    node: Node = {"a": TensorRef(0), "b": TensorRef(1), "c": TensorRef(2)}
    tree = ObjectEntry(name="tree", kind=1, payload=dump_tree(node))
    small = np.arange(6, dtype="<f4").reshape(2, 3)
    apart = {"a": small, "b": small, "c": np.ascontiguousarray(small.T[1:])}
    expected = write(tmp_path / "apart", arrays=apart, node=node)
    turned = View(target=("", None), strides=(1, 3), offset=1)
    for owner in ("a", "b"):
        other = "b" if owner == "a" else "a"
        view = View(target=(owner, None), strides=turned.strides, offset=turned.offset)
        entries = [
            TensorEntry(name=owner, dtype=F32, shape=(2, 3)),
            TensorEntry(name=other, dtype=F32, shape=(2, 3), alias=(owner, None)),
            TensorEntry(name="c", dtype=F32, shape=(2, 2), alias=view),
        ]
        sources = {((owner, None), None): BytesSource(small)}
        write_checkpoint(tmp_path / owner, plan_checkpoint(entries, [tree]), sources)
        assert digest_of(tmp_path / owner) == expected


def test_the_bytes_that_only_a_hidden_base_has_do_not_matter(tmp_path: Path) -> None:
    found = []
    for number, spare in enumerate((0, 1)):
        base = TensorEntry(name="~h/a", dtype=U8, shape=(9,), hidden=True)
        views = [
            TensorEntry(name=name, dtype=U8, shape=(4,), alias=View(
                target=base.key, strides=(2,), offset=offset))
            for name, offset in (("a", 0), ("b", 2))
        ]  # fmt: skip
        content = bytes((0, spare, 2, spare, 4, spare, 6, spare, 8))
        path = tmp_path / str(number)
        sources = {(base.key, None): BytesSource(content)}
        write_checkpoint(path, plan_checkpoint([*views, base]), sources)
        found.append(digest_of(path))
    assert found[0] == found[1]


def _content(code: int, shape: tuple[int, ...], raw: bytes) -> bytes:
    head = struct.pack(f"<HB{len(shape)}Q", code, len(shape), *shape)
    return hashlib.sha256(b"fpformat.tensor.1\n" + head + raw).digest()


def _named(name: str, scope: int) -> bytes:
    return struct.pack("<I", len(name)) + name.encode() + struct.pack("<I", scope)


@pytest.mark.clause("DIG-1")
def test_the_sample_by_hand(tmp_path: Path) -> None:
    """Everything at once: boxes, cut bytes, alias, view, scope, tree, objects, no elements."""
    path = write_sample(tmp_path / "c")
    raw = {
        "grid": GRID.tobytes(),
        "tied": GRID.tobytes(),
        "rng": RANK.tobytes(),
        "empty": b"",
        "view": BASE[1:7].reshape(3, 2).T.tobytes(),
        "long": bytes(i % 251 for i in range(5000)),
    }
    tensors = b"fpformat.tensors.1\n"
    for entry in ENTRIES:
        if not entry.hidden:
            scope = NONE if entry.scope is None else entry.scope
            content = _content(entry.dtype.code, entry.shape, raw[entry.name])
            tensors += _named(entry.name, scope) + content
    scopes = {"rng": 1}
    node: Node = {
        name: TensorRef(scopes.get(name, NONE)) if isinstance(ref, TensorRef) else ref
        for name, ref in TREE.items()
    }
    state = b"fpformat.state.1\n" + hashlib.sha256(tensors).digest()
    for name, kind, payload in (
        ("loader", 2, b"position 12"),
        ("none", 2, b""),
        ("tree", 1, dump_tree(node)),
    ):
        state += _named(name, NONE) + struct.pack("<II", kind, 0)
        state += hashlib.sha256(payload).digest()
    found = digest_of(path)
    assert found.tensors == hashlib.sha256(tensors).hexdigest()
    assert found.state == hashlib.sha256(state).hexdigest()


@pytest.mark.clause("DIG-1")
@pytest.mark.parametrize("name", EXAMPLES)
def test_digests_of_the_text(tmp_path: Path, name: str) -> None:
    write_example(tmp_path / name, name)
    rows = {row["of"]: row["digest"] for row in ROWS["table-digests"] if row["example"] == name}
    found = digest_of(tmp_path / name)
    assert (found.tensors, found.state) == (rows["tensors"], rows["state"])


def test_contents_of_the_text() -> None:
    rows = {row["of"]: row["digest"] for row in ROWS["table-digests"] if row["example"] == "first"}
    weight = _content(12, (4, 512), pattern(8192)).hex()
    assert rows["content of w"] == rows["content of w2"] == weight
    assert rows["content of scale"] == _content(12, (), struct.pack("<f", 0.5)).hex()


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4), (1, 1, 6, 1), (4, 1, 3)])
@pytest.mark.parametrize("step", [4, 12, 20, 1000])
def test_blocks_are_a_range_of_elements(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], step: int
) -> None:
    monkeypatch.setattr(digest, "_STEP_NBYTES", step)
    array = np.arange(int(np.prod(shape))).reshape(shape)
    for start in range(array.size + 1):
        for stop in range(start, array.size + 1):
            seen: list[int] = []
            for box in digest.blocks(shape, itemsize=4, start=start, stop=stop):
                where = tuple(
                    slice(at, at + length) for at, length in zip(box.start, box.shape, strict=True)
                )
                part = array[where].reshape(-1).tolist()
                assert len(part) <= max(step // 4, 1)
                seen += part
            assert seen == list(range(start, stop))


@pytest.mark.parametrize("step", [2, 7, 48, 1 << 20])
def test_small_steps_give_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Views of other types, turned, repeated and far apart, in the smallest of blocks."""
    base = TensorEntry(name="base", dtype=U8, shape=(3, 90))
    content = np.arange(270, dtype="u1")
    words = content[:268].view("<u2")
    views = {
        "turned": ((9, 10), (1, 9), 3),
        "repeated": ((5, 6), (0, 2), 11),
        "far": ((2, 3), (60, 20), 0),
        "scalar": ((), (), 5),
        "none": ((0, 3), (3, 1), 0),
    }
    entries = [base] + [
        TensorEntry(name=name, dtype=by_name("U16"), shape=shape, alias=View(
            target=base.key, strides=strides, offset=offset))
        for name, (shape, strides, offset) in views.items()
    ]  # fmt: skip
    sources = {(base.key, None): BytesSource(content)}
    write_checkpoint(tmp_path / "c", plan_checkpoint(entries), sources)
    monkeypatch.setattr(digest, "_STEP_NBYTES", step)
    raw = {"base": (2, (3, 90), content.tobytes())}
    for name, (shape, strides, offset) in views.items():
        if 0 in shape:
            raw[name] = (4, shape, b"")
            continue
        steps = tuple(2 * stride for stride in strides)
        seen = np.lib.stride_tricks.as_strided(words[offset:], shape, steps)
        raw[name] = (4, shape, seen.tobytes())
    tensors = b"fpformat.tensors.1\n"
    for name in sorted(raw):
        tensors += _named(name, NONE) + _content(*raw[name])
    assert digest_of(tmp_path / "c").tensors == hashlib.sha256(tensors).hexdigest()


@pytest.mark.clause("ALI-6")
def test_a_view_that_repeats_without_measure_is_refused(tmp_path: Path) -> None:
    entries = [
        TensorEntry(name="a", dtype=F32, shape=(2,)),
        TensorEntry(name="b", dtype=F32, shape=(1 << 40,), alias=View(
            target=("a", None), strides=(0,), offset=1)),
    ]  # fmt: skip
    sources = {(("a", None), None): BytesSource(bytes(8))}
    write_checkpoint(tmp_path / "c", plan_checkpoint(entries), sources)
    with pytest.raises(FormatError) as caught:
        digest_of(tmp_path / "c")
    assert caught.value.clause == "ALI-6"


def test_damage_gives_no_digest(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "c")
    raw = bytearray((path / "seg-000000.fps").read_bytes())
    raw[4096] ^= 1
    (path / "seg-000000.fps").write_bytes(raw)
    with pytest.raises(FormatError) as caught:
        digest_of(path)
    assert caught.value.clause == "SUM-2"


def test_boxes_do_not_matter(tmp_path: Path) -> None:
    whole = TensorEntry(name="grid", dtype=F32, shape=(4, 3))
    write_checkpoint(
        tmp_path / "one", plan_checkpoint([whole]), {(whole.key, None): BytesSource(GRID)}
    )
    left, right = Box(start=(0, 0), shape=(4, 1)), Box(start=(0, 1), shape=(4, 2))
    plan = plan_checkpoint([whole], segment_count=2)
    segments = []
    for segment, box in zip(plan.segments, (left, right), strict=True):
        nbytes = 4 * box.shape[0] * box.shape[1]
        part = Part(key=whole.key, box=box, shard_offset=0, nbytes=nbytes)
        segments.append(replace(segment, entries=(whole,), parts=(part,)))
    sources = {
        (whole.key, left): BytesSource(np.ascontiguousarray(GRID[:, :1])),
        (whole.key, right): BytesSource(np.ascontiguousarray(GRID[:, 1:])),
    }
    write_checkpoint(tmp_path / "two", replace(plan, segments=tuple(segments)), sources)
    assert digest_of(tmp_path / "one") == digest_of(tmp_path / "two")


def test_progress_counts_elements(tmp_path: Path) -> None:
    seen: list[int] = []
    with open_checkpoint(write_sample(tmp_path / "c")) as checkpoint:
        state_digest(checkpoint, progress=seen.append)
    assert sum(seen) == GRID.nbytes + 5000 + RANK.nbytes + 24


def test_no_more_than_a_step_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor and its transpose, each a hundred times larger than a step."""
    step = 4096
    big = np.arange(102_400, dtype="<f4").reshape(320, 320)
    turned = View(target=("big", None), strides=(1, 320), offset=0)
    entries = [
        TensorEntry(name="big", dtype=F32, shape=big.shape),
        TensorEntry(name="turned", dtype=F32, shape=big.shape, alias=turned),
    ]
    sources = {(("big", None), None): BytesSource(big)}
    write_checkpoint(tmp_path / "c", plan_checkpoint(entries), sources)
    expected = digest_of(tmp_path / "c")
    sizes: list[int] = []
    read = Checkpoint.read

    def noted(self: Checkpoint, key: Any, *, box: Box | None = None) -> Any:
        part = read(self, key, box=box)
        sizes.append(len(part))
        return part

    monkeypatch.setattr(digest, "_STEP_NBYTES", step)
    monkeypatch.setattr(Checkpoint, "read", noted)
    assert digest_of(tmp_path / "c") == expected
    assert max(sizes) <= step
