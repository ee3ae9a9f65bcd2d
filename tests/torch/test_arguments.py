"""Every public call refuses a wrong argument at once, by its name, before anything is touched."""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch

import fpformat
import fpformat_io.torch as face
from fpformat import BytesSource, FileSource, FpformatError, PlanError, TensorEntry
from fpformat.dtypes import by_name
from fpformat_io import engine

ENTRY = TensorEntry(name="w", dtype=by_name("F32"), shape=(3,))
PLAN = fpformat.plan_checkpoint([ENTRY])
SOURCES = {(ENTRY.key, None): BytesSource(np.zeros(3, dtype="<f4"))}


class BytesPath:
    """A path-like object that stands for bytes."""

    def __fspath__(self) -> bytes:
        return b"c"


class NoPath:
    """A path-like object that stands for nothing."""

    def __fspath__(self) -> None:
        return None


PATHS = [None, 5, 1.5, True, b"c", ["c"], BytesPath(), NoPath(), "", "a\0b", "a\ud800b"]
INTS = [1.0, "1", b"1", [], np.float32(1), -1]
FLAGS = [None, 1, 0, "yes", []]
KEYS = [None, 5, b"w", ("w",), ("w", "x"), (1, None), ["w", None], ("w", None, None)]
OBJECTS = [5, "x", b"x", [], object()]
BOXES = [5, "x", ((0,), (1,)), fpformat.Box(start=None, shape=(1,))]
BOXES += [fpformat.Box(start=(0.5,), shape=(1,)), fpformat.Box(start=(0,), shape=("1",))]
READ_ONLY = np.zeros(12, dtype="u1")
READ_ONLY.flags.writeable = False
BUFFERS = [None, 5, "x", [1], bytes(12), READ_ONLY, np.zeros(24, dtype="u1")[::2]]


@dataclass(frozen=True)
class Row:
    """One argument of one call, and values of a wrong kind for it."""

    call: Callable[..., Any]
    argument: str
    values: list[Any]
    others: dict[str, Any]
    on_checkpoint: bool = False

    @property
    def title(self) -> str:
        return f"{self.call.__module__}.{self.call.__qualname__}-{self.argument}"


def row(call: Callable[..., Any], argument: str, values: list[Any], **others: Any) -> Row:
    return Row(call, argument, values, others)


def method(call: Callable[..., Any], argument: str, values: list[Any], **others: Any) -> Row:
    return Row(call, argument, values, others, on_checkpoint=True)


