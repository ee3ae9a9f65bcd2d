"""Makers of inputs for the commands: sound ones, and each kind of fault."""

import json
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from fpformat.dtypes import by_name
from fpformat.read.source import BytesSource
from fpformat.records.model import Box, ObjectEntry, Part, SavePlan, SegmentPlan, TensorEntry
from fpformat.records.tree import TensorRef, dump_tree
from fpformat.write.writer import write_checkpoint

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"cd" * 32 + b"\nsize 123456789\n"
)
PAGE = b"<!DOCTYPE html>\n<html><head><title>Log in</title></head></html>\n"


def entry(dtype: str, shape: Any, start: Any, stop: Any) -> dict[str, Any]:
    """Return one tensor of a safetensors header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def write_raw(path: Path, header: Any, payload: bytes = b"", length: int | None = None) -> Path:
    """Write a safetensors file byte by byte; `header` is bytes, text or a document."""
    if not isinstance(header, bytes):
        header = (header if isinstance(header, str) else json.dumps(header)).encode()
    header += b" " * (-len(header) % 8)
    stated = len(header) if length is None else length
    path.write_bytes(struct.pack("<Q", stated) + header + payload)
    return path


def model_state() -> "OrderedDict[str, Any]":
    """Return a small state dict with a tie, a view, a transpose and a parameter."""
    base = torch.arange(24.0)
    return OrderedDict(
        embed=base.view(4, 6),
        head=base.view(4, 6),
        row=base[3:9],
        turned=base.view(4, 6).t(),
        half=torch.ones(3, dtype=torch.bfloat16),
        nothing=torch.empty(0),
        scalar=torch.tensor(5),
        weight=torch.nn.Parameter(torch.ones(2)),
    )


def plain_tensors() -> dict[str, torch.Tensor]:
    """Return tensors that safetensors can hold, none of them tied."""
    return {
        "a.weight": torch.arange(12.0).view(3, 4),
        "a.bias": torch.arange(3, dtype=torch.int64),
        "half": torch.arange(5).to(torch.bfloat16),
        "flag": torch.tensor([True, False, True]),
        "zero": torch.empty(2, 0, 3),
        "one": torch.tensor(7, dtype=torch.uint8),
    }


def indexed_directory(path: Path, placed: dict[str, str] | None = None, **changes: Any) -> Path:
    """Write a directory of two safetensors files and an index.

    Args:
        path: The directory.
        placed: The weight map, when it shall not be the right one.
        **changes: `total` for another total size, `drop` for a file to leave out.
    """
    path.mkdir()
    parts = (
        {"a": torch.ones(3), "b": torch.zeros(2)},
        {"c": torch.full((4,), 2.0)},
    )
    for name, part in zip(SHARDS, parts, strict=True):
        if name != changes.get("drop"):
            save_file(part, path / name, metadata={"format": "pt"})
    document = {
        "metadata": {"total_size": changes.get("total", 36)},
        "weight_map": placed or {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1]},
    }
    (path / INDEX).write_text(json.dumps(document))
    return path


def save_legacy(state: Any, path: Path) -> Path:
    """Write a file as torch did before its zip files."""
    torch.save(state, path, _use_new_zipfile_serialization=False)
    return path


def save_zip(state: Any, path: Path) -> Path:
    """Write a zip file of torch."""
    torch.save(state, path)
    return path


def repack(source: Path, target: Path, method: int = zipfile.ZIP_DEFLATED) -> Path:
    """Pack the members of a zip file of torch again, under another folder."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", method) as new:
        for member in old.infolist():
            name = "elsewhere/" + member.filename.partition("/")[2]
            new.writestr(name, old.read(member))
    return target


class _Storage:
    """Pickles as a persistent reference to a storage."""

    def __init__(self, *identity: Any) -> None:
        self.identity = identity


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.identity if isinstance(obj, _Storage) else None


def storage(key: str = "0", count: int = 4, kind: Any = torch.FloatStorage) -> Any:
    """Return what pickles as a reference to a storage."""
    return _Storage("storage", kind, key, "cpu", count)


class Call:
    """Pickles as a call of `function` with `arguments`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def tensor_call(*, offset: Any = 0, shape: Any = (4,), strides: Any = (1,), **changes: Any) -> Call:
    """Return what pickles as the call that rebuilds a tensor."""
    return Call(
        torch._utils._rebuild_tensor_v2,
        changes.get("storage", storage()),
        offset,
        shape,
        strides,
        False,
        OrderedDict(),
    )


def archive(
    path: Path, value: Any, storages: dict[str, bytes] | None = None, **more: bytes
) -> Path:
    """Write a zip file of torch around any pickled value.

    Args:
        path: The file.
        value: What is pickled; or bytes, taken for the pickle itself.
        storages: Bytes by key; four floats under ``0`` by default.
        **more: Further members by name.
    """
    if isinstance(value, bytes):
        pickled = value
    else:
        path.with_suffix(".pkl").touch()
        with path.with_suffix(".pkl").open("wb") as opened:
            _Pickler(opened, protocol=2).dump(value)
        pickled = path.with_suffix(".pkl").read_bytes()
        path.with_suffix(".pkl").unlink()
    members = {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n"}
    members |= {f"data/{key}": raw for key, raw in (storages or {"0": bytes(16)}).items()}
    members |= more
    with zipfile.ZipFile(path, "w") as zipped:
        for name, raw in members.items():
            zipped.writestr(f"archive/{name}", raw)
    return path


def same_tensor(one: Any, two: Any) -> bool:
    """Whether two tensors have type, shape and bits in common."""
    if one.dtype != two.dtype or one.shape != two.shape or one.layout != two.layout:
        return False
    bits = [
        tensor.detach().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else None
        for tensor in (one, two)
    ]
    return bits[0] is None or bool(torch.equal(bits[0], bits[1]))


def share_memory(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors lie in one storage."""
    return one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()


def two_ranks(path: Path) -> Path:
    """Write a checkpoint of two ranks with a tree each and a tensor in two boxes."""
    dtype = by_name("F32")
    shared = TensorEntry(name="w", dtype=dtype, shape=(4, 4))
    own = [TensorEntry(name="b", dtype=dtype, shape=(2,), scope=rank) for rank in (0, 1)]
    top = Box(start=(0, 0), shape=(2, 4))
    low = Box(start=(2, 0), shape=(2, 4))
    segments = []
    for rank, box in enumerate((top, low)):
        tree = dump_tree({"b": TensorRef(0), "w": TensorRef(1)})
        segments.append(
            SegmentPlan(
                entries=(own[rank], shared),
                parts=(
                    Part(key=("w", None), box=box, shard_offset=0, nbytes=32),
                    Part(key=("b", rank), box=None, shard_offset=0, nbytes=8),
                ),
                objects=(
                    ObjectEntry(
                        name="tree", kind=1, payload=tree, scope=rank, ranks=((rank, rank + 1),)
                    ),
                ),
            )
        )
    plan = SavePlan(segments=tuple(segments), world_size=2)
    values = np.arange(16, dtype="f4")
    sources = {
        (("w", None), top): BytesSource(values[:8]),
        (("w", None), low): BytesSource(values[8:]),
        (("b", 0), None): BytesSource(np.zeros(2, "f4")),
        (("b", 1), None): BytesSource(np.ones(2, "f4")),
    }
    write_checkpoint(path, plan, sources)
    return path
