"""Imports follow the arrows: tools -> fpformat_io.torch -> fpformat_io -> fpformat -> numpy.

The source is read, not run, so an import inside a function counts as well.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from setuptools import find_packages
from setuptools.config.pyprojecttoml import load_file

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Layer:
    """A part of the source and what it may import beside the standard library and itself."""

    folder: str
    allowed: frozenset[str]
    recursive: bool = True


LAYERS = (
    Layer("fpformat", frozenset({"fpformat", "numpy", "crc32c", "zstandard"})),
    Layer("fpformat_io", frozenset({"fpformat", "fpformat_io", "numpy"}), recursive=False),
    Layer(
        "fpformat_io/native", frozenset({"fpformat", "fpformat_io", "numpy", "numba", "llvmlite"})
    ),
    *(
        Layer(f"fpformat_io/{room}", frozenset({"fpformat", "fpformat_io", "numpy"}))
        for room in ("write", "read", "session")
    ),
    Layer("fpformat_io/torch", frozenset({"fpformat", "fpformat_io", "numpy", "torch"})),
    Layer("tools/fpspec", frozenset({"fpformat", "fpspec", "numpy"})),
    Layer(
        "tools/fpformat_tools",
        frozenset(
            {"fpformat", "fpformat_io", "fpformat_tools", "numpy", "safetensors", "torch", "tqdm"}
        ),
    ),
    Layer("demo", frozenset({"demo", "fpformat", "fpformat_io", "torch"})),
)

# The places where an import may wait until it is needed, and for what.
LAZY = {
    # Its package reads the metadata of installed packages.
    "fpformat/records/checksum.py": {"crc32c"},
    "fpformat/records/wire.py": {"zstandard"},
    "fpformat_io/engine.py": {"fpformat_io"},  # compiled kernels, which only a save needs
    "tools/fpspec/trace.py": {"fpspec"},
    "tools/fpformat_tools": {"torch", "tqdm", "fpformat_io", "fpformat_tools"},
}

# What the first save imports, and numba with it: nothing else may reach these on being imported.
NATIVE = {
    "fpformat_io/native/intrinsics.py",
    "fpformat_io/native/cache.py",
    "fpformat_io/native/kernels.py",
    "fpformat_io/write/pipeline.py",
    "fpformat_io/write/segment.py",
    "fpformat_io/write/workers.py",
}


@dataclass(frozen=True)
class Import:
    """One imported module, absolute, and where; `lazy` in a function, `typing` never run."""

    module: str
    line: int
    lazy: bool
    typing: bool


def imports_of(path: Path) -> Iterator[Import]:
    """Yield every import of a file, also those inside functions and by name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lazy = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(outer)
    }
    typing = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.If) and ast.unparse(outer.test) == "TYPE_CHECKING"
        for inner in outer.body
    }
    for node in ast.walk(tree):
        for module in _modules(node, path):
            yield Import(module, node.lineno, id(node) in lazy, id(node) in typing)


def _modules(node: ast.AST, path: Path) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{path}:{node.lineno}: relative import"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and _called(node) in {"import_module", "__import__"}:
        assert isinstance(node.args[0], ast.Constant), f"{path}:{node.lineno}: computed import"
        return [str(node.args[0].value)]
    return []


def _called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def files_of(layer: Layer) -> list[Path]:
    pattern = "**/*.py" if layer.recursive else "*.py"
    return sorted((ROOT / layer.folder).glob(pattern))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_every_layer_has_files():
    assert all(files_of(layer) for layer in LAYERS)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.folder)
