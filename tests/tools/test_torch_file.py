"""Files of torch: every variant reads as torch reads it, faults are named, nothing runs."""

import codecs
import collections
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tool_inputs import (
    Call,
    archive,
    model_state,
    repack,
    same_tensor,
    save_legacy,
    save_zip,
    share_memory,
    storage,
    tensor_call,
)

from fpformat.read.reader import open_checkpoint
from fpformat_io.torch import load, save


def same_state(one: Any, two: Any) -> bool:
    """Whether two nested states are equal in types, order and bits."""
    if isinstance(one, torch.Tensor):
        kinds = type(one) is type(two)
        return kinds and same_tensor(one, two) and one.requires_grad == two.requires_grad
    if isinstance(one, np.ndarray):
        same = type(two) is np.ndarray and one.dtype == two.dtype and one.shape == two.shape
        return same and one.tobytes() == two.tobytes()
    if type(one) is not type(two):
        return False
    if isinstance(one, dict):
        pairs = list(one) == list(two) and [type(k) for k in one] == [type(k) for k in two]
        extra = same_state(vars(one), vars(two)) if hasattr(one, "__dict__") else True
        return pairs and extra and all(same_state(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same_state, one, two))
    if isinstance(one, float):
        return np.float64(one).tobytes() == np.float64(two).tobytes()
    return bool(one == two)


