"""What people hand to a converter by mistake, refused with a sentence that says what to do."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fpformat.limits import MAGIC
from fpformat_tools.errors import SourceError
from fpformat_tools.formats.interface import Head
from fpformat_tools.text import listed

INDEX_ENDING: Final = ".index.json"
_LFS: Final = b"version https://git-lfs.github.com/spec/"
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


def refuse_foreign(head: Head) -> None:
    """Raise for a file that is surely none of the formats.

    Raises:
        SourceError: It says what the file is.
    """
    start, where = head.start, head.where
    _refuse_pointer(start, where)
    if _HTML.match(start):
        todo = "the download probably needs a login or another address"
        raise SourceError("invalid", where, f"is an HTML page, not a model: {todo}")
    for magic, what in _OTHERS:
        if start.startswith(magic):
            raise SourceError("unsupported", where, f"is {what}")
    if start[257:262] == b"ustar":
        detail = "is a tar archive; files of torch before 0.2 are not read: load and save it anew"
        raise SourceError("unsupported", where, detail)
    if start.startswith(MAGIC):
        detail = "is one segment of a fpformat checkpoint: name the directory instead"
        raise SourceError("invalid", where, detail)
    if start.startswith(b'{"checkpoint":'):
        detail = "is the manifest of a fpformat checkpoint: name the directory instead"
        raise SourceError("invalid", where, detail)


def refuse_pickle(head: Head) -> None:
    """Raise for a pickle; those of known formats were detected before.

    Raises:
        SourceError: It is one.
    """
    if _PICKLE.match(head.start):
        detail = "is a pickle, but not one of torch.save; it is never executed: see the manual"
        raise SourceError("unsupported", head.where, detail)


def refuse_directory(path: Path, names: Sequence[str]) -> None:
    """Raise for a directory that holds a model in parts which are not read together.

    Raises:
        SourceError: It says what the directory is.
    """
    indexes = [name for name in names if name.endswith(INDEX_ENDING)]
    if indexes:
        detail = f"has only an index of torch files: {listed(indexes)}; convert those one by one"
        raise SourceError("unsupported", str(path), detail)
    if ".metadata" in names and any(name.endswith(".distcp") for name in names):
        detail = "is a DCP directory of torch.distributed.checkpoint, which is not read yet"
        raise SourceError("unsupported", str(path), detail)
