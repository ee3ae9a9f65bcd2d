"""The interpreter of pickles: equal to pickle on plain values, inert and bounded on the rest."""

import pickle
import pickletools
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tool_inputs import archive, repack, save_legacy, save_zip

from fpformat_tools.errors import SourceError
from fpformat_tools.pickles.interpreter import PickleMachine, PickleStream
from fpformat_tools.pickles.values import Built, Global, Members, OddKey, Persistent
from fpformat_tools.streams.ranges import HeldRange


def interpret(raw: bytes) -> Any:
    return PickleMachine(PickleStream(HeldRange(raw), start=0, where="here")).run()


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.integers(-(2**63), 2**63 - 1) | st.none(), inner)
        | st.lists(inner, max_size=4).map(tuple)
    ),
    max_leaves=20,
)


def exact(one: Any, two: Any) -> bool:
    if type(one) is not type(two):
        return False
    if isinstance(one, dict):
        return list(one) == list(two) and all(exact(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(exact, one, two))
    return bool(one == two)


def settled(value: Any) -> Any:
    """Turn the calls by which old protocols spell bytes into bytes."""
    if isinstance(value, Built):
        assert str(value.function) in ("_codecs.encode", "__builtin__.bytes")
        return value.arguments[0].encode("latin-1") if value.arguments else b""
    if isinstance(value, dict):
        return {key: settled(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(settled, value))
    return value


@given(value=plain, protocol=st.integers(0, 5))
def test_plain_values_are_those_of_pickle(value: Any, protocol: int) -> None:
    assert exact(settled(interpret(pickle.dumps(value, protocol))), value)
    raw = pickletools.optimize(pickle.dumps(value, protocol))
    assert exact(settled(interpret(raw)), value)


class Thing:
    """A class that must not be made."""

    def __init__(self, number: int = 0) -> None:
        self.number = number


@pytest.mark.clause("CNV-6")
@pytest.mark.parametrize("protocol", range(6))
def test_objects_stay_descriptions(protocol: int) -> None:
    value = interpret(
        pickle.dumps({"t": Thing(5), "s": {1}, "f": frozenset({2}), (1,): 2}, protocol)
    )
    built = value["t"]
    assert isinstance(built, Built)
    assert built.states == [{"number": 5}]
    names = [built.function, *built.arguments]
    assert any(isinstance(name, Global) and name.name == "Thing" for name in names)
    assert isinstance(value["s"], Built | Members)
    assert sum(isinstance(key, OddKey) for key in value) == 1


def test_persistent_references() -> None:
    assert interpret(b"\x80\x02U\x03keyQ.").identity == "key"
    found = interpret(b"Pkey\n.")
    assert isinstance(found, Persistent)
    assert found.identity == "key"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"N",
        b"NN.",
        b"(.",
        b"0.",
        b"e.",
        b"t.",
        b"\x85.",
        b"]Na",
        b"NNa.",
        b"NNNs.",
        b"}(Nu.",
        b"h\x00.",
        b"g5\n.",
        b"gx\n.",
        b"q\x00.",
        b"NR.",
        b"NNR.",
        b"Nb.",
        b"NNb.",
        b"I5x\n.",
        b"Fx\n.",
        b"Sx\n.",
        b"S'\\x'\n.",
        b"V\\ud\n.",
        b"X\xff\xff\xff\xff",
        b"X\x02\x00\x00\x00\xff\xff.",
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\xff.",
        b"\x8b\xff\xff\xff\xff.",
        b"\x82\x01.",
        b"\x97.",
        b"\x98.",
        b"\xff.",
        b"NN\x93.",
        b"(o.",
        b"c" + b"a" * 100_000 + b"\n.",
        b"I" + b"9" * 4090 + b"9" * 500 + b"\n.",
    ],
)
def test_nonsense_is_one_error(raw: bytes) -> None:
    with pytest.raises(SourceError) as caught:
        interpret(raw)
    assert "here" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_random_changes_give_errors_of_a_class(tmp_path: Path, run: Any) -> None:
    sources = [
        save_zip({"a": torch.ones(3), "b": [1, "x", 2.5]}, tmp_path / "a.pt"),
        save_legacy({"a": torch.ones(3), "b": [1, "x", 2.5]}, tmp_path / "b.pt"),
    ]
    chance = random.Random(5)
    for source in sources:
        content = source.read_bytes()
        for number in range(150):
            changed = bytearray(content)
            for _ in range(chance.randrange(1, 4)):
                changed[chance.randrange(len(changed))] = chance.randrange(256)
            path = tmp_path / "x.pt"
            path.write_bytes(changed)
            outcome = run("fpconvert", path, tmp_path / f"{source.stem}{number}", "--quiet")
            assert outcome.code in (0, 1), outcome.err


