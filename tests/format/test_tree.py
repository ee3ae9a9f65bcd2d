"""State trees: node -> bytes -> node, and every way in which the bytes can be wrong."""

import struct
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpformat.dtypes import DTYPES, numpy_dtype
from fpformat.errors import FormatError, PlanError
from fpformat.records.nodes import (
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
    children_of,
)
from fpformat.records.tree import dump_tree, parse_tree, walk_tensors

U32 = st.integers(0, 2**32 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
BITS = st.binary(min_size=8, max_size=8)
FLOATS = BITS.map(lambda raw: struct.unpack("<d", raw)[0])
DTYPE = st.sampled_from(list(DTYPES.values()))
NUMPY_TYPE = DTYPE.filter(lambda dtype: numpy_dtype(dtype) is not None)
KEYS = TEXT | st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.none()
SCALARS = NUMPY_TYPE.flatmap(
    lambda dtype: st.binary(min_size=dtype.nbytes, max_size=dtype.nbytes).map(
        lambda raw: NumpyScalar(dtype, raw)
    )
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**200), 2**200),
    FLOATS,
    st.tuples(FLOATS, FLOATS).map(lambda pair: complex(*pair)),
    TEXT,
    st.binary(max_size=6),
    U32.map(TensorRef),
    st.builds(ParameterRef, U32, st.booleans()),
    U32.map(ArrayRef),
    SCALARS,
    st.lists(I64, max_size=3).map(lambda dims: SizeNode(tuple(dims))),
    DTYPE.map(DtypeNode),
    NUMPY_TYPE.map(NumpyDtypeNode),
    TEXT.map(DeviceNode),
)


def containers(nodes):
    items = st.dictionaries(KEYS, nodes, max_size=3)
    named = st.dictionaries(TEXT, nodes, max_size=2)
    return st.one_of(
        st.lists(nodes, max_size=3),
        st.lists(nodes, max_size=3).map(tuple),
        items,
        items.map(CounterNode),
        st.builds(OrderedNode, items, named),
        st.builds(FlattenedNode, TEXT, nodes, named),
    )


NODES = st.recursive(LEAVES, containers, max_leaves=12)


def same(one, other):
    """Return whether two trees are equal to the bit, in order, with equal types."""
    pending = deque([(one, other)])
    while pending:
        one, other = pending.popleft()
        if type(one) is not type(other):
            return False
        if isinstance(one, FlattenedNode) and one.label != other.label:
            return False
        below = children_of(one)
        if below is None:
            if dump_tree(one) != dump_tree(other):
                return False
            continue
        mine, theirs = list(below), list(children_of(other))
        if [(kind, type(value), value) for (kind, value), _ in mine] != [
            (kind, type(value), value) for (kind, value), _ in theirs
        ]:
            return False
        pending += [(a, b) for (_, a), (_, b) in zip(mine, theirs, strict=True)]
    return True


def refused(document):
    with pytest.raises(FormatError) as caught:
        parse_tree(document, "segment 0: tree")
    assert "segment 0: tree" in caught.value.where
    return caught.value


def outcome(document):
    """Return the tree, or the error that refuses it; any other exception is a failure."""
    try:
        return parse_tree(document, "tree")
    except FormatError as error:
        return error


def nested(depth, leaf=b"\0"):
    return b"\x09\1\0\0\0" * (depth - 1) + leaf


@given(NODES)
def test_what_is_written_is_read_back_to_the_bit(node):
    document = dump_tree(node)
    again = parse_tree(document, "tree")
    assert same(node, again)
    assert dump_tree(again) == document


@given(NODES, st.data())
def test_every_truncation_is_refused(node, data):
    document = dump_tree(node)
    refused(document[: data.draw(st.integers(0, len(document) - 1))])


@given(NODES, st.data())
def test_a_changed_byte_gives_an_error_or_another_tree(node, data):
    document = bytearray(dump_tree(node))
    place = data.draw(st.integers(0, len(document) - 1))
    document[place] ^= data.draw(st.integers(1, 255))
    other = outcome(bytes(document))
    if isinstance(other, FormatError):
        assert other.clause.startswith("TRE-")
    else:
        assert dump_tree(other) == document
        assert not same(node, other)


@given(st.binary(max_size=80))
def test_any_bytes_give_an_error_or_a_tree(document):
    node = outcome(document)
    if isinstance(node, FormatError):
        assert node.clause.startswith("TRE-")
    else:
        assert dump_tree(node) == document


