"""Files of safetensors and directories of them, as the table of formats has them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fpformat.records.fold import map_leaves
from fpformat.records.nodes import ArrayRef, Node
from fpformat_tools.errors import SourceError
from fpformat_tools.formats.interface import Format, Head, Kind, Output, Problems
from fpformat_tools.formats.safetensors.flat_names import others_of
from fpformat_tools.formats.safetensors.index import MAX_INDEX_NBYTES
from fpformat_tools.formats.safetensors.read import open_file, open_index
from fpformat_tools.formats.safetensors.write import is_directory, write_safetensors
from fpformat_tools.streams.state import State
from fpformat_tools.text import listed

_ENDING: Final = ".safetensors.index.json"
_LONGEST_LENGTH: Final = 1 << 32
# Seven characters of text or more are a header length that no safetensors file has.
_JSON_AS_NUMBER: Final = 1 << 48


def _stated_length(head: Head) -> int:
    return int.from_bytes(head.start[:8], "little")


def _has_header(head: Head) -> bool:
    return head.start[8:9] == b"{"


def _has_likely_header(head: Head) -> bool:
    # The length of a short header may look like the first bytes of a pickle or of another format.
    return _has_header(head) and _stated_length(head) < _LONGEST_LENGTH


def _is_index(head: Head) -> bool:
    """Whether this is JSON with a weight map, which may stand after long metadata."""
    if not head.start.lstrip().startswith(b"{") or _stated_length(head) < _JSON_AS_NUMBER:
        return False
    weight_map = b'"weight_map"'
    return weight_map in head.start or weight_map in head.source.head(MAX_INDEX_NBYTES)


def _find_index(path: Path, names: Sequence[str]) -> Path | None:
    indexes = [name for name in names if name.endswith(_ENDING)]
    if len(indexes) > 1:
        detail = f"has several indexes, name one of them: {listed(indexes)}"
        raise SourceError("invalid", str(path), detail)
    return path / indexes[0] if indexes else None


def _fit(state: State) -> Problems:
    """Take numpy arrays out of a state, and return every value that is no tensor.

    Other values have no effect on what is written; what refers to bytes would be counted.
    """
    others = others_of(state)
    if others.attributes:
        text = "attributes of ordered dictionaries are not kept in safetensors"
        state.warnings.append(f"{state.where}: {text}: {', '.join(others.attributes)}")
    state.node = map_leaves(state.node, _without_array)
    return others.values


def _without_array(leaf: Node) -> Node:
    return None if isinstance(leaf, ArrayRef) else leaf


FORMAT: Final = Format(
    name="safetensors",
    help="a safetensors file; a directory with *.safetensors.index.json, or that index",
    kinds=(
        Kind(
            name="index",
            title="a safetensors directory",
            sought="an index",
            detect_last=_is_index,
            find=_find_index,
            open=open_index,
        ),
        Kind(
            name="safetensors",
            title="safetensors",
            sought="a safetensors file (byte 8 must be '{')",
            detect_first=_has_likely_header,
            detect_last=_has_header,
            is_lone=True,
            open=open_file,
        ),
    ),
    output=Output(
        endings=(".safetensors",),
        help="one file (.safetensors), or with --to a directory as on the Hub",
        fit=_fit,
        holds="tensors only",
        numpy=(ArrayRef,),
        is_flat=True,
        sharded="a safetensors directory",
        is_sharded=is_directory,
        write=write_safetensors,
    ),
)
