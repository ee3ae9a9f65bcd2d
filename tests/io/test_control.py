"""A save tells when its sources were read, and stops when its caller wants it to."""

import numpy as np
import pytest

from fpformat_io.control import SaveControl
from fpformat_io.engine import write_checkpoint
from fpformat_io.errors import CancelledError
from tests.engine_cases import MIB, config, content_of, make


class _Watched:
    """A source that is no memory, and tells when it is read."""

    def __init__(self, content, on_read):
        self._content = content
        self._on_read = on_read

    def read(self, *, offset, nbytes):
        self._on_read()
        return self._content[offset : offset + nbytes].data


def test_sources_are_read_before_the_commit(tmp_path):
    plan, sources = make([3 * MIB, 100], segment_count=2)
    control = SaveControl()
    seen = []
    key = next(iter(sources))
    sources[key] = _Watched(content_of(0, 3 * MIB), lambda: seen.append(control.is_staged))
    assert not control.wait_staged(0)
    write_checkpoint(tmp_path / "c", plan, sources, config=config(), control=control)
    assert control.wait_staged(0)
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("mode", ["auto", "buffered"])
def test_a_cancelled_save_leaves_nothing(tmp_path, mode):
    plan, sources = make([20 * MIB], pulled={0})
    control = SaveControl()
    key = next(iter(sources))
    content = np.zeros(20 * MIB, dtype="u1")
    sources[key] = _Watched(content, control.cancel)
    with pytest.raises(CancelledError):
        write_checkpoint(tmp_path / "c", plan, sources, config=config(mode), control=control)
    assert list(tmp_path.iterdir()) == []
    assert control.is_staged


def test_a_save_that_was_cancelled_before_it_began(tmp_path):
    plan, sources = make([MIB])
    control = SaveControl()
    control.cancel()
    with pytest.raises(CancelledError):
        write_checkpoint(tmp_path / "c", plan, sources, control=control)
    assert list(tmp_path.iterdir()) == []


def test_after_the_commit_it_is_too_late(tmp_path):
    plan, sources = make([MIB])
    control = SaveControl()
    write_checkpoint(tmp_path / "c", plan, sources, control=control)
    control.cancel()
    assert (tmp_path / "c" / "manifest.json").exists()
