"""Sources that are no memory: read while other things are written, waited for, never mixed up."""

import threading

import numpy as np
import pytest
from engine_cases import MIB, SAME, config, content_of, contents, make
from hypothesis import given, settings
from hypothesis import strategies as st

from fpformat import write_checkpoint
from fpformat_io import engine
from fpformat_io.errors import EngineError


class LazyCopier:
    """Copies nothing before it is waited for, and then in the wrong order."""

    def __init__(self):
        self.begun = []
        self.waits = 0

    def memory(self, nbytes):
        return np.full(nbytes + 1, 0xEE, dtype="u1")[:nbytes]

    def wait(self):
        self.waits += 1
        while self.begun:
            target, content = self.begun.pop()
            target[:] = content


class LazySource:
    def __init__(self, content, copier):
        self._content = content
        self.copier = copier

    def read(self, *, offset, nbytes):
        return self._content[offset : offset + nbytes].data

    def read_into(self, target, *, offset):
        part = self._content[offset : offset + len(target)]
        if self.copier is None:
            target[:] = part
        else:
            self.copier.begun.append((target, part))


def lazily(sources, copier, *, every):
    """Return sources of which every so many-th copies by `copier`."""
    return {
        key: LazySource(np.frombuffer(source.buffer, "u1"), copier)
        if place % every == 0
        else source
        for place, (key, source) in enumerate(sources.items())
    }


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([1, 64, 4096, 70_001, 3 * MIB, 9 * MIB + 5]), max_size=7),
    every=st.integers(1, 3),
    segment_count=st.integers(1, 2),
)
def test_segments_are_those_of_the_plain_writer(tmp_path_factory, sizes, every, segment_count):
    folder = tmp_path_factory.mktemp("pulls")
    plan, sources = make(sizes, segment_count=segment_count)
    lazy = lazily(sources, LazyCopier(), every=every)
    engine.write_checkpoint(folder / "a", plan, lazy, config=config(), **SAME)
    write_checkpoint(folder / "b", plan, sources, **SAME)
    assert contents(folder / "a") == contents(folder / "b")


def test_a_source_without_a_copier_fills_at_once(tmp_path):
    plan, sources = make([9 * MIB, 100])
    filled = lazily(sources, None, every=1)
    engine.write_checkpoint(tmp_path / "a", plan, filled, config=config(), **SAME)
    write_checkpoint(tmp_path / "b", plan, sources, **SAME)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_one_wait_for_each_half_and_not_for_each_tensor(tmp_path):
    plan, sources = make([1000] * 400)
    copier = LazyCopier()
    lazy = lazily(sources, copier, every=1)
    engine.write_checkpoint(tmp_path / "c", plan, lazy, config=config())
    assert copier.waits == 1


def test_the_next_half_is_read_while_the_last_one_is_written(tmp_path, monkeypatch):
    """The first read of the second half lets the writes of the first go on; serial would hang."""
    from engine_faults import real_pwrite, replace_pwrite

    is_second_half_read = threading.Event()
    was_read_in_time = []
    plan, sources = make([12 * MIB], objects=False)
    (key, source), *_ = sources.items()
    settings_ = config(staging_nbytes=12 * MIB)  # two halves of 4 MiB

    class Watched(LazySource):
        def read_into(self, target, *, offset):
            super().read_into(target, offset=offset)
            if offset > 4 * MIB:
                is_second_half_read.set()

    def write(descriptor, address, nbytes, offset):
        was_read_in_time.append(is_second_half_read.wait(30))
        return real_pwrite(descriptor, address, nbytes, offset)

    replace_pwrite(monkeypatch, write)
    watched = {key: Watched(np.frombuffer(source.buffer, "u1"), None)}
    engine.write_checkpoint(tmp_path / "c", plan, watched, config=settings_)
    assert all(was_read_in_time)


class Failing(LazySource):
    def read_into(self, target, *, offset):
        super().read_into(target, offset=offset)
        if offset:
            raise RuntimeError("the device is gone")


def test_a_failing_source_ends_the_save_after_its_copies(tmp_path):
    plan, sources = make([12 * MIB])
    copier = LazyCopier()
    ((key, source),) = sources.items()
    failing = {key: Failing(np.frombuffer(source.buffer, "u1"), copier)}
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.write_checkpoint(tmp_path / "c", plan, failing, config=config())
    assert not copier.begun, "a copy is still on its way into memory that others will have"
    assert list(tmp_path.iterdir()) == []


class Broken(LazyCopier):
    def wait(self):
        self.begun.clear()
        raise RuntimeError("an asynchronous copy failed")


def test_a_failing_wait_ends_the_save(tmp_path):
    plan, sources = make([MIB])
    lazy = lazily(sources, Broken(), every=1)
    with pytest.raises((RuntimeError, EngineError), match="an asynchronous copy failed"):
        engine.write_checkpoint(tmp_path / "c", plan, lazy, config=config())
    assert list(tmp_path.iterdir()) == []


def test_content_differs_between_places():
    """The other tests rely on it: mixed-up sources must show."""
    assert not np.array_equal(content_of(0, 100), content_of(1, 100))
