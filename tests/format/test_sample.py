"""The sample checkpoint reads back as it was written."""

import numpy as np
import pytest
from format import samples
from format.forge import Forge, Patches
from format.samples import BASE, GRID, LONG, RANK, write_sample

from fpformat import (
    Box,
    BytesSource,
    PlanError,
    TensorEntry,
    open_checkpoint,
    plan_checkpoint,
    verify_checkpoint,
    write_checkpoint,
)
from fpformat.dtypes import by_name


def test_every_tensor_reads_back(tmp_path):
    with open_checkpoint(write_sample(tmp_path / "c")) as checkpoint:
        assert checkpoint.read("grid").tobytes() == GRID.tobytes()
        assert checkpoint.read("tied").tobytes() == GRID.tobytes()
        assert checkpoint.read("long").tobytes() == LONG.tobytes()
        assert checkpoint.read(("rng", 1)).tobytes() == RANK.tobytes()
        expected = np.array([[1, 3, 5], [2, 4, 6]], dtype="f4")
        assert checkpoint.read("view").tobytes() == expected.tobytes()
        assert checkpoint.read("~h/view").tobytes() == BASE.tobytes()
        assert checkpoint.read("empty").size == 0
        assert checkpoint.read_object("loader") == b"position 12"
        assert checkpoint.read_object("none") == b""
        tree = checkpoint.tree(1)
        assert tree is not None
        assert tree.node == samples.TREE
        assert [key[0] for key in tree.keys] == [entry.name for entry in samples.ENTRIES]
        assert checkpoint.tree_ranks() == [0]
        assert checkpoint.manifest.user == {"run": "sample"}


@pytest.mark.clause("EXT-10", "EXT-11", "SUM-2", "SUM-4", "SEG-5", "TRE-8", "OBJ-6")
def test_the_sample_is_sound(tmp_path):
    report = verify_checkpoint(write_sample(tmp_path / "c"))
    assert report.problems == ()
    assert report.tensor_count == 7


def test_the_forge_changes_nothing_when_nothing_is_patched(tmp_path):
    source = write_sample(tmp_path / "c")
    copy = Forge(source, {0: Patches(), 1: Patches()}).write(tmp_path / "d")
    for name in ("manifest.json", "seg-000000.fps", "seg-000001.fps"):
        assert (source / name).read_bytes() == (copy / name).read_bytes()


def test_the_same_plan_gives_the_same_bytes(tmp_path):
    first, second = write_sample(tmp_path / "c"), write_sample(tmp_path / "d")
    for name in ("manifest.json", "seg-000000.fps", "seg-000001.fps"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_arrays_have_type_and_shape(tmp_path):
    with open_checkpoint(write_sample(tmp_path / "c")) as checkpoint:
        array = checkpoint.read_array("grid", box=Box(start=(1, 1), shape=(2, 2)))
        assert (array.dtype, array.tolist()) == (GRID.dtype, GRID[1:3, 1:3].tolist())
        assert checkpoint.read_array("empty").shape == (0, 7)
        assert checkpoint.read_array(("rng", 1)).tolist() == RANK.tolist()


def test_a_type_that_numpy_has_not_is_named(tmp_path):
    entry = TensorEntry(name="half", dtype=by_name("BF16"), shape=(3,))
    sources = {(entry.key, None): BytesSource(bytes(6))}
    write_checkpoint(tmp_path / "c", plan_checkpoint([entry]), sources)
    with open_checkpoint(tmp_path / "c") as checkpoint:
        assert checkpoint.read("half").tobytes() == bytes(6)
        with pytest.raises(PlanError, match="BF16"):
            checkpoint.read_array("half")


@pytest.mark.parametrize("key", ["absent", ("grid", 0), ("rng", None)])
def test_an_unknown_tensor_is_named(tmp_path, key):
    with (
        open_checkpoint(write_sample(tmp_path / "c")) as checkpoint,
        pytest.raises(PlanError, match="no tensor"),
    ):
        checkpoint.read(key)


@pytest.mark.parametrize(
    "box",
    [
        Box(start=(0,), shape=(4,)),
        Box(start=(0, 0), shape=(5, 3)),
        Box(start=(4, 0), shape=(1, 3)),
        Box(start=(-1, 0), shape=(1, 3)),
    ],
)
def test_a_box_outside_the_shape_is_refused(tmp_path, box):
    with (
        open_checkpoint(write_sample(tmp_path / "c")) as checkpoint,
        pytest.raises(PlanError, match="not a box"),
    ):
        checkpoint.read("grid", box=box)


@pytest.mark.parametrize("name", ["grid", "tied", "view"])
def test_every_box_of_a_tensor_reads_its_elements(tmp_path, name):
    whole = {"grid": GRID, "tied": GRID, "view": BASE[1:7].reshape(3, 2).T}[name]
    with open_checkpoint(write_sample(tmp_path / "c")) as checkpoint:
        rows, columns = whole.shape
        for top in range(rows):
            for left in range(columns):
                for height in range(rows - top + 1):
                    for width in range(columns - left + 1):
                        box = Box(start=(top, left), shape=(height, width))
                        expected = whole[top : top + height, left : left + width].tobytes()
                        assert checkpoint.read(name, box=box).tobytes() == expected