@pytest.fixture(params=["zip", "legacy", "protocol 4", "protocol 5", "deflated", "stored again"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Save a state in one of the variants."""

    def call(state: Any) -> Path:
        path = tmp_path / "state.pt"
        if request.param == "legacy":
            return save_legacy(state, path)
        if request.param.startswith("protocol"):
            torch.save(state, path, pickle_protocol=int(request.param[-1]))
            return path
        save_zip(state, path)
        if request.param == "deflated":
            return repack(path, tmp_path / "again.pt")
        if request.param == "stored again":
            return repack(path, tmp_path / "again.pt", zipfile.ZIP_STORED)
        return path

    return call


@pytest.mark.clause("CNV-1", "CNV-23")
def test_every_variant(saved: Any, tmp_path: Path, convert: Any) -> None:
    path = saved(model_state())
    report = convert(path, tmp_path / "ckpt", "--json").json
    assert report["warnings"] == []
    expected = torch.load(path, weights_only=False)
    state = load(tmp_path / "ckpt")
    assert same_state(expected, state)
    for one in ("head", "row", "turned"):
        assert share_memory(state["embed"], state[one])
    convert(tmp_path / "ckpt", tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert same_state(expected, back)
    for one in ("head", "row", "turned"):
        assert share_memory(back["embed"], back[one])


def test_roots_that_are_no_dictionary(saved: Any, tmp_path: Path, convert: Any) -> None:
    base = torch.arange(6.0)
    for position, state in enumerate((base, [base, {"x": base}], (1, base))):
        convert(saved(state), tmp_path / f"{position}")
        assert same_state(load(tmp_path / f"{position}"), state)
        convert(tmp_path / f"{position}", tmp_path / f"{position}.pt")
        assert same_state(torch.load(tmp_path / f"{position}.pt", weights_only=True), state)


def leaves() -> dict[str, Any]:
    return {
        "int": 3,
        "large": 2**70,
        "negative": -(2**40),
        "float": 0.1,
        "nan": float("nan"),
        "zero": -0.0,
        "flag": True,
        "none": None,
        "text": "r\u00e9sum\u00e9 \U0001f600\0",
        "bytes": b"\x00\xff" * 40,
        "no bytes": b"",
        "complex": 1 - 2j,
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        "tuple": (1, (2, [3, {"k": torch.ones(2)}])),
        "empty": [{}, [], ()],
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
        "counter": collections.Counter({2: 1, 5: 3}),
        "keys": {0: 1, "0": 2, None: 3, -5: 4},
        "bools": {True: 1, False: 2},
    }


@pytest.mark.clause("CNV-25")
def test_values_of_every_kind(saved: Any, tmp_path: Path, convert: Any) -> None:
    convert(saved(leaves()), tmp_path / "ckpt")
    assert same_state(load(tmp_path / "ckpt"), leaves())
    convert(tmp_path / "ckpt", tmp_path / "back.pt")
    assert same_state(torch.load(tmp_path / "back.pt", weights_only=True), leaves())


def test_every_data_type(saved: Any, tmp_path: Path, convert: Any) -> None:
    raw = torch.arange(256, dtype=torch.uint8)
    names = [
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e4m3fnuz"),
        *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "complex32"),
        *("complex64", "complex128"),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {name: raw.clone().view(getattr(torch, name)) for name in names}
        path = saved(state)
        convert(path, tmp_path / "ckpt")
        convert(tmp_path / "ckpt", tmp_path / "back.pt")
        back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert all(same_tensor(back[name], state[name]) for name in names)


def test_numpy_values(saved: Any, tmp_path: Path, convert: Any, refuse: Any) -> None:
    state = {
        "rng": np.random.RandomState(0).get_state(),
        "f": np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3)),
        "rev": np.arange(5.0)[::-1],
        "zero": np.array(5, dtype=np.int16),
        "none": np.zeros((0, 3)),
        "scalars": [np.float64(1.5), np.bool_(True), np.uint8(7), np.complex64(1j)],
        "dtype": np.dtype("float32"),
        "w": torch.ones(2),
    }
    convert(saved(state), tmp_path / "ckpt")
    assert same_state(load(tmp_path / "ckpt"), state)
    text = refuse(tmp_path / "ckpt", tmp_path / "back.pt")
    for words in ("rng/~l1: a numpy array", "scalars/~l0: a numpy scalar", "dtype: a numpy dtype"):
        assert words in text
    assert "--numpy-to-tensor" in text
    outcome = convert(tmp_path / "ckpt", tmp_path / "back.pt", "--skip-unsupported", "--quiet")
    assert "skipped: scalars/~l0: a numpy scalar; None stands in its place\n" in outcome.err
    assert "skipped: rev: a numpy array\n" in outcome.err
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert back["scalars"] == [None] * 4
    assert set(back) == {"rng", "scalars", "w"}


@pytest.mark.clause("CNV-1", "CNV-25")
def test_numpy_values_as_tensors(tmp_path: Path, convert: Any, refuse: Any) -> None:
    state = {
        "rng": ("MT19937", np.arange(4, dtype=np.uint32)),
        "scalars": [np.float64(1.5), np.bool_(True), np.uint8(7), np.complex64(1j)],
        "dtype": np.dtype("float32"),
        "w": torch.ones(2),
    }
    save(state, tmp_path / "ckpt")
    text = refuse(tmp_path / "ckpt", tmp_path / "x.pt", "--numpy-to-tensor")
    assert "1 other value is in the way; --key" in text
    assert text.endswith("  dtype: a numpy dtype\n")
    options = ("--numpy-to-tensor", "--skip-unsupported")
    convert(tmp_path / "ckpt", tmp_path / "x.pt", *options)
    read = torch.load(tmp_path / "x.pt", weights_only=True)
    assert read["scalars"] == [1.5, True, 7, 1j]
    assert [type(value) for value in read["scalars"]] == [float, bool, int, complex]
    assert same_tensor(read["rng"][1], torch.arange(4).to(torch.uint32))
    convert(tmp_path / "ckpt", tmp_path / "x.safetensors", *options)
    report = convert(tmp_path / "ckpt", tmp_path / "plain", "--numpy-to-tensor", "--json").json
    assert report["tensors"] == 2
    assert torch.is_tensor(load(tmp_path / "plain")["rng"][1])


@pytest.mark.clause("CNV-25")
def test_whole_numbers_without_end(tmp_path: Path, convert: Any, refuse: Any) -> None:
    state = {"fits": 2**2030, "huge": 2**2100, "w": torch.ones(1)}
    save(state, tmp_path / "ckpt")
    text = refuse(tmp_path / "ckpt", tmp_path / "x.pt")
    assert "huge: an integer of more than 255 bytes" in text
    convert(tmp_path / "ckpt", tmp_path / "x.pt", "--skip-unsupported")
    read = torch.load(tmp_path / "x.pt", weights_only=True)
    assert same_state(read, {"fits": 2**2030, "w": torch.ones(1)})


def test_keys_beyond_64_bits(saved: Any, tmp_path: Path, refuse: Any, convert: Any) -> None:
    state = {"x": {2**63: 1, 2**200: 2, 2**63 - 1: 3, -(2**63): 4}}
    path = saved(state)
    text = refuse(path, tmp_path / "out")
    assert text.count("fits 64 bits") + text.count("keys are str, int") == 2
    convert(path, tmp_path / "out", "--skip-unsupported")
    assert load(tmp_path / "out") == {"x": {2**63 - 1: 3, -(2**63): 4}}


def test_big_endian_arrays_keep_their_values(tmp_path: Path, convert: Any) -> None:
    save_zip({"a": np.arange(3, dtype=">i4")}, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "ckpt")
    assert load(tmp_path / "ckpt")["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([{}]), np.zeros(1, "i4,f4")])
def test_arrays_of_other_types(tmp_path: Path, refuse: Any, array: Any) -> None:
    save_zip({"x": {"a": array}}, tmp_path / "x.pt")
    assert "x/a: a numpy" in refuse(tmp_path / "x.pt", tmp_path / "out")


def test_a_training_state(tmp_path: Path, convert: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
    }
    save_zip(state, tmp_path / "x.ckpt")
    convert(tmp_path / "x.ckpt", tmp_path / "ckpt")
    assert same_state(load(tmp_path / "ckpt"), state)
    save(state, tmp_path / "face")
    with open_checkpoint(tmp_path / "face") as one, open_checkpoint(tmp_path / "ckpt") as two:
        # Conversion and saving from memory are the same to the byte, but for id and time.
        keys = one.keys()
        assert keys == two.keys()
        assert all(one.entry(key) == two.entry(key) for key in keys)
        assert one.read_object("tree") == two.read_object("tree")


@pytest.mark.clause("CNV-24")
def test_only_what_names_reach_is_kept(tmp_path: Path, convert: Any) -> None:
    base = torch.arange(2_000_000.0)
    state = {"slice": base[1000:1010], "row": base.view(1000, 2000)[5], "step": base[::200_000]}
    save_zip(state, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size > 8_000_000
    report = convert(tmp_path / "x.pt", tmp_path / "ckpt", "--json").json
    assert report["nbytes"] < 50_000
    assert same_state(load(tmp_path / "ckpt"), {k: v.clone() for k, v in state.items()})
    convert(tmp_path / "x.pt", tmp_path / "y.pt")
    assert (tmp_path / "y.pt").stat().st_size < 20_000


@pytest.mark.clause("CNV-23")
def test_sharing_of_every_kind(tmp_path: Path, convert: Any) -> None:
    base, other = torch.arange(100.0).view(10, 10), torch.arange(16.0)
    state = {
        "wide": torch.ones(1).expand(3, 1000),
        "left": base[:, :6],
        "right": base[:, 4:],
        "column": torch.zeros(10, 10)[:, 3],
        "floats": other,
        "half": other[8:],
    }
    save_zip(state, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "y.pt")
    for read in (load(tmp_path / "ckpt"), torch.load(tmp_path / "y.pt", weights_only=True)):
        for name, tensor in state.items():
            assert same_tensor(read[name], tensor), name
        assert share_memory(read["left"], read["right"])
        assert share_memory(read["floats"], read["half"])
        assert read["wide"].untyped_storage().nbytes() == 4


def test_views_of_another_type(tmp_path: Path, convert: Any) -> None:
    """Torch itself saves no such views, but it reads them."""
    base = torch.arange(16.0)
    state = {"bits": base.view(torch.int32), "floats": base, "half": base[8:], "fp8": base[:1]}
    state["fp8"] = state["fp8"].view(torch.float8_e5m2)
    save(state, tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "x.pt")
    read = torch.load(tmp_path / "x.pt", weights_only=True)
    assert same_state(read, state)
    assert all(share_memory(read["bits"], read[name]) for name in state)
    convert(tmp_path / "x.pt", tmp_path / "again")
    assert same_state(load(tmp_path / "again"), state)


def test_cuda_tags_and_tensor_attributes(
    tmp_path: Path, convert: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:3")
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.note = "x"  # type: ignore[attr-defined]
    tensor = torch.zeros(2)
    tensor.mark = 5  # type: ignore[attr-defined]
    save_zip({"p": parameter, "t": tensor}, tmp_path / "x.pt")
    report = convert(tmp_path / "x.pt", tmp_path / "ckpt", "--json").json
    assert len(report["warnings"]) == 2
    assert "'note'" in "".join(report["warnings"])
    state = load(tmp_path / "ckpt")
    assert isinstance(state["p"], torch.nn.Parameter)
    assert state["t"].tolist() == [0, 0]


def test_a_default_dictionary_becomes_plain(tmp_path: Path, convert: Any) -> None:
    state = collections.defaultdict(list, {"a": torch.ones(1)})
    save_zip({"d": state}, tmp_path / "x.pt")
    assert "plain dict" in convert(tmp_path / "x.pt", tmp_path / "ckpt").err
    assert type(load(tmp_path / "ckpt")["d"]) is dict


class Foreign:
    """A class of somebody's training script."""

    def __init__(self) -> None:
        self.lr = 0.1


@pytest.mark.clause("CNV-2", "CNV-6")
def test_foreign_classes_are_listed_and_can_be_skipped(
    saved: Any, tmp_path: Path, convert: Any, refuse: Any
) -> None:
    state = {
        "model": {"w": torch.ones(2)},
        "args": Foreign(),
        "deep": [{"x": Foreign(), "y": 1}],
        "function": len,
        "set": {1, 2},
        ("odd", 1): 5,
        "sparse": torch.eye(2).to_sparse(),
        "meta": torch.empty(2, device="meta"),
    }
    path = saved(state)
    text = refuse(path, tmp_path / "out")
    for words in ("args: an object", "Foreign", "deep/~l0/x:", "len", "set:", "key of type tuple"):
        assert words in text, text
    assert "sparse: a sparse tensor" in text
    assert "meta: a meta tensor" in text
    assert "--skip-unsupported" in text
    report = convert(path, tmp_path / "out", "--skip-unsupported", "--json").json
    assert len(report["skipped"]) == 7
    assert same_state(load(tmp_path / "out"), {"model": {"w": torch.ones(2)}, "deep": [{"y": 1}]})
    convert(path, tmp_path / "model", "--key", "model")
    assert same_state(load(tmp_path / "model"), {"w": torch.ones(2)})


@pytest.mark.clause("CNV-6", "CNV-22")
@pytest.mark.parametrize("variant", [save_zip, save_legacy])
def test_nothing_is_executed(tmp_path: Path, refuse: Any, convert: Any, variant: Any) -> None:
    marker = tmp_path / "MARKER"
    state = {"w": torch.ones(2), "x": Call(open, str(marker), "w"), "y": Call(exec, "1 / 0")}
    path = variant(state, tmp_path / "x.pt")
    text = refuse(path, tmp_path / "out")
    assert "x: refuses to run code: io.open" in text or "builtin" in text
    assert "y: refuses to run code: " in text
    assert "exec" in text
    outcome = convert(path, tmp_path / "out", "--skip-unsupported")
    assert "skipped: y: refuses to run code: " in outcome.err
    assert list(load(tmp_path / "out")) == ["w"]
    assert not marker.exists()


@pytest.mark.clause("CNV-22")
@pytest.mark.parametrize(
    "pickled",
    [
        b"cos\nsystem\n(S'touch MARKER'\ntR.",
        b"(S'touch MARKER'\nios\nsystem\n.",
        b"c__builtin__\neval\n(V1/0\ntR.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0ctouch MARKER\x85R.",
        b"\x80\x02cos\nsystem\n)\x81}b.",
    ],
)
def test_hand_made_pickles(tmp_path: Path, refuse: Any, pickled: bytes) -> None:
    path = archive(tmp_path / "x.pt", pickled)
    text = refuse(path, tmp_path / "out")
    assert "<the whole state>: refuses to run code: " in text
    assert "os.system" in text or "eval" in text


@pytest.mark.parametrize("variant", [save_zip, save_legacy])
@pytest.mark.parametrize("cut", ["half", 8, 1, "100 left", "all"])
def test_truncated_files(tmp_path: Path, refuse: Any, variant: Any, cut: Any) -> None:
    path = variant({"w": torch.arange(5000.0), "step": 1}, tmp_path / "x.pt")
    content = path.read_bytes()
    left = {"half": len(content) // 2, "100 left": 100, "all": 0}.get(cut)
    path.write_bytes(content[: len(content) - cut if left is None else left])
    text = refuse(path, tmp_path / "out")
    assert str(path) in text
    assert "truncated" in text or "empty" in text
    assert f"{path.stat().st_size:,}" in text


@pytest.mark.clause("CNV-7")
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (tensor_call(shape=(5,)), "reaches byte 20 of a storage of 16"),
        (tensor_call(offset=1), "reaches byte 20"),
        (tensor_call(strides=(2,)), "reaches byte 28"),
        (tensor_call(shape=(2, 2**40), strides=(0, 0)), None),
        (tensor_call(shape=(2**40, 2**40), strides=(0, 0)), "too large"),
        (tensor_call(offset=-1), "make no sense"),
        (tensor_call(offset=2**70), "make no sense"),
        (tensor_call(shape=(-1,)), "shape is not of whole numbers"),
        (tensor_call(strides=(-1,)), "stride is not of whole numbers"),
        (tensor_call(strides=(2**64,), shape=(1,)), "stride is not of whole numbers"),
        (tensor_call(shape=(4, 1)), "make no sense"),
        (tensor_call(shape="4"), "not a list"),
        (tensor_call(shape=(1,) * 65, strides=(1,) * 65), "not a list of at most 64"),
        (tensor_call(storage=storage(count=5)), "has 16 bytes, expected 5 of 4"),
        (tensor_call(storage=storage(key="1")), "is missing"),
        (tensor_call(storage=storage(key="../0")), "is missing"),
        (tensor_call(storage=storage(kind=torch.QInt8Storage)), "no registered type"),
        (tensor_call(storage=storage(count=-1)), "wrong types"),
        (tensor_call(storage=5), "refers to no storage"),
        (storage(), "a storage outside"),
        (Call(torch._utils._rebuild_tensor_v2, 1), "unknown arguments"),
    ],
)
def test_tensors_that_lie(tmp_path: Path, run: Any, value: Any, words: str | None) -> None:
    path = archive(tmp_path / "x.pt", {"t": value})
    outcome = run("fpconvert", path, tmp_path / "out")
    if words is None:
        assert outcome.code == 0
        assert (tmp_path / "out" / "seg-000000.fps").stat().st_size < 50_000
        outcome = run("fpconvert", path, tmp_path / "out.safetensors")
        words = "would be written out"
    assert outcome.code == 1
    assert words in outcome.err


def test_a_flipped_bit_is_found(tmp_path: Path, refuse: Any) -> None:
    state = {"whole": torch.arange(4000.0), "part": torch.arange(4000.0)[5:10]}
    path = save_zip(state, tmp_path / "x.pt")
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as zipped:
        members = [m for m in zipped.infolist() if "/data/" in m.filename or "pkl" in m.filename]
    assert len(members) == 3
    for member in members:
        lengths = content[member.header_offset + 26 : member.header_offset + 30]
        names = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        place = member.header_offset + 30 + names + member.file_size // 2
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        text = refuse(path, tmp_path / "out")
        assert member.filename in text
        assert "CRC-32" in text


def test_checksums_may_be_absent(tmp_path: Path, convert: Any) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = save_zip(model_state(), tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    convert(path, tmp_path / "ckpt")
    assert same_state(load(tmp_path / "ckpt"), torch.load(path, weights_only=False))


def test_big_endian_and_encrypted_archives(tmp_path: Path, refuse: Any) -> None:
    path = archive(tmp_path / "x.pt", {"a": 1}, byteorder=b"big")
    assert "big-endian" in refuse(path, tmp_path / "out")
    path = save_zip({"a": torch.ones(2)}, tmp_path / "y.pt")
    again = repack(path, tmp_path / "z.pt", zipfile.ZIP_LZMA)
    assert "compressed by method 14" in refuse(again, tmp_path / "out")
    content = path.read_bytes().replace(
        b"PK\x01\x02\x00\x00\x00\x00\x08\x08", b"PK\x01\x02\x00\x00\x00\x00\x09\x08"
    )
    path.write_bytes(content)
    assert "is encrypted" in refuse(path, tmp_path / "out")


def test_the_output_is_laid_out_as_torch_does(tmp_path: Path, convert: Any) -> None:
    path = save_zip({"a": torch.ones(3), "b": torch.zeros(70, dtype=torch.int8)}, tmp_path / "x.pt")
    convert(path, tmp_path / "y.pt")
    with zipfile.ZipFile(tmp_path / "y.pt") as zipped:
        assert zipped.testzip() is None
        for member in zipped.infolist():
            with (tmp_path / "y.pt").open("rb") as opened:
                opened.seek(member.header_offset + 26)
                lengths = opened.read(4)
            extra = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
            assert (member.header_offset + 30 + extra) % 64 == 0
    read = torch.load(tmp_path / "y.pt", weights_only=True, mmap=True)
    assert read["b"].shape == (70,)


def test_torch_reads_notes_as_nothing(tmp_path: Path, convert: Any) -> None:
    save({"a": torch.ones(2)}, tmp_path / "ckpt", step=7, metadata={"k": "v"})
    convert(tmp_path / "ckpt", tmp_path / "x.pt")
    assert same_state(torch.load(tmp_path / "x.pt", weights_only=True), {"a": torch.ones(2)})
    convert(tmp_path / "x.pt", tmp_path / "again")
    with open_checkpoint(tmp_path / "again") as checkpoint:
        assert checkpoint.manifest.step == 7
        assert checkpoint.manifest.user == {"k": "v"}
    for notes in (b"[", b"[]", b'{"step":-1}', b'{"user":{"k":1}}', b'{"user":5}'):
        path = archive(tmp_path / "y.pt", {"a": 1}, **{"fpformat.json": notes})
        assert "makes no sense" in convert(path, tmp_path / f"{len(notes)}{notes[1:3].hex()}").err


@pytest.mark.parametrize("user", ['{"\\ud800": "x"}', '{"x": "\\udfff"}'])
def test_notes_that_are_no_text(tmp_path: Path, refuse: Any, user: str) -> None:
    notes = b'{"step": 1, "user": ' + user.encode() + b"}"
    path = archive(tmp_path / "x.pt", {"a": 1}, **{"fpformat.json": notes})
    assert "lone surrogate" in refuse(path, tmp_path / "out")


@pytest.mark.parametrize("step", [2**53, 10**4000])
def test_steps_too_large(tmp_path: Path, convert: Any, step: int) -> None:
    notes = b'{"step": %s}' % str(step).encode()
    path = archive(tmp_path / "x.pt", {"a": 1}, **{"fpformat.json": notes})
    assert "makes no sense" in convert(path, tmp_path / "out").err


def test_a_complex_number_too_large(tmp_path: Path, refuse: Any) -> None:
    path = archive(tmp_path / "x.pt", {"a": Call(complex, 1 << 1030, 1)})
    assert "a: a complex number too large" in refuse(path, tmp_path / "out")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "ascii", "rot13", "x" * 5000])
