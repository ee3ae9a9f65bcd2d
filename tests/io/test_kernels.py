"""Kernels against the slow checksums, compiled, interpreted and without the CRC instruction."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpformat.records.checksum import combine, crc32c, slow_crc32c
from fpformat_io.native import intrinsics, kernels
from fpformat_io.write.aligned import AlignedMemory, address_of

ROOT = Path(__file__).resolve().parents[2]
INTERPRETED = intrinsics.IS_INTERPRETED
# Around the ends of words, of short lanes (3 x 256) and of long ones (3 x 8192).
SIZES = [0, 1, 7, 8, 9, 63, 767, 768, 769, 1537]
SIZES += [] if INTERPRETED else [24575, 24576, 24577, 26000, 70001, 262144]
EXAMPLES = 5 if INTERPRETED else 100


def noise(nbytes, seed=1):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype="u1")


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("shift", [0, 1, 5])
def test_checksum_and_copy_at_the_edges_of_lanes(nbytes, shift):
    source = noise(nbytes + shift)[shift:]
    expected = crc32c(source.data)
    memory = AlignedMemory(nbytes + 64)
    target = memory.view(0, nbytes + 64)
    target[:] = 0xAA
    assert kernels.checksum(address_of(source) if nbytes else 0, nbytes) == expected
    copied = kernels.copy_checksum(
        address_of(source) if nbytes else 0, address_of(target) + 16, nbytes
    )
    kernels.fence_stores()
    assert copied == expected
    assert target[16 : 16 + nbytes].tobytes() == source.tobytes()
    assert (target[:16] == 0xAA).all()
    assert (target[16 + nbytes :] == 0xAA).all()


@given(st.binary(min_size=1, max_size=400))
@settings(max_examples=EXAMPLES)
def test_checksum_is_the_slow_one(content):
    assert kernels.checksum(address_of(content), len(content)) == slow_crc32c(content)


@given(st.binary(min_size=1, max_size=60), st.binary(min_size=1, max_size=60))
@settings(max_examples=EXAMPLES)
def test_combine(first, second):
    a, b = crc32c(first), crc32c(second)
    assert kernels.combine(a, b, len(second)) == crc32c(first + second)
    assert kernels.combine(a, b, len(second)) == combine(a, b, second_nbytes=len(second))
    assert kernels.append_zeros(a, len(second)) == crc32c(first + bytes(len(second)))


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**53 - 1))
@settings(max_examples=EXAMPLES)
def test_combine_over_any_distance(first, second, nbytes):
    expected = combine(first, second, second_nbytes=nbytes)
    assert kernels.combine(first, second, nbytes) == expected


@given(st.integers(0, 2**32 - 1), st.binary(min_size=8, max_size=8))
@settings(max_examples=EXAMPLES)
def test_a_word_by_tables_is_a_word_by_instruction(state, word):
    value = int.from_bytes(word, "little", signed=True)
    expected = slow_crc32c(word, state ^ 0xFFFFFFFF) ^ 0xFFFFFFFF
    assert kernels.slice_word(state, value) == expected


@given(st.lists(st.tuples(st.integers(0, 3), st.binary(min_size=1, max_size=20)), max_size=12))
@settings(max_examples=EXAMPLES)
def test_runs_are_combined_by_group(rows):
    rows.sort(key=lambda row: row[0])
    groups = np.array([group for group, _ in rows], dtype=np.int64)
    sums = np.array([crc32c(content) for _, content in rows], dtype=np.int64)
    sizes = np.array([len(content) for _, content in rows], dtype=np.int64)
    combined = np.zeros(4, dtype=np.int64)
    kernels.combine_runs(sums, sizes, groups, combined)
    for group in range(4):
        whole = b"".join(content for number, content in rows if number == group)
        assert combined[group] == crc32c(whole)


def test_one_signature_each():
    if INTERPRETED:
        pytest.skip("nothing is compiled")
    kernels.warm_up()
    compiled = {
        name: len(value.signatures)
        for name, value in vars(kernels).items()
        if hasattr(value, "signatures")
    }
    assert len(compiled) > 10
    assert set(compiled.values()) == {1}, compiled


@pytest.mark.parametrize(
    ("variable", "value"), [("NUMBA_DISABLE_JIT", "1"), ("NUMBA_CPU_NAME", "generic")]
)
def test_the_same_interpreted_and_without_the_instruction(variable, value, tmp_path):
    if INTERPRETED or os.environ.get("NUMBA_CPU_NAME"):
        pytest.skip("runs inside the other one")
    environment = {**os.environ, variable: value, "NUMBA_CACHE_DIR": str(tmp_path)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    if variable == "NUMBA_CPU_NAME":
        asked = "from fpformat_io.native.intrinsics import HAS_CRC_INSTRUCTION as h; print(h)"
        done = subprocess.run(
            [sys.executable, "-c", asked], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.stdout == "False\n", done.stderr
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    files = ["tests/io/test_kernels.py", "tests/io/test_engine.py::test_a_mixed_plan"]
    done = subprocess.run(
        [*command, *files], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
