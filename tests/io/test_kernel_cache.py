"""Compiled kernels are found again, and nothing about their cache can fail a save."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fpformat_io.native import cache as kernel_cache

ROOT = Path(__file__).resolve().parents[2]
SAVE = """
import logging, sys
logging.basicConfig(format="%(message)s", stream=sys.stdout)
from fpformat import BytesSource, TensorEntry, plan_checkpoint
from fpformat.dtypes import by_name
from fpformat_io.engine import write_checkpoint
entry = TensorEntry(name="t", dtype=by_name("U8"), shape=(5000,))
sources = {(entry.key, None): BytesSource(bytes(5000))}
write_checkpoint(sys.argv[1], plan_checkpoint([entry]), sources)
"""


def save(path, cache, umask=-1):
    """Save in a fresh interpreter; return what was logged."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", SAVE, str(path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        umask=umask,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("filled")
    assert save(folder / "c", folder / "cache") == []
    return folder / "cache" / "fpformat"


def copy(filled, folder):
    (folder / "cache" / "fpformat").mkdir(parents=True)
    for path in filled.iterdir():
        (folder / "cache" / "fpformat" / path.name).write_bytes(path.read_bytes())
    return folder / "cache"


def test_the_second_start_compiles_nothing(filled, tmp_path):
    before = {path.name: path.stat().st_mtime_ns for path in filled.iterdir()}
    assert len(before) > 10
    assert save(tmp_path / "c", filled.parent) == []
    assert {path.name: path.stat().st_mtime_ns for path in filled.iterdir()} == before


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "foreign"])
def test_damage_is_one_line_in_the_log_and_is_repaired(damage, filled, tmp_path):
    cache = copy(filled, tmp_path)
    for path in (cache / "fpformat").iterdir():
        stored = bytearray(path.read_bytes())
        stored[len(stored) // 2] ^= 1
        wrong = {"flip": stored, "cut": stored[:100], "empty": b"", "foreign": b"x" * 5000}
        path.write_bytes(wrong[damage])
    lines = save(tmp_path / "c", cache)
    assert len(lines) == 1
    assert "damaged" in lines[0]
    assert save(tmp_path / "d", cache) == []


def test_what_cannot_be_unpickled_is_one_line(filled, tmp_path):
    import hashlib

    cache = copy(filled, tmp_path)
    for path in (cache / "fpformat").iterdir():
        path.write_bytes(hashlib.sha256(b"no pickle").digest() + b"no pickle")
    (line,) = save(tmp_path / "c", cache)
    assert "cannot be used" in line


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "device", "large"])
def test_what_is_no_kernel_is_not_read_and_is_replaced(kind, filled, tmp_path):
    cache = copy(filled, tmp_path)
    folder = cache / "fpformat"
    os.mkfifo(tmp_path / "pipe")
    names = {path.name for path in folder.iterdir()}
    for path in folder.iterdir():
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "large":
            with path.open("wb") as file:
                file.truncate(100 << 20)
        else:
            path.symlink_to("/dev/zero" if kind == "device" else tmp_path / "pipe")
    (line,) = save(tmp_path / "c", cache)
    assert "cannot be used" in line
    assert ("is larger" if kind == "large" else "no regular file") in line
    assert save(tmp_path / "d", cache) == []
    assert {path.name for path in folder.iterdir()} == names
    assert all(path.is_file() and not path.is_symlink() for path in folder.iterdir())


def test_a_directory_in_the_way_leaves_nothing_behind(filled, tmp_path):
    cache = copy(filled, tmp_path)
    folder = cache / "fpformat"
    names = {path.name for path in folder.iterdir()}
    for path in folder.iterdir():
        path.unlink()
        path.mkdir()
    for start in ("c", "d"):
        lines = save(tmp_path / start, cache)
        assert all("cannot be" in line for line in lines)
    assert {path.name for path in folder.iterdir()} == names


def test_a_file_that_was_begun_is_removed_on_an_interrupt(tmp_path, monkeypatch):
    def interrupt(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        kernel_cache._store(tmp_path / "kernel-0.bin", b"x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_files_have_the_permissions_that_the_umask_leaves(mask, tmp_path):
    save(tmp_path / "c", tmp_path / "cache", umask=mask)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "cache" / "fpformat").iterdir()}
    assert modes == {0o666 & ~mask}


def test_without_a_directory_that_can_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    (line,) = save(tmp_path / "c", tmp_path / "file")
    assert "no directory" in line


def test_two_processes_fill_the_same_cache(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SAVE, str(tmp_path / name)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in ("a", "b")
    ]
    for process in running:
        assert process.communicate(timeout=100)[0] == ""
        assert process.returncode == 0


def test_a_start_with_a_full_cache_is_no_compilation(filled, tmp_path):
    """A figure for people: run with -s. What is asserted above is that nothing is compiled."""
    begin = time.perf_counter()
    save(tmp_path / "c", filled.parent)
    print(f"second start and one small save: {time.perf_counter() - begin:.2f} s")
