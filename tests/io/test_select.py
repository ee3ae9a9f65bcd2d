"""Choosing a part of a tree, and folds that do not recurse."""

import pytest

from fpformat.errors import PlanError
from fpformat.records.fold import Branch, fold, map_leaves
from fpformat.records.nodes import CounterNode, FlattenedNode, OrderedNode, TensorRef
from fpformat_io.read.select import node_at, select_nodes

TREE = {
    "a": {"b": 1, "bc": 2, 1: 3, False: 4},
    "ordered": OrderedNode({"x": 5, "y": 6}, {"_metadata": 7}),
    "counter": CounterNode({"x": 5, "y": 6}),
    "flat": FlattenedNode("C", None, {"inner": TensorRef(0)}),
    "list": [1, [2, 3]],
    "empty": {},
}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["a/b"], {"a": {"b": 1}}),
        (["a/~i1", "a/~b0"], {"a": {1: 3, False: 4}}),
        (["ordered/y"], {"ordered": OrderedNode({"y": 6}, {"_metadata": 7})}),
        (["counter/y"], {"counter": CounterNode({"y": 6})}),
        (["flat"], {"flat": TREE["flat"]}),
        (["list/~l1/~l0"], {"list": [None, [2, None]]}),
        (["empty"], {"empty": {}}),
        ("a/b", {"a": {"b": 1}}),
    ],
    ids=str,
)
def test_a_part(keys, expected):
    assert select_nodes(TREE, keys) == expected


@pytest.mark.parametrize("key", ["", "a/", "a/b/c", "b", "a/7", "/a", "list/9", "~", "a~1b"])
def test_a_name_that_is_not_there(key):
    with pytest.raises(PlanError, match="not in the checkpoint"):
        select_nodes(TREE, [key])


def test_leaves_are_mapped_and_the_rest_is_rebuilt():
    def change(node):
        return TensorRef(9) if isinstance(node, TensorRef) else node

    changed = map_leaves(TREE, change)
    assert changed["flat"].parts == {"inner": TensorRef(9)}
    assert {**changed, "flat": 0} == {**TREE, "flat": 0}


def test_a_fold_of_great_depth():
    def visit(value, path):
        if value == 0:
            return 0
        return Branch([(("index", 0), value - 1)], lambda results: results[0] + 1)

    assert fold(5000, visit) == 5000


@pytest.mark.parametrize("key", ["list/0", "list/~l0"])
def test_a_plain_number_stands_for_a_position(key):
    tree = {"list": ["a", "b"], "ints": {0: "c", "0": "d"}}
    assert select_nodes(tree, [key]) == {"list": ["a", None]}
    assert node_at(tree, key) == ("list/~l0", "a")


def test_a_plain_number_stands_for_every_key_of_that_number():
    tree = {"ints": {0: "c", "0": "d", 1: "e"}}
    assert select_nodes(tree, ["ints/0"]) == {"ints": {0: "c", "0": "d"}}
    assert select_nodes(tree, ["ints/~i0"]) == {"ints": {0: "c"}}
    with pytest.raises(PlanError, match="names 2 parts"):
        node_at(tree, "ints/0")
    with pytest.raises(PlanError, match="names no parts"):
        node_at(tree, "ints/7")
