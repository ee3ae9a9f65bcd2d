"""A format is a room and an entry in the table; nothing else knows of it."""

import ast
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fpformat_tools.formats
from fpformat.dtypes import by_name
from fpformat.records.nodes import TensorRef, walk_tensors
from fpformat_tools.formats import registry
from fpformat_tools.formats.interface import Format, Head, Kind, Output, Problems, Target, Written
from fpformat_tools.streams.gather import source_of
from fpformat_tools.streams.output import new_file
from fpformat_tools.streams.progress import Progress
from fpformat_tools.streams.ranges import HeldRange, Input
from fpformat_tools.streams.state import State, whole
from fpformat_tools.streams.trees import prune

_MAGIC = b"TOY1"


class Toy:
    """What the room of a format holds: bytes by name, as JSON with hexadecimal digits."""

    @staticmethod
    def detect(head: Head) -> bool:
        return head.start.startswith(_MAGIC)

    @staticmethod
    def read(path: Path, stack: ExitStack) -> State:
        source = stack.enter_context(Input(path))
        content = json.loads(source.read_at(offset=4, nbytes=source.nbytes - 4))
        held = [bytes.fromhex(text) for text in content.values()]
        return State(
            where=str(path),
            node={name: TensorRef(position) for position, name in enumerate(content)},
            tensors=[
                whole(base=position, dtype=by_name("U8"), shape=(len(each),))
                for position, each in enumerate(held)
            ],
            storages=[HeldRange(each) for each in held],
        )

    @staticmethod
    def fit(state: State) -> Problems:
        def refuse(node: Any) -> str | None:
            return None if isinstance(node, dict | TensorRef) else f"a {type(node).__name__}"

        state.node, problems = prune(state.node, refuse)
        return problems

    @staticmethod
    def write(state: State, target: Target, progress: Progress) -> Written:
        content = {}
        for path, ref in walk_tensors(state.node):
            tensor = state.tensors[ref.index]
            read = source_of(state, tensor).read(offset=0, nbytes=tensor.nbytes)
            content[str(path[-1][1])] = bytes(read).hex()
            progress(tensor.nbytes)
        with new_file(target.path, warn=state.warnings.append) as output:
            output.write(_MAGIC + json.dumps(content).encode())
        return Written(paths=(target.path,), nbytes=output.position)


TOY = Format(
    name="toy",
    help="a toy",
    kinds=(Kind(name="toy", title="a toy", detect=Toy.detect, is_lone=True, open=Toy.read),),
    output=Output(
        endings=(".toy",), help="one toy (.toy)", fit=Toy.fit, holds="bytes", write=Toy.write
    ),
)


@pytest.fixture(autouse=True)
def _with_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FORMATS", (*registry.FORMATS, TOY))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tensors = {"a": torch.arange(5, dtype=torch.uint8), "b": torch.zeros(2, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def test_into_a_new_format_and_out_of_it(tmp_path: Path, source: Path, convert: Any) -> None:
    done = convert(source, tmp_path / "x.toy").out
    assert "2 tensors, 7 B from safetensors to toy" in done
    assert (tmp_path / "x.toy").read_bytes() == b'TOY1{"a": "0001020304", "b": "0000"}'
    report = convert(tmp_path / "x.toy", tmp_path / "y.safetensors", "--json").json
    assert (report["source_format"], report["target_format"]) == ("toy", "safetensors")
    assert (tmp_path / "y.safetensors").read_bytes() == source.read_bytes()
    assert "from a toy to fpformat" in convert(tmp_path / "x.toy", tmp_path / "ckpt").out


def test_a_directory_with_one_file_of_it(tmp_path: Path, source: Path, convert: Any) -> None:
    (tmp_path / "folder").mkdir()
    convert(source, tmp_path / "folder" / "anything", "--to", "toy")
    convert(tmp_path / "folder", tmp_path / "y.pt")
    assert torch.load(tmp_path / "y.pt", weights_only=True)["a"].tolist() == [0, 1, 2, 3, 4]


def test_what_does_not_fit_is_refused_or_left_out(
    tmp_path: Path, convert: Any, refuse: Any
) -> None:
    torch.save({"a": torch.ones(2, dtype=torch.uint8), "step": 3}, tmp_path / "m.pt")
    text = refuse(tmp_path / "m.pt", tmp_path / "x.toy")
    assert "toy holds bytes; 1 other value is in the way; --key selects" in text
    assert "step: a int" in text
    convert(tmp_path / "m.pt", tmp_path / "x.toy", "--skip-unsupported")
    assert (tmp_path / "x.toy").read_bytes() == b'TOY1{"a": "0101"}'


def test_the_command_knows_it(tmp_path: Path, source: Path, run: Any) -> None:
    assert "toy          one toy (.toy)" in run("fpconvert", "--help").out
    assert "give --to (fpformat, safetensors, torch, toy)" in run("fpconvert", source, "x.y").err
    assert run("fpconvert", source, tmp_path / "x.toy", "--max-shard-size=1GB").code == 2


def test_one_that_is_only_read_is_no_output(
    tmp_path: Path, source: Path, run: Any, convert: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "x.toy")
    read = Format(name="toy", help="a toy", kinds=TOY.kinds, output=None)
    monkeypatch.setattr(registry, "FORMATS", (*registry.FORMATS[:-1], read))
    convert(tmp_path / "x.toy", tmp_path / "ckpt")
    assert run("fpconvert", source, tmp_path / "y.toy").code == 2
    assert run("fpconvert", source, tmp_path / "y.toy", "--to=toy").code == 2


def test_names_are_unique() -> None:
    names = [kind.name for kind in registry.kinds()]
    endings = [ending for output in registry.outputs().values() for ending in output.endings]
    assert len(set(names)) == len(names)
    assert len(set(endings)) == len(endings)
    assert len({each.name for each in registry.FORMATS}) == len(registry.FORMATS)


def _imported(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


def test_no_format_imports_another_and_only_the_table_imports_formats() -> None:
    room = "fpformat_tools.formats"
    formats = Path(fpformat_tools.formats.__file__).parent
    folders = [path for path in formats.iterdir() if (path / "format.py").exists()]
    wrong = [
        f"{path}: {module}"
        for path in formats.parent.glob("**/*.py")
        if path != formats / "registry.py"
        for module in _imported(path)
        for folder in folders
        if f"{module}.".startswith(f"{room}.{folder.name}.") and folder not in path.parents
    ]
    assert len(folders) >= 3
    assert not wrong, "\n".join(wrong)