def test_only_latin1_stands_for_bytes(tmp_path: Path, refuse: Any, encoding: str) -> None:
    path = archive(tmp_path / "x.pt", {"a": Call(codecs.encode, "\xe9", encoding)})
    text = refuse(path, tmp_path / "out")
    assert f"a: text in the encoding '{encoding[:20]}" in text
    assert len(text) < 500


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (("cuda", -1), "0 to 127"),
        (("cuda", 128), "0 to 127"),
        (("cuda", True), "0 to 127"),
        (("cuda", 1 << 20_000), "0 to 127"),
        (("cuda:300",), "0 to 127"),
        (("cuda:0", 1), "called 'cuda:0'"),
        (("x" * 100_000 + "/",), "a torch.device called"),
        ((5,), "an unknown way"),
    ],
)
def test_devices_that_are_none(tmp_path: Path, refuse: Any, parts: Any, words: str) -> None:
    path = archive(tmp_path / "x.pt", {"d": Call(torch.device, *parts)})
    assert words in refuse(path, tmp_path / "out")


@pytest.mark.parametrize("shape", [(1 << 20_000,), (2**70, 0), (1,) * 33, (3,), (-1,), ("4",)])
def test_arrays_of_odd_shapes(tmp_path: Path, refuse: Any, shape: Any) -> None:
    kind = np.dtype("f4")
    function, arguments = np.zeros(1, "f4").__reduce__()[:2]
    path = archive(
        tmp_path / "x.pt", {"a": Stated(function, arguments, (1, shape, kind, False, b"1234"))}
    )
    assert "a: a numpy" in refuse(path, tmp_path / "out")


