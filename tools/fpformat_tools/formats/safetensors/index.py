"""Directories of safetensors files with an index, as the Hugging Face Hub keeps large models.

The index decides which file holds which tensor. Its paths are names of somebody else's choosing:
they may lead into sub-directories but never out of the directory, not through links either. The
one exception is the Hub's own cache, where ``snapshots/<revision>/`` holds links to ``blobs/``.
"""

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from fpformat_tools.errors import SourceError
from fpformat_tools.formats.safetensors.file import SafetensorsFile, open_safetensors
from fpformat_tools.formats.safetensors.header import HeaderEntry
from fpformat_tools.streams.ranges import Input
from fpformat_tools.text import count_text, listed, shown, verb_text

MAX_INDEX_NBYTES: Final = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedModel:
    """Every tensor that an index names, with the open file that holds it."""

    tensors: tuple[tuple[HeaderEntry, SafetensorsFile], ...]
    metadata: dict[str, str]
    warnings: tuple[str, ...]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{shown(key)} stands twice")
        found[key] = value
    return found


def _parse_index(path: Path) -> tuple[dict[str, str], int | None]:
    where = str(path)
    with Input(path) as source:
        if source.nbytes > MAX_INDEX_NBYTES:
            detail = f"has {source.nbytes:,} bytes, over the limit of {MAX_INDEX_NBYTES:,}"
            raise SourceError("limit", where, detail)
        raw = source.head(source.nbytes)
    try:
        document = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise SourceError("malformed", where, f"is not JSON: {error}") from error
    placed = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(placed, dict):
        raise SourceError("malformed", where, "has no object 'weight_map'")
    for name, value in placed.items():
        if not isinstance(value, str):
            raise SourceError("malformed", where, f"the file of {shown(name)} is not a string")
    metadata = document.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return placed, total if type(total) is int else None


def _file_name(value: str) -> str:
    """Return a path of the index as the system spells it: its bytes are UTF-8 in every locale."""
    return os.fsdecode(value.encode())


def _escapes(root: Path, value: str) -> str | None:
    """Say why a path of the index is refused, None when it is not.

    spec: CNV-5
    """
    if not value:
        return "is empty"
    if any(0xD800 <= ord(character) < 0xE000 for character in value):
        return "has a lone surrogate"
    if "\0" in value or "\\" in value:
        return "has a NUL or a backslash"
    if value.startswith("/"):
        return "is absolute"
    parts = value.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "must be a plain path below the directory"
    real = os.path.realpath(root)
    target = os.path.realpath(root / _file_name(value))
    if os.path.commonpath((real, target)) == real:
        return None
    blobs = os.path.join(os.path.dirname(os.path.dirname(real)), "blobs")
    if os.path.basename(os.path.dirname(real)) == "snapshots" and os.path.dirname(target) == blobs:
        return None
    return "is a link that leads out of the directory"


def _check_paths(index: Path, placed: dict[str, str]) -> None:
    root = index.parent
    first = {value: name for name, value in reversed(placed.items())}
    problems = [
        f"{shown(name)} -> {shown(value)}: {why}"
        for value, name in first.items()
        if (why := _escapes(root, value)) is not None
    ]
    if problems:
        detail = "names paths that leave the directory or are no files"
        raise SourceError("invalid", str(index), f"{detail}: {problems[0]}", problems[1:])
    missing = sorted(value for value in first if not (root / _file_name(value)).is_file())
    if missing:
        gone = set(missing)
        lost = sum(value in gone for value in placed.values())
        hold = verb_text(len(missing), "holds", "hold")
        lost_text = f"{lost:,} of {count_text(len(placed), 'tensor')}"
        detail = f"incomplete: missing {listed(missing)}, which {hold} {lost_text}"
        raise SourceError("incomplete", str(index), detail)


def _unreferenced(index: Path, placed: Mapping[str, str]) -> list[str]:
    endings = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
    used = {str(PurePosixPath(_file_name(value))) for value in placed.values()}
    return sorted(
        entry.name
        for entry in index.parent.iterdir()
        if entry.name.endswith(endings) and entry.name not in used
    )


def open_indexed(index: Path, stack: ExitStack) -> IndexedModel:
    """Open every file that an index names and find every tensor.

    Args:
        index: The ``*.index.json``.
        stack: Keeps the files open and closes them.

    Raises:
        SourceError: A path escapes, a file or a tensor is missing; never a partial model.
    """
    placed, total = _parse_index(index)
    _check_paths(index, placed)
    opened: dict[str, SafetensorsFile] = {}
    entries: dict[str, dict[str, HeaderEntry]] = {}
    for value in dict.fromkeys(placed.values()):
        opened[value] = open_safetensors(index.parent / _file_name(value))
        stack.callback(opened[value].source.close)
        entries[value] = {entry.name: entry for entry in opened[value].header.entries}
    absent = [f"{shown(n)} is not in {shown(v)}" for n, v in placed.items() if n not in entries[v]]
    if absent:
        detail = f"names tensors that their files do not hold: {absent[0]}"
        raise SourceError("incomplete", str(index), detail, absent[1:])
    tensors = tuple((entries[value][name], opened[value]) for name, value in placed.items())
    warnings = [warning for part in opened.values() for warning in part.header.warnings]
    warnings += _index_warnings(index, placed, entries)
    found = sum(entry.stop - entry.start for entry, _ in tensors)
    if total is not None and total != found:
        warnings.append(f"{index}: total_size is {total:,}, the tensors have {found:,} bytes")
    metadata: dict[str, str] = {}
    for value, part in opened.items():
        for key, text in part.header.metadata.items():
            if metadata.setdefault(key, text) != text:
                warnings.append(f"{value}: its {shown(key)} differs from an earlier file's; left")
    return IndexedModel(tensors=tensors, metadata=metadata, warnings=tuple(warnings))


def _index_warnings(
    index: Path, placed: Mapping[str, str], entries: Mapping[str, Mapping[str, HeaderEntry]]
) -> list[str]:
    warnings = []
    stray = _unreferenced(index, placed)
    if stray:
        warnings.append(f"{index}: not named by the index, left out: {listed(stray)}")
    extra = [
        name for value, names in entries.items() for name in names if placed.get(name) != value
    ]
    if extra:
        warnings.append(f"{index}: tensors that the index does not name, left out: {listed(extra)}")
    return warnings
