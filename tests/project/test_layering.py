"""Imports follow the arrows: tools -> fpformat_io.torch -> fpformat_io -> fpformat -> numpy.

The source is read, not run, so an import inside a function counts as well.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A module may import only modules above it.
CORE_ORDER = (
    "clauses",
    "errors",
    "arguments",
    "limits",
    "dtypes",
    "checksum",
    "codec",
    "names",
    "model",
    "wire",
    "manifest",
    "index",
    "bulk",
    "alias_rules",
    "object_rules",
    "index_rules",
    "nodes",
    "cursor",
    "tree",
    "check",
    "layout",
    "plan",
    "ties",
    "assemble",
    "durability",
    "shield",
    "leftovers",
    "commit",
    "publish",
    "source",
    "segment",
    "trees",
    "reader",
    "digest",
    "verify",
    "writer",
    "__init__",
)


@dataclass(frozen=True)
class Layer:
    """A part of the source and what it may import beside the standard library and itself."""

    folder: str
    allowed: frozenset[str]
    recursive: bool = True


LAYERS = (
    Layer("fpformat", frozenset({"fpformat", "numpy", "crc32c", "zstandard"})),
    Layer(
        "fpformat_io",
        frozenset({"fpformat", "fpformat_io", "numpy", "numba", "llvmlite"}),
        recursive=False,
    ),
    Layer("fpformat_io/torch", frozenset({"fpformat", "fpformat_io", "numpy", "torch"})),
    Layer(
        "tools",
        frozenset(
            {"fpformat", "fpformat_io", "fpformat_tools", "numpy", "safetensors", "torch", "tqdm"}
        ),
    ),
    Layer("demo", frozenset({"demo", "fpformat", "fpformat_io", "torch"})),
)

# The places where an import may wait until it is needed, and for what.
LAZY = {
    "fpformat/checksum.py": {"crc32c"},  # its package reads the metadata of installed packages
    "fpformat/codec.py": {"zstandard"},
    "fpformat_io/engine.py": {"fpformat_io"},  # compiled kernels, which only a save needs
    "tools": {"torch", "tqdm", "fpformat_io", "fpformat_tools"},
}

# What the first save imports, and numba with it: nothing else may reach these on being imported.
NATIVE = {
    "fpformat_io/intrinsics.py",
    "fpformat_io/kernel_cache.py",
    "fpformat_io/kernels.py",
    "fpformat_io/pipeline.py",
    "fpformat_io/segment_writer.py",
    "fpformat_io/workers.py",
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
        for path in files_of(Layer("fpformat_io", frozenset(), recursive=False))
        for each in imports_of(path)
        if each.module.startswith("fpformat_io.torch")
    ]
    assert not wrong, "\n".join(wrong)


def test_zstandard_stands_behind_the_codec_alone():
    wrong = [
        f"{relative(path)}:{each.line}"
        for path in files_of(LAYERS[0])
        for each in imports_of(path)
        if each.module.split(".")[0] == "zstandard" and path.name != "codec.py"
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
                not each.lazy and not each.typing and ".".join(each.module.split(".")[:2]) in native
            )
        )
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_of_the_core_are_in_order():
    found = {path.stem for path in files_of(LAYERS[0])}
    assert found <= set(CORE_ORDER), f"give {found - set(CORE_ORDER)} a place in CORE_ORDER"
    wrong = []
    for path in files_of(LAYERS[0]):
        above = set(CORE_ORDER[: CORE_ORDER.index(path.stem)])
        for each in imports_of(path):
            parts = each.module.split(".")
            if parts[0] == "fpformat" and (len(parts) < 2 or parts[1] not in above):
                wrong.append(f"{relative(path)}:{each.line}: {each.module}")
    assert not wrong, "\n".join(wrong)


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
    return LAZY.get(name, set()) | LAZY.get(name.split("/")[0], set())


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


def test_every_package_is_in_the_distribution():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    line = next(each for each in text.splitlines() if each.startswith("packages = "))
    listed = set(ast.literal_eval(line.removeprefix("packages = ")))
    folders = {"fpformat": "fpformat", "fpformat_io": "fpformat_io", "tools": "fpformat_tools"}
    present = set()
    for folder, package in folders.items():
        for path in (ROOT / folder).glob("**/*.py"):
            below = path.parent.relative_to(ROOT / folder).parts
            present.add(".".join((package, *below)))
    assert present == listed
