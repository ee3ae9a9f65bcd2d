"""A safetensors file as its metadata and the bytes of its tensors: an independent look.

Written apart from the converter that it is used to check. The layout is a u64 length, a JSON
header of that many bytes, then the tensors' bytes.
"""

import json
from dataclasses import dataclass
from pathlib import Path

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsFile:
    """Metadata strings, and for every name the data type, the shape and the bytes."""

    metadata: dict[str, str]
    tensors: Tensors


def read_safetensors(path: Path) -> SafetensorsFile:
    """Read a whole safetensors file."""
    content = path.read_bytes()
    header_stop = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:header_stop])
    metadata = header.pop("__metadata__", {})
    tensors: Tensors = {}
    for name, entry in header.items():
        start, stop = (header_stop + offset for offset in entry["data_offsets"])
        tensors[name] = (entry["dtype"], tuple(entry["shape"]), content[start:stop])
    return SafetensorsFile(metadata=metadata, tensors=tensors)
