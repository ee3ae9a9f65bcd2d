"""Trees as stored: what they refer to, what they are called, which ranks they serve."""

import dataclasses

import numpy as np
import pytest

from fpformat import (
    Box,
    BytesSource,
    FormatError,
    Manifest,
    ObjectEntry,
    PlanError,
    SavePlan,
    SegmentPlan,
    TensorEntry,
    View,
    open_checkpoint,
    verify_checkpoint,
    write_checkpoint,
)
from fpformat.dtypes import by_name
from fpformat.records.layout import plan_checkpoint
from fpformat.records.manifest import check_editor
from fpformat.records.model import Features
from fpformat.records.nodes import ArrayRef, FlattenedNode, OrderedNode, TensorRef
from fpformat.records.tree import dump_tree

F32 = by_name("F32")
VALUES = np.arange(4, dtype="<f4")


def write(path, tree, *entries, **options):
    objects = [ObjectEntry(name="tree", kind=1, payload=dump_tree(tree))]
    sources = {(entry.key, None): BytesSource(VALUES) for entry in entries}
    write_checkpoint(path, plan_checkpoint(entries, objects, **options), sources)
    return path


def tensor(name, **options):
    return TensorEntry(name=name, dtype=F32, shape=(4,), **options)


def problems(path):
    return [problem.clause for problem in verify_checkpoint(path).problems]


@pytest.mark.clause("TRE-6")
def test_a_reference_past_the_table(tmp_path):
    path = write(tmp_path / "c", {"a": TensorRef(0), "b": TensorRef(1)}, tensor("a"))
    assert problems(path) == ["TRE-6"]
    with open_checkpoint(path) as checkpoint, pytest.raises(FormatError, match="TRE-6"):
        checkpoint.tree()


@pytest.mark.clause("TRE-6")
def test_a_reference_to_a_hidden_base(tmp_path):
    path = write(tmp_path / "c", {"a": TensorRef(0)}, tensor("~h/a", hidden=True))
    assert problems(path) == ["TRE-6"]


@pytest.mark.clause("NAM-3")
def test_a_tensor_by_another_name(tmp_path):
    path = write(tmp_path / "c", {"b": TensorRef(0)}, tensor("a"))
    assert problems(path) == ["NAM-3"]


@pytest.mark.clause("TRE-8")
def test_a_tensor_that_no_tree_reaches(tmp_path):
    path = write(tmp_path / "c", {"a": TensorRef(0)}, tensor("a"), tensor("b"))
    assert problems(path) == ["TRE-8"]


@pytest.mark.clause("TRE-8", "NAM-3", "TRE-6")
def test_every_reference_is_right(tmp_path):
    path = write(tmp_path / "c", {"a": TensorRef(0), "b": TensorRef(1)}, tensor("a"), tensor("b"))
    assert problems(path) == []


def test_without_a_tree(tmp_path):
    sources = {(("a", None), None): BytesSource(VALUES)}
    write_checkpoint(tmp_path / "c", plan_checkpoint([tensor("a")]), sources)
    with open_checkpoint(tmp_path / "c") as checkpoint:
        assert checkpoint.tree() is None
        assert checkpoint.keys() == [("a", None)]


@pytest.mark.clause("OBJ-5", "OBJ-6")
def test_ranks_with_trees_of_their_own(tmp_path):
    def segment(scope, *ranks):
        payload = dump_tree({"rank": scope})
        tree = ObjectEntry(name="tree", kind=1, payload=payload, scope=scope, ranks=ranks)
        return SegmentPlan(entries=(), parts=(), objects=(tree,))

    plan = SavePlan(segments=(segment(0, (0, 1), (2, 4)), segment(1, (1, 2))), world_size=4)
    write_checkpoint(tmp_path / "c", plan, {})
    with open_checkpoint(tmp_path / "c") as checkpoint:
        trees = [checkpoint.tree(rank) for rank in range(4)]
        assert [tree.node["rank"] for tree in trees if tree] == [0, 1, 0, 0]
        assert checkpoint.tree_ranks() == [0, 1]
        with pytest.raises(PlanError, match="world size 4"):
            checkpoint.tree(4)