def test_a_layer_imports_only_what_it_may(layer):
    allowed = layer.allowed | sys.stdlib_module_names
    wrong = [
        f"{relative(path)}:{each.line}: {each.module}"
        for path in files_of(layer)
        for each in imports_of(path)
        if each.module.split(".")[0] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_torch_package_of_fpformat_io_is_built_on_torch():
    wrong = [
        f"{relative(path)}:{each.line}: {each.module}"
        for path in (ROOT / "fpformat_io").glob("**/*.py")
        if path.parent.name != "torch"
        for each in imports_of(path)
        if each.module.startswith("fpformat_io.torch")
    ]
    assert not wrong, "\n".join(wrong)


def test_zstandard_is_imported_where_pieces_are_unpacked_alone():
    wrong = [
        f"{relative(path)}:{each.line}"
        for path in files_of(LAYERS[0])
        for each in imports_of(path)
        if each.module.split(".")[0] == "zstandard" and path.name != "wire.py"
    ]
    assert not wrong, "\n".join(wrong)


def test_numba_waits_for_the_first_save():
    native = {path.removesuffix(".py").replace("/", ".") for path in NATIVE}
    wrong = [
        f"{relative(path)}:{each.line}: {each.module}"
        for layer in LAYERS
        for path in files_of(layer)
        for each in imports_of(path)
        if relative(path) not in NATIVE
        and (
            each.module.split(".")[0] in {"numba", "llvmlite"}
            or (
                not each.lazy and not each.typing and ".".join(each.module.split(".")[:3]) in native
            )
        )
    ]
    assert not wrong, "\n".join(wrong)


def rooms() -> list[str]:
    """Return the rooms that CONTRIBUTING lists, in the order in which they may import."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = text.partition("<!-- rooms -->")[2].split("```")[1]
    return [line.split()[0].rstrip("/") for line in block.splitlines()[1:]]


def room_of(path: str) -> str:
    """Return the innermost room in which a module lies."""
    return max((room for room in rooms() if path.startswith(f"{room}/")), key=len)


def modules() -> dict[str, str]:
    """Return the path of every module by its dotted name."""
    found = {}
    for root in sorted({room.split("/")[0] for room in rooms()}):
        for path in (ROOT / root).glob("**/*.py"):
            dotted = relative(path).removeprefix("tools/").removesuffix(".py").replace("/", ".")
            found[dotted.removesuffix(".__init__")] = relative(path)
    return found


def targets_of(path: str, known: dict[str, str]) -> Iterator[tuple[Import, str]]:
    """Yield every import of another module of the project that runs when `path` is imported."""
    for each in imports_of(ROOT / path):
        name = each.module if each.module in known else each.module.rpartition(".")[0]
        if name in known and known[name] != path and not each.lazy and not each.typing:
            yield each, known[name]


# What gathers the public names stands above all that it gathers.
FACES = {"fpformat/__init__.py"}


def test_the_list_of_rooms_is_short_and_whole():
    assert 10 < len(rooms()) <= 25
    assert [room for room in rooms() if not list((ROOT / room).glob("*.py"))] == []
    beside = {path.parent for path in map(Path, modules().values())}
    covered = {folder for folder in beside if str(folder) in rooms()}
    # Formats have a room each below the one that is listed.
    formats = Path("tools/fpformat_tools/formats")
    assert {folder for folder in beside - covered if folder.parent != formats} == set()


def test_a_room_imports_only_rooms_above_it():
    known, order = modules(), rooms()
    wrong = [
        f"{path}:{each.line}: {each.module}"
        for path in known.values()
        if path not in FACES
        for each, target in targets_of(path, known)
        if target not in FACES and order.index(room_of(target)) > order.index(room_of(path))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_by_way_of_others():
    known = modules()
    graph = {path: {target for _, target in targets_of(path, known)} for path in known.values()}
    tuple(TopologicalSorter(graph).static_order())


def test_imports_wait_only_at_the_named_places():
    wrong = [
        f"{relative(path)}:{each.line}: {each.module}"
        for layer in LAYERS
        for path in files_of(layer)
        for each in imports_of(path)
        if each.lazy and each.module.split(".")[0] not in _may_wait(path)
    ]
    assert not wrong, "\n".join(wrong)


def _may_wait(path: Path) -> set[str]:
    name = relative(path)
    return {each for place in LAZY if name.startswith(place) for each in LAZY[place]}


def test_a_conformance_test_imports_no_implementation():
    folder = ROOT / "tests" / "conformance"
    wrong = [
        f"{relative(path)}:{each.line}: {each.module}"
        for path in folder.glob("**/*.py")
        if not path.name.startswith("adapter_")
        for each in imports_of(path)
        if each.module.split(".")[0] in {"fpformat", "fpformat_io", "fpformat_tools"}
    ]
    assert not wrong, "\n".join(wrong)


def test_every_package_is_in_the_distribution_and_nothing_else():
    settings = load_file(ROOT / "pyproject.toml")
    finder = settings["tool"]["setuptools"]["packages"]["find"]
    found = {
        package
        for where in finder["where"]
        for package in find_packages(str(ROOT / where), include=finder["include"])
    }
    present = {
        name.rpartition(".")[0] if not path.endswith("__init__.py") else name
        for name, path in modules().items()
        if not path.startswith(("demo/", "tools/fpspec/"))
    }
    assert found == present
