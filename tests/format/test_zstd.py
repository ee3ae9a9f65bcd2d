"""The optional feature zstd: frames of one piece, byte planes, and frames that are not right."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from format.forge import Forge, Patches, Table, crc32c, read_tables
from format.samples import LONG, RANK, write_sample

from fpformat import FormatError, UnsupportedError, open_checkpoint, verify_checkpoint

LAST = 3  # the extent of "rng", the last of segment 1


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    return write_sample(tmp_path_factory.mktemp("sample") / "c")


def raw_sizes(tables: dict[int, Table]) -> list[int]:
    return [tables[2].get(row, 16, "Q") for row in range(len(tables[2]))]


def compressed(
    sample: Path,
    target: Path,
    frame: bytes,
    codec: int,
    sizes: Callable[[list[int]], list[int]] = list,
) -> Path:
    """Store `frame` as the piece of "rng" and declare the feature."""
    _, tables = read_tables(bytearray((sample / "seg-000001.fps").read_bytes()))
    offset = tables[2].get(LAST, 0, "Q") - 4096

    def data(region: bytearray) -> None:
        region[offset : offset + 24] = bytes(24)
        region[offset : offset + len(frame)] = frame

    def stored(t: dict[int, Table], lengths: list[int]) -> None:
        t[8] = Table(8, 4, bytearray(struct.pack(f"<{len(lengths)}I", *lengths)))

    def last(t: dict[int, Table]) -> None:
        t[2].put(LAST, 8, "Q", len(frame))
        t[2].put(LAST, 44, "B", codec)
        t[5].put(len(t[5]) - 1, 0, "I", crc32c(frame))
        stored(t, sizes([*raw_sizes(t)[:-1], len(frame)]))

    def header(block: bytearray) -> None:
        struct.pack_into("<Q", block, 16, 1)

    patches = {
        0: Patches(tables=lambda t: stored(t, raw_sizes(t)), header=header),
        1: Patches(data=data, tables=last, header=header, sum_pieces=False),
    }
    forge = Forge(sample, patches, manifest=lambda m: m["features"].update(incompat=["zstd"]))
    return forge.write(target)


def planes(raw: bytes) -> bytes:
    return np.frombuffer(raw, dtype="u1").reshape(-1, 8).T.tobytes()


def read(path: Path) -> bytes:
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.read("long").tobytes() == LONG.tobytes()
        return checkpoint.read(("rng", 1)).tobytes()


def compress(raw: bytes, **options) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(raw)


@pytest.mark.clause("ZST-1", "ZST-2", "EXT-14")
@pytest.mark.parametrize(("codec", "prepare"), [(1, bytes), (2, planes)])
def test_compressed_pieces_read_back(sample, tmp_path, codec, prepare):
    path = compressed(sample, tmp_path / "c", compress(prepare(RANK.tobytes())), codec)
    assert read(path) == RANK.tobytes()
    assert verify_checkpoint(path).problems == ()


BAD = {
    "not-a-frame": ("ZST-1", b"this is no frame"),
    "cut": ("ZST-1", compress(RANK.tobytes())[:-1]),
    "too-short": ("ZST-1", compress(bytes(8))),
    "too-long": ("ZST-1", compress(bytes(1 << 20))),
    "two-frames": ("ZST-1", compress(RANK.tobytes()) + compress(b"")),
    "no-length": ("ZST-1", compress(RANK.tobytes(), write_content_size=False)),
    "wide-window": ("ZST-3", b"\x28\xb5\x2f\xfd\x80\x70" + struct.pack("<I", 24) + b"\x01\0\0"),
}


@pytest.mark.parametrize(
    ("clause", "frame"),
    [pytest.param(*row, id=name, marks=pytest.mark.clause(row[0])) for name, row in BAD.items()],
)
def test_a_frame_that_is_not_right(sample, tmp_path, clause, frame):
    path = compressed(sample, tmp_path / "c", frame, 1)
    with pytest.raises(FormatError, match=clause) as caught:
        read(path)
    assert "'rng'" in caught.value.where


@pytest.mark.clause("ZST-2")
@pytest.mark.parametrize(
    "sizes",
    [
        lambda lengths: lengths[:-1],
        lambda lengths: [*lengths, 1],
        lambda lengths: [*lengths[:-1], lengths[-1] - 1],
    ],
)
def test_stored_sizes_that_do_not_fit(sample, tmp_path, sizes):
    path = compressed(sample, tmp_path / "c", compress(RANK.tobytes()), 1, sizes)
    with pytest.raises(FormatError, match="ZST-2"):
        open_checkpoint(path)


@pytest.mark.clause("FEA-1")
def test_without_the_package(sample, tmp_path, monkeypatch):
    path = compressed(sample, tmp_path / "c", compress(RANK.tobytes()), 1)
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(UnsupportedError, match="zstandard"):
        read(path)