def long_opcode(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    short = len(raw) < 256
    return (b"\x8a%c" % len(raw) if short else b"\x8b" + len(raw).to_bytes(4, "little")) + raw


# A tuple that holds the one before twice: 2^60 values when printed; and one 100,000 deep. Memo 9.
BOMBS = [
    b"\x80\x02(]q\0" + b"h\0h\0\x86q\0" * 60 + b"q\x091",
    b"\x80\x02()" + b"\x85" * 100_000 + b"q\x091",
]  # fmt: skip
# Where a careless reader would print it.
FORMATTED = [
    (b"ctorch\ndevice\nX\4\0\0\0cudah\x09\x86R", "index is no whole number"),
    (b"ctorch\ndevice\nh\x09\x85R", "a torch.device built in an unknown way"),
    (b"ctorch._tensor\n_rebuild_from_type_v2\n(ca\nb\nh\x09)NtR", "class of an unknown name"),
    (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(h\x09ctorch\nTensor\n)NtR",
        "rebuilt by a computed function",
    ),
    (b"ctorch._utils\n_rebuild_tensor_v2\n(NK\0h\x09)RK\1\x85\x89NtR", "is not a list of at most"),
    (b"h\x09)R", "built by a computed function"),
    (b"h\x09h\x09\x85R", "built by a computed function"),
]


@pytest.mark.parametrize(
    ("pickled", "words"),
    [
        # Lists of lists, each holding the one before twice: 2^60 values when written out.
        (
            b"\x80\x02(]q\x00"
            + b"".join(b"]q%c(h%ch%ce" % (i + 1, i, i) for i in range(60))
            + b"1h\x3c.",
            "shares the same values",
        ),
        # A list that holds itself.
        (b"\x80\x02]q\x00h\x00a.", "contains itself"),
        (b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".", "nested"),
        (b"\x80\x02" + b"(" * 200_000 + b"t" * 200_000 + b".", "nested"),
        # A tuple far too deep to be hashed, as a key.
        (b"\x80\x02}" + b")" + b"\x85" * 200_000 + b"K\x01s.", "key of type tuple"),
        # Parameters of parameters, and typed tensors of typed tensors.
        (
            b"\x80\x02" + b"ctorch._utils\n_rebuild_parameter\n" * 50_000
            + b"N" + b"\x88}\x87R" * 50_000 + b".",
            "something else than a plain tensor",
        ),
        (
            b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\nq\x00ctorch\nTensor\nq\x010"
            + b"(h\x00h\x01" * 50_000 + b")" + b"}t" * 50_000 + b"R.",
            "a tensor rebuilt by torch._tensor._rebuild_from_type_v2",
        ),
        (b"\x80\x02r\xff\xff\xff\xffN.", "empty stack"),
        *((BOMBS[0] + function + b".", words) for function, words in FORMATTED),
        *((BOMBS[1] + function + b".", words) for function, words in FORMATTED),
        # Whole numbers of one hash, and one too long to be written in decimal.
        (
            b"\x80\x02}(" + b"".join(long_opcode(k * (2**61 - 1)) + b"N" for k in range(1, 60_000))
            + b"u.",
            "fits 64 bits",
        ),
        (
            b"\x80\x02ctorch\ndevice\nX\4\0\0\0cuda" + long_opcode(1 << 20_000) + b"\x86R.",
            "0 to 127",
        ),
        # Many keys of one name that is long, and many objects without a form.
        (
            b"\x80\x02}(X" + (1 << 20).to_bytes(4, "little") + b"x" * (1 << 20) + b"]("
            + b"ca\nb\nq\0" + b"h\0" * 1000 + b"eu.",
            "shares the same values",
        ),
        (b"\x80\x02](ca\nb\nq\0" + b"h\0" * 200_000 + b"e.", "more than 100,000"),
        # A long shape, named at very many places.
        (
            b"\x80\x02](ctorch\nSize\nq\0(" + b"K\1" * 100_000 + b"t\x85q\1R" + b"h\0h\1R" * 5000
            + b"e.",
            "shares the same values",
        ),
        (b"\x80\x02Nr\xff\xff\xff\xff.", None),
        # A long text, named at very many places.
        (
            b"\x80\x02](X" + (1 << 20).to_bytes(4, "little") + b"x" * (1 << 20) + b"q\x00"
            + b"h\x00" * 5000 + b"e.",
            "shares the same values",
        ),
    ],
)  # fmt: skip
def test_hostile_pickles_are_bounded(
    tmp_path: Path, run_alone: Any, pickled: bytes, words: str | None
) -> None:
    outcome = run_alone(archive(tmp_path / "x.pt", pickled), tmp_path / "out")
    assert outcome.code == (1 if words else 0), outcome.err
    assert (words or "") in outcome.err


@pytest.mark.parametrize(
    "values",
    [
        b"]" * (1 << 24),
        b"N)R" * (1 << 23),
        b"}" * (1 << 23),
        b"(" * (1 << 24),
        b"J\0\0\1\0" * (12 << 20),
        b"K\1\x85" * (1 << 23),
        b"X\1\0\0\0a" * (10 << 20),
        b"".join(b"Nr" + (k * 64).to_bytes(4, "little") for k in range(1, 5 << 20)),
    ],
    ids=["lists", "calls", "dicts", "marks", "ints", "tuples", "texts", "memo"],
)
def test_deflated_pickles_of_many_values(tmp_path: Path, run_alone: Any, values: bytes) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("x/data.pkl", b"\x80\x02](" + values + b"e.")
    outcome = run_alone(tmp_path / "x.pt", tmp_path / "out", limit_mb=512)
    assert outcome.code == 1
    assert "[limit]" in outcome.err


def test_text_that_one_character_makes_wide(tmp_path: Path, run_alone: Any) -> None:
    text = "\U0001f600".encode() + b"a" * (140 << 20)
    pickled = b"\x80\x02X" + len(text).to_bytes(4, "little") + text + b"."
    outcome = run_alone(archive(tmp_path / "x.pt", pickled), tmp_path / "out")
    assert outcome.code == 1
    assert "take more than" in outcome.err


def test_archives_that_swell(tmp_path: Path, run_alone: Any) -> None:
    """A deflated pickle of hundreds of megabytes, and a deflated storage of many gigabytes."""
    with (
        zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as zipped,
        zipped.open("x/data.pkl", "w") as opened,
    ):
        for _ in range(100):
            opened.write(b"N" * (1 << 20))
    outcome = run_alone(tmp_path / "x.pt", tmp_path / "out")
    assert outcome.code == 1
    assert "over the limit" in outcome.err
    path = archive(tmp_path / "y.pt", {"t": 1})
    again = repack(path, tmp_path / "z.pt")
    content = bytearray(again.read_bytes())
    assert run_alone(again, tmp_path / "out").code == 0
    start = content.rfind(b"elsewhere/data/0") - 46
    content[start + 24 : start + 28] = (0xFFFFFFF0).to_bytes(4, "little")
    (tmp_path / "w.pt").write_bytes(content)
    assert run_alone(tmp_path / "w.pt", tmp_path / "out2").code == 0