@pytest.mark.clause("TRE-1")
@pytest.mark.parametrize(
    ("document", "node"),
    [
        ("00", None),
        ("01", False),
        ("02", True),
        ("03 ff ff ff ff ff ff ff ff", -1),
        ("04 09000000 000000000000008000", 2**63),
        ("05 000000000000f03f", 1.0),
        ("06 000000000000f03f 0000000000000080", complex(1.0, -0.0)),
        ("07 02000000 c3a9", "é"),
        ("08 01000000 ff", b"\xff"),
        ("09 01000000 00", [None]),
        ("0a 00000000", ()),
        ("0b 01000000 02 01", {True: False}),
        ("0c 05000000", TensorRef(5)),
        ("0d 05000000 01", ParameterRef(5, True)),
        ("0e 05000000", ArrayRef(5)),
        ("0f 0c00 0000803f", NumpyScalar(DTYPES[12], b"\0\0\x80\x3f")),
        ("10 01000000 0300000000000000", SizeNode((3,))),
        ("11 0b00", DtypeNode(DTYPES[11])),
        ("12 03000000 637075", DeviceNode("cpu")),
        (
            "13 01000000 00 01 0b 01000000 07 01000000 61 02",
            OrderedNode({None: False}, {"a": True}),
        ),
        ("14 01000000 43 00 01000000 07 01000000 61 01", FlattenedNode("C", None, {"a": False})),
        ("15 0c00", NumpyDtypeNode(DTYPES[12])),
        ("16 01000000 00 02", CounterNode({None: True})),
    ],
)
def test_each_tag(document, node):
    raw = bytes.fromhex(document)
    assert same(parse_tree(raw, "tree"), node)
    assert dump_tree(node) == raw


@pytest.mark.clause("TRE-1")
@pytest.mark.parametrize(
    "document",
    [
        bytes([23]),
        bytes([255]),
        b"\x09\1\0\0\0\x80",
        bytes.fromhex("13 00000000 00"),
    ],
    ids=["first-free", "last", "inside", "attributes-no-dict"],
)
def test_an_unknown_or_misplaced_tag(document):
    assert refused(document).clause == "TRE-1"


@pytest.mark.clause("TRE-2")
@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"\3\0\0\0",
        b"\7\5\0\0\0ab",
        b"\x09\2\0\0\0\0",
        b"\x09\xff\xff\xff\xff",
        b"\x0b\1\0\0\0\0",
        b"\x10\1\0\0\0\0\0\0\0",
        b"\x0d\0\0\0\0\2",
        b"\0\0",
    ],
    ids=[
        "empty",
        "short-number",
        "short-text",
        "missing-child",
        "huge-count",
        "key-without-value",
        "short-size",
        "flag-two",
        "trailing",
    ],
)
def test_lengths_and_flags(document):
    error = refused(document)
    assert (error.clause, error.error_class) == ("TRE-2", "malformed")


@pytest.mark.clause("TRE-2")
def test_an_exact_document_is_accepted():
    assert parse_tree(b"\x09\2\0\0\0\0\1", "tree") == [None, False]


@pytest.mark.clause("TRE-3")
@pytest.mark.parametrize(
    "value", [-(2**63), 2**63 - 1, 2**63, -(2**63) - 1, 2**71, -(2**71), 7**999]
)
def test_the_shortest_form_of_an_integer(value):
    document = dump_tree(value)
    assert document[0] == (3 if -(2**63) <= value < 2**63 else 4)
    assert parse_tree(document, "tree") == value


@pytest.mark.clause("TRE-3")
@pytest.mark.parametrize(
    "raw",
    [b"", b"\0", (2**63 - 1).to_bytes(8, "little"), (2**63).to_bytes(10, "little"), b"\xff" * 12],
    ids=["none", "zero", "fits", "too-long", "too-long-negative"],
)
def test_an_integer_in_another_form(raw):
    assert refused(b"\4" + struct.pack("<I", len(raw)) + raw).clause == "TRE-3"


@pytest.mark.clause("TRE-4")
def test_depth_128_is_read_without_recursion():
    node = parse_tree(nested(128), "tree")
    assert dump_tree(node) == nested(128)


@pytest.mark.clause("TRE-4")
@pytest.mark.parametrize("depth", [129, 100_000])
def test_a_deeper_tree(depth):
    error = refused(nested(depth))
    assert (error.clause, error.error_class) == ("TRE-4", "limit")


@pytest.mark.clause("TRE-4")
def test_a_key_counts_as_deep_as_its_value():
    assert refused(nested(128, b"\x0b\1\0\0\0\0\0")).clause == "TRE-4"
    assert parse_tree(nested(128, b"\x0b\0\0\0\0"), "tree")


def pair(*keys):
    body = b"".join(dump_tree(key) + b"\0" for key in keys)
    return b"\x0b" + struct.pack("<I", len(keys)) + body


@pytest.mark.clause("TRE-5")
def test_keys_of_all_four_types():
    keys = ["1", 1, 0, None, 2**60, ""]
    node = parse_tree(pair(*keys), "tree")
    assert [(type(key), key) for key in node] == [(type(key), key) for key in keys]


