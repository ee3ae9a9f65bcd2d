"""CRC-32C: published vectors, the slow twin, combination, masking."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpformat.records.checksum import combine, crc32c, mask, piece_checksums, slow_crc32c

# The check value of the catalogue, and the vectors of RFC 3720, appendix B.4.
VECTORS = {
    b"": 0x00000000,
    b"123456789": 0xE3069283,
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(reversed(range(32))): 0x113FDB5C,
}


@pytest.mark.clause("SUM-1")
@pytest.mark.parametrize(("data", "expected"), VECTORS.items())
def test_published_vectors(data, expected):
    assert crc32c(data) == slow_crc32c(data) == expected


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_the_fast_one_equals_the_slow_one_and_continues(first, second):
    whole = crc32c(first + second)
    assert whole == slow_crc32c(first + second) == crc32c(second, crc32c(first))


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_combination_needs_no_bytes(first, second):
    combined = combine(crc32c(first), crc32c(second), second_nbytes=len(second))
    assert combined == crc32c(first + second)


def test_combination_over_a_long_run_of_zeros():
    zeros = 3_000_001
    assert combine(crc32c(b"x"), crc32c(bytes(zeros)), second_nbytes=zeros) == crc32c(
        b"x" + bytes(zeros)
    )


@pytest.mark.clause("SUM-6")
def test_masking_keeps_later_checksums_awake():
    """A plain CRC at the end of a structure erases what stood before it; a masked one does not."""
    plain = {crc32c(data + crc32c(data).to_bytes(4, "little")) for data in (b"one", b"two!")}
    masked = {crc32c(data + mask(crc32c(data)).to_bytes(4, "little")) for data in (b"one", b"two!")}
    assert (len(plain), len(masked)) == (1, 2)
    assert mask(0) == 0xA282EAD8
    assert mask(0xE3069283) == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_pieces_are_cut_from_the_start():
    data = bytes(range(100))
    sums = piece_checksums(memoryview(data), piece_nbytes=40)
    assert sums == [crc32c(data[:40]), crc32c(data[40:80]), crc32c(data[80:])]