WRITE = {"plan": PLAN, "sources": SOURCES, "path": "new"}
ROWS = [
    row(face.save, "path", PATHS, state={"w": torch.ones(3)}),
    row(face.save, "step", INTS, state={}, path="new"),
    row(face.save, "metadata", [5, "x", b"x", [], {1: "a"}, {"a": 1}], state={}, path="new"),
    row(face.load, "path", PATHS),
    row(face.load, "device", [None, 3.5, b"cpu", "nonsense"], path="good"),
    row(face.load, "keys", [5, 1.5, b"w", [1], [None], torch.tensor(1)], path="good"),
    row(face.load, "rank", [None, True, *INTS], path="good"),
    row(face.load_into, "path", PATHS, template={"w": torch.ones(3)}),
    row(face.load_into, "template", [torch.nn.Linear(1, 1)], path="good"),
    row(face.load_into, "strict", FLAGS, path="good", template={"w": torch.ones(3)}),
    row(face.load_into, "key", [5, b"w", []], path="good", template={"w": torch.ones(3)}),
    row(face.load_into, "rank", [None, *INTS], path="good", template={"w": torch.ones(3)}),
    row(face.latest, "root", PATHS),
    row(face.latest, "verify", [None, True, "", "quick", b"full", []], root="."),
    row(face.Checkpointer, "root", PATHS),
    row(face.Checkpointer, "keep", [0, True, *INTS], root="new"),
    row(face.Checkpointer, "resume_from", [True, 2**53, *INTS], root="new"),
    row(face.register_subclass, "cls", [None, 5, "x", torch.ones(1)]),
    row(face.register_subclass, "", [int, torch.Tensor]),
    row(fpformat.open_checkpoint, "path", PATHS),
    row(fpformat.open_checkpoint, "volumes", [None, 5, "v", b"v", [b"v"], [None]], path="good"),
    row(fpformat.open_checkpoint, "follow_symlinks", FLAGS, path="good"),
    row(fpformat.open_checkpoint, "view_limit_nbytes", [None, *INTS], path="good"),
    row(fpformat.Checkpoint, "path", PATHS),
    row(fpformat.verify_checkpoint, "path", PATHS),
    row(fpformat.verify_checkpoint, "volumes", [None, 5, "v", [b"v"]], path="good"),
    row(fpformat.verify_checkpoint, "follow_symlinks", FLAGS, path="good"),
    row(fpformat.verify_checkpoint, "progress", [5, "x"], path="good"),
    row(fpformat.write_checkpoint, "plan", [None, *OBJECTS], sources=SOURCES, path="new"),
    row(fpformat.write_checkpoint, "sources", [None, *OBJECTS], plan=PLAN, path="new"),
    row(fpformat.write_checkpoint, "path", PATHS, plan=PLAN, sources=SOURCES),
    row(fpformat.write_checkpoint, "save_id", [5, "x" * 16, b"short", bytearray(16)], **WRITE),
    row(fpformat.write_checkpoint, "created_us", [*INTS, 2**53], **WRITE),
    row(engine.write_checkpoint, "path", PATHS, plan=PLAN, sources=SOURCES),
    row(engine.write_checkpoint, "plan", [None, *OBJECTS], sources=SOURCES, path="new"),
    row(engine.write_checkpoint, "sources", [None, *OBJECTS], plan=PLAN, path="new"),
    row(engine.write_checkpoint, "save_id", [5, "x" * 16, b"short", bytearray(16)], **WRITE),
    row(engine.write_checkpoint, "created_us", [*INTS, 2**53], **WRITE),
    row(engine.write_checkpoint, "config", OBJECTS, **WRITE),
    row(engine.write_checkpoint, "control", OBJECTS, **WRITE),
    row(fpformat.plan_checkpoint, "entries", [None, 5, "x", ENTRY, [5], {}]),
    row(fpformat.plan_checkpoint, "objects", [None, 5, "x", [ENTRY]], entries=[ENTRY]),
    row(fpformat.plan_checkpoint, "segment_count", [None, 0, *INTS], entries=[ENTRY]),
    row(fpformat.plan_checkpoint, "world_size", [None, 0, *INTS], entries=[ENTRY]),
    row(fpformat.plan_checkpoint, "step", INTS, entries=[ENTRY]),
    row(fpformat.plan_checkpoint, "user", [5, "x", [1]], entries=[ENTRY]),
    row(fpformat.plan_checkpoint, "geometry", [5, "x", (1, 2, 3)], entries=[ENTRY]),
    row(BytesSource, "buffer", [None, 5, "x", [1], np.zeros(8)[::2]]),
    row(FileSource, "descriptor", [None, "x", -1], offset=0, where="x"),
    row(FileSource, "offset", [None, *INTS], descriptor=0, where="x"),
    row(FileSource, "where", [None, 5, b"x"], descriptor=0, offset=0),
    row(fpformat.state_digest, "checkpoint", [None, *OBJECTS]),
    method(fpformat.state_digest, "view_limit_nbytes", [None, *INTS]),
    method(fpformat.state_digest, "progress", [5, "x"]),
    method(fpformat.Checkpoint.entry, "key", KEYS),
    method(fpformat.Checkpoint.read, "key", KEYS),
    method(fpformat.Checkpoint.read, "box", BOXES, key="w"),
    method(fpformat.Checkpoint.read_into, "key", KEYS, out=bytearray(12)),
    method(fpformat.Checkpoint.read_into, "box", BOXES, key="w", out=bytearray(12)),
    method(fpformat.Checkpoint.read_into, "out", BUFFERS, key="w"),
    method(fpformat.Checkpoint.read_array, "key", KEYS),
    method(fpformat.Checkpoint.read_array, "box", BOXES, key="w"),
    method(fpformat.Checkpoint.read_object, "name", [None, 5, b"tree", ["tree"]]),
    method(fpformat.Checkpoint.read_object, "scope", INTS, name="tree"),
    method(fpformat.Checkpoint.tree, "rank", [None, True, *INTS]),
]