@pytest.mark.clause("TRE-5")
@pytest.mark.parametrize(
    "keys",
    [
        ("a", "a"),
        (1, True),
        (False, 0),
        (None, None),
        (1.0,),
        (b"a",),
        ([],),
        (TensorRef(0),),
        ((),),
    ],
    ids=str,
)
@pytest.mark.parametrize("tag", [11, 22])
def test_equal_keys_and_keys_of_other_types(keys, tag):
    error = refused(bytes([tag]) + pair(*keys)[1:])
    assert (error.clause, error.error_class) == ("TRE-5", "invalid")


@pytest.mark.clause("TRE-5")
@pytest.mark.parametrize("name", [1, None])
def test_an_attribute_whose_name_is_no_str(name):
    assert refused(bytes.fromhex("13 00000000") + pair(name)).clause == "TRE-5"


@pytest.mark.clause("TRE-5")
@pytest.mark.parametrize("name", [1, None, b"a"])
def test_a_part_whose_name_is_no_str(name):
    error = refused(bytes.fromhex("14 01000000 43 00 01000000") + dump_tree(name) + b"\0")
    assert (error.clause, error.error_class) == ("TRE-5", "invalid")


@pytest.mark.clause("TRE-5")
def test_a_part_that_occurs_twice():
    part = dump_tree("a") + b"\0"
    assert refused(bytes.fromhex("14 01000000 43 00 02000000") + part * 2).clause == "TRE-5"


@pytest.mark.clause("TRE-7")
@pytest.mark.parametrize("raw", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\x80"], ids=repr)
@pytest.mark.parametrize("tag", [7, 18, 20])
def test_text_that_is_not_utf8(tag, raw):
    tail = b"\0" * 5 if tag == 20 else b""
    assert refused(bytes([tag]) + struct.pack("<I", len(raw)) + raw + tail).clause == "TRE-7"


@pytest.mark.clause("TRE-7")
def test_text_beyond_the_basic_plane():
    text = "\U0001f600\0é"
    assert parse_tree(dump_tree(text), "tree") == text


@pytest.mark.clause("TRE-9")
@pytest.mark.parametrize("tag", [15, 17, 21])
@pytest.mark.parametrize("code", [0, 23, 65535])
def test_a_data_type_that_is_not_registered(tag, code):
    error = refused(bytes([tag]) + struct.pack("<H", code) + bytes(16))
    assert (error.clause, error.error_class) == ("TRE-9", "unsupported")


@pytest.mark.clause("TRE-9")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
def test_each_registered_data_type(dtype):
    assert parse_tree(dump_tree(DtypeNode(dtype)), "tree") == DtypeNode(dtype)


@pytest.mark.clause("TRE-10")
@pytest.mark.parametrize(
    "node",
    [
        object(),
        [{1, 2}],
        {1.0: None},
        {"a": "\ud800"},
        {"\ud800": 1},
        bytearray(b"a"),
        NumpyScalar(DTYPES[12], b"\0"),
        OrderedNode({b"a": 1}, {}),
    ],
    ids=lambda node: type(node).__name__,
)
def test_what_has_no_tag_is_not_written(node):
    with pytest.raises(PlanError, match="TRE-10"):
        dump_tree(node)


@pytest.mark.clause("TRE-10")
def test_nothing_too_deep_is_written():
    node = None
    for _ in range(127):
        node = [node]
    dump_tree(node)
    with pytest.raises(PlanError, match="deeper than 128"):
        dump_tree([node])


def test_walk_yields_references_with_their_paths_in_order():
    node = {
        "a": [TensorRef(0), (ArrayRef(1),)],
        1: OrderedNode({None: TensorRef(2)}, {"_metadata": CounterNode({True: TensorRef(3)})}),
        "f": FlattenedNode("C", [ParameterRef(4, True)], {"inner": TensorRef(5)}),
    }
    assert list(walk_tensors(node)) == [
        ((("key", "a"), ("index", 0)), TensorRef(0)),
        ((("key", "a"), ("index", 1), ("index", 0)), ArrayRef(1)),
        ((("key", 1), ("key", None)), TensorRef(2)),
        ((("key", 1), ("attr", "_metadata"), ("key", True)), TensorRef(3)),
        ((("key", "f"), ("context", None), ("index", 0)), ParameterRef(4, True)),
        ((("key", "f"), ("part", "inner")), TensorRef(5)),
    ]
    assert list(walk_tensors(TensorRef(7))) == [((), TensorRef(7))]
    assert list(walk_tensors({})) == []


@pytest.mark.clause("TRE-5")
@pytest.mark.parametrize("key", [2**63, -(2**63) - 1, 1 << 20_000], ids=["over", "under", "huge"])
def test_an_int_key_that_does_not_fit_64_bits(key):
    with pytest.raises(PlanError, match="64 bits"):
        dump_tree({key: None})
    nbytes = key.bit_length() // 8 + 1
    big = b"\x04" + nbytes.to_bytes(4, "little") + key.to_bytes(nbytes, "little", signed=True)
    assert refused(b"\x0b" + (1).to_bytes(4, "little") + big + b"\0").clause == "TRE-5"
