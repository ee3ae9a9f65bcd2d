"""What an input is, by its content; names and endings play no part.

Things that people hand to a converter by mistake, such as a pointer of git-lfs or a login page,
are told apart and refused with a sentence that says what they are and what to do.
"""

import re
from pathlib import Path
from typing import Final, Literal

from fpformat.limits import MAGIC
from fpformat.names import MANIFEST_NAME
from fpformat_tools.errors import SourceError
from fpformat_tools.formats.directories import hint_of
from fpformat_tools.streams.ranges import Input
from fpformat_tools.text import count_text, listed

Kind = Literal["fpformat", "safetensors", "index", "torch_zip", "torch_legacy"]

INDEX_ENDING: Final = ".index.json"
MAX_INDEX_NBYTES: Final = 32 * 1024 * 1024
_HEAD_NBYTES: Final = 4096
_LONGEST_LENGTH: Final = 1 << 32
# Seven characters of text or more are a header length that no safetensors file has.
_JSON_AS_NUMBER: Final = 1 << 48
_LFS: Final = b"version https://git-lfs.github.com/spec/"
# The number 0x1950a86a20f9469cfc6c, which begins every file that torch wrote before its zip files.
_TORCH_LEGACY: Final = re.compile(
    rb"\x80[\x02-\x05](\x95.{8})?\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20", re.S
)
_PICKLE: Final = re.compile(rb"\x80[\x01-\x05]")
_HTML: Final = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype|html|head|\?xml|body|!--)", re.I)
_OTHERS: Final = (
    (b"GGUF", "a GGUF model of llama.cpp, which fpconvert does not read"),
    (b"\x89HDF\r\n", "an HDF5 container (Keras, for one), which fpconvert does not read"),
    (b"\x93NUMPY", "a numpy .npy array, which fpconvert does not read"),
    (b"\x1f\x8b", "compressed with gzip: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd: unpack it first"),
    (b"BZh", "compressed with bzip2: unpack it first"),
    (b"\xfd7zXZ", "compressed with xz: unpack it first"),
    (b"\x89PNG", "a picture (PNG)"),
    (b"%PDF", "a PDF document"),
)


def _refuse_pointer(head: bytes, where: str) -> None:
    if not head.startswith(_LFS):
        return
    oid = re.search(rb"^oid (\S+)$", head, re.M)
    nbytes = re.search(rb"^size (\d+)$", head, re.M)
    what = ", ".join(
        f"{word} {found.group(1).decode(errors='replace')}"
        for word, found in (("oid", oid), ("size", nbytes))
        if found
    )
    todo = "run 'git lfs pull' where it was cloned, or download the model itself"
    raise SourceError("invalid", where, f"is a git-lfs pointer, not the model ({what}): {todo}")


def _refuse_others(head: bytes, where: str) -> None:
    _refuse_pointer(head, where)
    if _HTML.match(head):
        todo = "the download probably needs a login or another address"
        raise SourceError("invalid", where, f"is an HTML page, not a model: {todo}")
    for magic, what in _OTHERS:
        if head.startswith(magic):
            raise SourceError("unsupported", where, f"is {what}")
    if head[257:262] == b"ustar":
        detail = "is a tar archive; files of torch before 0.2 are not read: load and save it anew"
        raise SourceError("unsupported", where, detail)
    if head.startswith(MAGIC):
        detail = "is one segment of a fpformat checkpoint: name the directory instead"
        raise SourceError("invalid", where, detail)
    if head.startswith(b'{"checkpoint":'):
        detail = "is the manifest of a fpformat checkpoint: name the directory instead"
        raise SourceError("invalid", where, detail)


def kind_of_content(head: bytes, *, nbytes: int, where: str) -> Kind:
    """Return what an input is whose first bytes are `head`.

    Raises:
        SourceError: It is nothing that can be read; the message says what it is, if known.
    """
    if nbytes == 0:
        raise SourceError("corrupt", where, "is empty (0 bytes)")
    # The length of a short header may look like the first bytes of a pickle or of another format.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < _LONGEST_LENGTH:
        return "safetensors"
    _refuse_others(head, where)
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "torch_zip"
    if _TORCH_LEGACY.match(head):
        return "torch_legacy"
    if _PICKLE.match(head):
        detail = "is a pickle, but not one of torch.save; it is never executed: see the manual"
        raise SourceError("unsupported", where, detail)
    if nbytes < 8:
        detail = f"truncated: has {count_text(nbytes, 'byte')}; no known format is that short"
        raise SourceError("corrupt", where, detail)
    if _is_index(head, where):
        return "index"
    if head[8:9] == b"{":
        return "safetensors"
    detail = "is not a safetensors file (byte 8 must be '{'), a torch file, an index or fpformat"
    raise SourceError("unsupported", where, detail)


def _is_index(head: bytes, where: str) -> bool:
    """Whether this is JSON with a weight map, which may stand after long metadata."""
    if not head.lstrip().startswith(b"{") or int.from_bytes(head[:8], "little") < _JSON_AS_NUMBER:
        return False
    if b'"weight_map"' in head:
        return True
    with Input(Path(where)) as source:
        return b'"weight_map"' in source.head(MAX_INDEX_NBYTES)


def kind_of(path: Path) -> Kind:
    """Return what the regular input at `path` is."""
    with Input(path) as source:
        return kind_of_content(source.head(_HEAD_NBYTES), nbytes=source.nbytes, where=str(path))


def _index_choice(path: Path, names: list[str]) -> Path | None:
    indexes = [name for name in names if name.endswith(INDEX_ENDING)]
    preferred = [name for name in indexes if name.endswith(f".safetensors{INDEX_ENDING}")]
    if len(preferred) > 1:
        detail = f"has several indexes, name one of them: {listed(preferred)}"
        raise SourceError("invalid", str(path), detail)
    if preferred:
        return path / preferred[0]
    if indexes:
        detail = f"has only an index of torch files: {listed(indexes)}; convert those one by one"
        raise SourceError("unsupported", str(path), detail)
    return None


def find_source(path: Path) -> tuple[Kind, Path]:
    """Return what a path holds and the path to read: an index or a lone model for a directory.

    Raises:
        SourceError: Nothing there, nothing known, or several candidates, which are listed.
    """
    if not path.is_dir():
        return kind_of(path), path
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise SourceError("io", str(path), error.strerror or str(error)) from error
    if MANIFEST_NAME in names or any(re.fullmatch(r"seg-\d{6}\.fps", name) for name in names):
        return "fpformat", path
    index = _index_choice(path, names)
    if index is not None:
        return "index", index
    if ".metadata" in names and any(name.endswith(".distcp") for name in names):
        detail = "is a DCP directory of torch.distributed.checkpoint, which is not read yet"
        raise SourceError("unsupported", str(path), detail)
    candidates = {name: kind for name in names if (kind := _kind_or_none(path / name))}
    if len(candidates) == 1:
        ((name, kind),) = candidates.items()
        return kind, path / name
    if candidates:
        detail = f"has no index and several models, name one of them: {listed(candidates)}"
        raise SourceError("invalid", str(path), detail)
    hint = hint_of(path)
    detail = f"holds no manifest.json, no index and no model{f'; {hint}' if hint else ''}"
    raise SourceError("not_fpformat", str(path), detail)


def _kind_or_none(path: Path) -> Kind | None:
    if not path.is_file():
        return None
    try:
        kind = kind_of(path)
    except SourceError:
        return None
    return kind if kind in ("safetensors", "torch_zip", "torch_legacy") else None
