"""Plans and sources for tests of the engine."""

import numpy as np
from hypothesis import strategies as st

from fpformat import BytesSource, Geometry, ObjectEntry, TensorEntry
from fpformat.dtypes import by_name
from fpformat.records.layout import plan_checkpoint
from fpformat_io.config import EngineConfig

U8 = by_name("U8")
MIB = 1024 * 1024
SAME = {"save_id": bytes(range(16)), "created_us": 1_700_000_000_000_000}
SMALL_RING = {"buffer_nbytes": 2 * MIB, "staging_nbytes": 8 * MIB, "worker_count": 2}
EDGES = (0, 1, 63, 64, 65, 511, 512, 4095, 4096, 4097, 70_000, MIB - 1, MIB, 3 * MIB + 5)


class Pulled:
    """A source that is no memory: what it gave becomes wrong with the next call."""

    def __init__(self, content):
        self._content = content
        self._last = np.zeros(0, dtype="u1")

    def read(self, *, offset, nbytes):
        self._last[:] = 0xEE
        self._last = self._content[offset : offset + nbytes].copy()
        return self._last.data


def content_of(place, nbytes):
    return np.random.default_rng(place).integers(0, 256, nbytes, dtype="u1")


def aligned_content(place, nbytes, *, to):
    """Return bytes that begin at a multiple of `to`."""
    memory = np.zeros(nbytes + to, dtype="u1")
    skip = -memory.__array_interface__["data"][0] % to
    part = memory[skip : skip + nbytes]
    part[:] = content_of(place, nbytes)
    return part


def make(sizes, *, pulled=(), aligned=(), segment_count=1, geometry=None, objects=True):
    """Return a plan over tensors of the given sizes and their sources."""
    entries = [
        TensorEntry(name=f"t{place:03}", dtype=U8, shape=(size,))
        for place, size in enumerate(sizes)
    ]
    extra = [ObjectEntry(name="note", kind=2, payload=b"x" * 300)] if objects else []
    plan = plan_checkpoint(entries, extra, segment_count=segment_count, geometry=geometry)
    sources = {}
    for place, (entry, size) in enumerate(zip(entries, sizes, strict=True)):
        make_content = aligned_content if place in aligned else content_of
        more = {"to": 4096} if place in aligned else {}
        content = make_content(place, size, **more)
        sources[entry.key, None] = Pulled(content) if place in pulled else BytesSource(content)
    return plan, sources


def config(mode="auto", **changes):
    return EngineConfig(mode=mode, **{**SMALL_RING, **changes})


@st.composite
def cases(draw):
    sizes = draw(st.lists(st.sampled_from(EDGES) | st.integers(0, 20_000), max_size=9))
    places = st.sets(st.integers(0, 8))
    geometry = Geometry(
        align=draw(st.sampled_from([4096, 16384, 2 * MIB])),
        tensor_align=draw(st.sampled_from([64, 256, 4096])),
        piece_nbytes=draw(st.sampled_from([16 * 1024, 256 * 1024, MIB])),
    )
    return make(
        sizes,
        pulled=draw(places),
        aligned=draw(places),
        segment_count=draw(st.integers(1, 3)),
        geometry=geometry,
        objects=draw(st.booleans()),
    )


def contents(path):
    return {each.name: each.read_bytes() for each in sorted(path.iterdir())}