def tree_of(folder: Any) -> dict[str, int]:
    """Return every path below a folder with the time of its last change."""
    return {
        os.path.join(where, name): os.lstat(os.path.join(where, name)).st_mtime_ns
        for where, names, others in os.walk(folder)
        for name in (*names, *others)
    }


@pytest.fixture
def place(tmp_path, monkeypatch):
    face.save({"w": torch.arange(3.0)}, tmp_path / "good")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("each", ROWS, ids=lambda each: each.title)
def test_a_wrong_argument_is_one_clear_error(place, each):
    before = tree_of(place)
    with fpformat.open_checkpoint("good") as checkpoint:
        first = (checkpoint,) if each.on_checkpoint else ()
        descriptors = os.listdir("/proc/self/fd")
        for value in each.values:
            with pytest.raises(FpformatError) as caught:
                each.call(*first, **{each.argument or "cls": value}, **each.others)
            assert type(caught.value) is PlanError, repr(value)
            assert caught.value.error_class == "invalid"
            assert each.argument in str(caught.value), repr(value)
            assert len(str(caught.value)) < 400
        assert os.listdir("/proc/self/fd") == descriptors
    assert tree_of(place) == before


@pytest.mark.parametrize("value", PATHS[:8], ids=lambda value: type(value).__name__)
def test_a_wrong_path_is_described_by_type_and_what_was_expected(place, value):
    for each in ROWS:
        if each.values is not PATHS:
            continue
        with pytest.raises(PlanError) as caught:
            each.call(**{each.argument: value}, **each.others)
        text = str(caught.value)
        assert text.startswith(each.argument)
        assert f" is of type {type(value).__name__}, " in text
        assert text.endswith("expected a str or an os.PathLike[str]")


def test_a_template_is_not_changed_by_a_wrong_argument(place):
    template = {"w": torch.zeros(3)}
    with pytest.raises(PlanError, match="strict=1 is of type int"):
        face.load_into("good", template, strict=1)
    assert not template["w"].any()


def public_calls() -> set[str]:
    """Return the public functions and the classes that a caller makes from something else."""
    made_by_the_library = {"SaveHandle", "DType"}
    found = set()
    for module in (fpformat, face):
        for name in module.__all__:
            value = getattr(module, name)
            is_error = inspect.isclass(value) and issubclass(value, Exception)
            if not is_error and not is_dataclass(value) and name not in made_by_the_library:
                found.add(name)
    return found


def test_the_table_has_every_public_call():
    listed = {each.call.__qualname__ for each in ROWS}
    assert public_calls() <= listed
    methods = {
        f"Checkpoint.{name}"
        for name, value in vars(fpformat.Checkpoint).items()
        if inspect.isfunction(value)
        and not name.startswith("_")
        and len(inspect.signature(value).parameters) > 1
    }
    assert methods <= listed


def test_every_argument_is_in_the_table():
    listed = {(each.call, each.argument) for each in ROWS}
    # What may be anything, and what is handed on to `open_checkpoint`.
    open_ones = {
        (face.save, "state"),
        *((fpformat.Checkpoint, name) for name in ("volumes", "follow_symlinks")),
        (fpformat.Checkpoint, "view_limit_nbytes"),
    }
    missing = {
        (call, name)
        for call in {each.call for each in ROWS}
        for name in inspect.signature(call).parameters
        if name != "self" and (call, name) not in listed | open_ones
    }
    assert not missing
