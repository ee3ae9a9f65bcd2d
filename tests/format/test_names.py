"""Names: paths <-> names, and the derived names of files and directories."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpformat.errors import PlanError
from fpformat.names import (
    aside_name,
    element_text,
    escape,
    name_of,
    path_of,
    segment_name,
    staging_name,
    step_name,
    trash_name,
    unescape,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.text("~/\0012labcip")
ELEMENTS = st.one_of(
    st.tuples(st.just("key"), TEXT | st.integers() | st.booleans() | st.none()),
    st.tuples(st.just("index"), st.integers(0, 2**40)),
    st.tuples(st.sampled_from(["attr", "part"]), TEXT),
    st.just(("context", None)),
)
PATHS = st.lists(ELEMENTS, min_size=1, max_size=5).map(tuple)
SAVE_ID = bytes(range(16))


def typed(path):
    return [(kind, type(value), value) for kind, value in path]


@pytest.mark.clause("NAM-4")
@given(PATHS)
def test_a_name_gives_its_path_back(path):
    assert typed(path_of(name_of(path))) == typed(path)


@pytest.mark.clause("NAM-4")
@given(PATHS, PATHS)
def test_two_paths_never_share_a_name(one, other):
    assert (name_of(one) == name_of(other)) == (typed(one) == typed(other))


@given(TEXT)
def test_escaped_text_has_no_reserved_character_and_comes_back(text):
    escaped = escape(text)
    assert "/" not in escaped
    assert "\0" not in escaped
    assert unescape(escaped) == text


@pytest.mark.clause("NAM-4")
@pytest.mark.parametrize(
    ("element", "text"),
    [
        (("key", "model"), "model"),
        (("key", ""), ""),
        (("key", "a/b"), "a~1b"),
        (("key", "~"), "~0"),
        (("key", "nul\0"), "nul~2"),
        (("key", 5), "~i5"),
        (("key", -5), "~i-5"),
        (("key", True), "~b1"),
        (("key", False), "~b0"),
        (("key", None), "~n"),
        (("key", "None"), "None"),
        (("key", "5"), "5"),
        (("index", 5), "~l5"),
        (("attr", "_metadata"), "~a_metadata"),
        (("part", "inner"), "~pinner"),
        (("context", None), "~c"),
    ],
)
def test_text_of_an_element(element, text):
    assert element_text(element) == text


def test_the_root_has_the_empty_name():
    assert name_of(()) == ""


@pytest.mark.parametrize("name", ["~", "~9", "~x", "a~", "~ix", "~b2", "a/~h"])
def test_an_unknown_escape_is_refused(name):
    with pytest.raises(ValueError, match=r"escape|invalid literal"):
        path_of(name)


@pytest.mark.clause("NAM-4")
def test_the_longest_name():
    assert len(name_of((("key", "x" * 65_535),))) == 65_535
    with pytest.raises(PlanError, match="NAM-4"):
        name_of((("key", "é" * 32_768),))


@pytest.mark.clause("NAM-2")
def test_a_lone_surrogate_has_no_name():
    with pytest.raises(PlanError, match="lone surrogate"):
        name_of((("key", "\ud800"),))


@pytest.mark.clause("DIR-3")
def test_derived_names():
    assert segment_name(7) == "seg-000007.fps"
    assert segment_name(1_000_000) == "seg-1000000.fps"
    assert step_name(1000) == "step-0000001000"
    assert staging_name(SAVE_ID) == ".fps-000102030405060708090a0b0c0d0e0f"
    assert trash_name(SAVE_ID) == ".fps-trash-000102030405060708090a0b0c0d0e0f"
    assert aside_name("step-1", SAVE_ID) == "step-1.bad-000102030405060708090a0b0c0d0e0f"


@pytest.mark.parametrize("name", ["~i+5", "~i1_0", "~i 5", "~i007", "~l01", "~l\u0661", "~i-0"])
def test_a_number_has_one_spelling(name):
    with pytest.raises(ValueError, match="no path"):
        path_of(name)
