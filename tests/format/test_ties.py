"""Ties against the definition: two names share memory when they share the address of a byte."""

from hypothesis import given
from hypothesis import strategies as st

from fpformat.dtypes import by_name
from fpformat.records.model import View
from fpformat.rules.ties import MAX_BASE_RATIO, Footprint, find_ties

ROOM = 96
DTYPES = [by_name(name) for name in ("U8", "I16", "F32")]


@st.composite
def footprints(draw):
    found = []
    for number in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = tuple(draw(st.lists(st.integers(1, 4), max_size=2)))
        strides = tuple(draw(st.integers(0, 5)) for _ in shape)
        start = draw(st.integers(0, 8)) * draw(st.sampled_from([1, 4]))
        one = Footprint(
            name=f"t{number}",
            dtype=dtype,
            space=0,
            start=start,
            shape=shape,
            strides=strides,
            room=(0, 2 * ROOM),
        )
        if one.stop <= ROOM:
            found.append(one)
    return found


def elements(start, dtype, shape, strides):
    """Addresses of the elements in C order."""
    addresses = [start]
    for dim, stride in zip(shape, strides, strict=True):
        addresses = [at + i * stride * dtype.nbytes for at in addresses for i in range(dim)]
    return addresses


def addresses(one):
    starts = elements(one.start, one.dtype, one.shape, one.strides)
    return {at + byte for at in starts for byte in range(one.dtype.nbytes)}


@given(footprints())
def test_ties_are_sharing_of_bytes(found):
    ties = find_ties(found)
    by_name_ = {one.name: one for one in found}
    bases = {base.name: base for base in ties.bases}

    def owner(name):
        alias = ties.aliases.get(name)
        return name if alias is None else (alias.target if isinstance(alias, View) else alias)[0]

    for name, alias in ties.aliases.items():
        one = by_name_[name]
        mine = elements(one.start, one.dtype, one.shape, one.strides)
        if isinstance(alias, View):
            target = bases.get(alias.target[0]) or by_name_[alias.target[0]]
            start = target.start + alias.offset * one.dtype.nbytes
            assert elements(start, one.dtype, one.shape, alias.strides) == mine
            assert target.start <= min(mine)
            assert one.stop <= target.stop
            assert alias.target[0] not in ties.aliases
        else:
            other = by_name_[alias[0]]
            theirs = elements(other.start, other.dtype, other.shape, other.strides)
            assert (one.dtype, one.shape, mine) == (other.dtype, other.shape, theirs)
    for one in found:
        for other in found:
            if one.name < other.name and addresses(one) & addresses(other):
                kept = owner(one.name) == owner(other.name)
                assert kept or {one.name, other.name} <= set(ties.untied)
    for base in ties.bases:
        views = [one for one in found if owner(one.name) == base.name]
        assert base.stop - base.start <= MAX_BASE_RATIO * sum(one.nbytes for one in views)


def test_spaces_share_nothing():
    one = Footprint(
        name="a", dtype=DTYPES[0], space=0, start=0, shape=(4,), strides=(1,), room=(0, 4)
    )
    other = Footprint(
        name="b", dtype=DTYPES[0], space=1, start=0, shape=(4,), strides=(1,), room=(0, 4)
    )
    assert not find_ties([one, other]).aliases