class Stated(Call):
    """Pickles as a call and a state."""

    def __init__(self, function: Any, arguments: Any, state: Any) -> None:
        self.call = (function, arguments, state)


@pytest.mark.parametrize("offset", [2**62, 2**63 - 1, 2**63, 2**64 - 1])
def test_members_beyond_the_end(tmp_path: Path, refuse: Any, offset: int) -> None:
    path = archive(tmp_path / "x.pt", {"a": tensor_call()})
    content = path.read_bytes()
    entry = content.rfind(b"PK\1\2", 0, content.rfind(b"archive/data/0"))
    end = content.rfind(b"PK\5\6")
    name = content[entry + 46 :].partition(b"PK")[0]
    extra = struct.pack("<HHQ", 1, 8, offset)
    changed = bytearray(content[:entry] + content[entry : entry + 46] + name + extra)
    changed[entry + 30 : entry + 32] = len(extra).to_bytes(2, "little")
    changed[entry + 42 : entry + 46] = b"\xff" * 4
    tail = bytearray(content[end:])
    size = int.from_bytes(tail[12:16], "little") + len(extra)
    tail[12:16] = size.to_bytes(4, "little")
    path.write_bytes(changed + content[entry + 46 + len(name) : end] + tail)
    text = refuse(path, tmp_path / "out")
    assert f"truncated: ends inside the 30 bytes at {offset:,}" in text


def test_members_without_a_name(tmp_path: Path, refuse: Any) -> None:
    path = archive(tmp_path / "x.pt", {"a": 1})
    content = bytearray(path.read_bytes())
    # The name of the last member is cut off; the bytes after it are taken for its comment.
    entry = content.rfind(b"PK\1\2")
    nbytes = int.from_bytes(content[entry + 28 : entry + 30], "little")
    content[entry + 28 : entry + 34] = b"\0\0\0\0" + nbytes.to_bytes(2, "little")
    path.write_bytes(content)
    assert "a member without a name" in refuse(path, tmp_path / "out")