@pytest.mark.clause("OBJ-7")
def test_one_object_in_two_segments(tmp_path):
    entry = ObjectEntry(name="x", kind=2, payload=b"1")
    segment = SegmentPlan(entries=(), parts=(), objects=(entry,))
    with pytest.raises(PlanError, match="OBJ-7"):
        write_checkpoint(tmp_path / "c", SavePlan(segments=(segment, segment)), {})
    assert not list(tmp_path.iterdir())


@pytest.mark.clause("ALI-6")
def test_a_view_above_the_limit_is_not_materialised(tmp_path):
    view = View(target=("a", None), strides=(0, 0), offset=1)
    entries = [
        tensor("a"),
        TensorEntry(name="v", dtype=F32, shape=(1 << 20, 1 << 20), alias=view),
    ]
    write_checkpoint(
        tmp_path / "c", plan_checkpoint(entries), {(("a", None), None): BytesSource(VALUES)}
    )
    with open_checkpoint(tmp_path / "c") as checkpoint, pytest.raises(FormatError, match="ALI-6"):
        checkpoint.read("v")
    with open_checkpoint(tmp_path / "c", view_limit_nbytes=64) as checkpoint:
        box = Box(start=(7, 7), shape=(2, 3))
        assert checkpoint.read("v", box=box).tobytes() == np.ones(6, dtype="<f4").tobytes()


@pytest.mark.clause("NAM-3")
def test_a_path_whose_name_is_too_long(tmp_path):
    path = write(tmp_path / "c", {"x" * 70_000: TensorRef(0)}, tensor("a"))
    assert problems(path) == ["NAM-3"]


@pytest.mark.clause("TRE-9")
def test_an_array_of_a_type_that_numpy_has_not(tmp_path):
    entry = TensorEntry(name="a", dtype=by_name("F8_E4M3"), shape=(4,))
    sources = {(entry.key, None): BytesSource(bytes(4))}
    tree = ObjectEntry(name="tree", kind=1, payload=dump_tree({"a": ArrayRef(0)}))
    write_checkpoint(tmp_path / "c", plan_checkpoint([entry], [tree]), sources)
    assert problems(tmp_path / "c") == ["TRE-9"]


@pytest.mark.clause("FEA-2")
def test_an_editor_needs_to_know_what_readers_may_ignore():
    manifest = Manifest(save_id=bytes(16), segments=(), created_us=0)
    check_editor(manifest, "c")
    other = dataclasses.replace(manifest, features=Features(ro_compat=("x-kept",)))
    with pytest.raises(FormatError, match=r"x-kept.*FEA-2"):
        check_editor(other, "c")


def test_a_view_of_64_dimensions_and_one_that_repeats(tmp_path):
    deep = View(target=("a", None), strides=(1,) * 64, offset=1)
    entries = [
        tensor("a"),
        TensorEntry(name="d", dtype=F32, shape=(2,) + (1,) * 62 + (2,), alias=deep),
    ]
    write_checkpoint(
        tmp_path / "c", plan_checkpoint(entries), {(("a", None), None): BytesSource(VALUES)}
    )
    with open_checkpoint(tmp_path / "c") as checkpoint:
        assert checkpoint.read_array("d").reshape(-1).tolist() == [1, 2, 2, 3]


@pytest.mark.parametrize(
    "node",
    [OrderedNode({}, {5: 1}), FlattenedNode("cls", None, {5: 1})],  # type: ignore[dict-item]
)
@pytest.mark.clause("TRE-5", "TRE-10")
def test_names_of_attributes_and_parts_are_strings(node):
    with pytest.raises(PlanError, match="no str"):
        dump_tree(node)


@pytest.mark.clause("TRE-10")
def test_a_tree_that_cannot_be_read_is_not_written(tmp_path):
    tree = ObjectEntry(name="tree", kind=1, payload=b"\xff")
    with pytest.raises(PlanError, match="TRE-1"):
        write_checkpoint(tmp_path / "c", plan_checkpoint([], [tree]), {})
    assert not list(tmp_path.iterdir())
