"""A state written as a zip file of torch, loadable with ``torch.load(weights_only=True)``.

Storages keep the ties of the state and hold only what its tensors reach. Members are stored as
they are, each beginning on a multiple of 64 bytes as torch itself writes them. The step and the
strings of the state, for which torch has no place, lie beside the pickle in ``fpformat.json``.
"""

import json
import os
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Final

from fpformat.records.layout import c_strides
from fpformat.records.model import TensorEntry, TensorKey, View
from fpformat_tools.formats.interface import Target, Written
from fpformat_tools.formats.torch.pickled import StoredTensor, TorchPickle
from fpformat_tools.formats.torch.read import NOTES_NAME
from fpformat_tools.formats.torch.types import STORAGE_OF_DTYPE
from fpformat_tools.streams.gather import TensorSource
from fpformat_tools.streams.output import check_space, new_file, refuse_existing
from fpformat_tools.streams.progress import Progress
from fpformat_tools.streams.ranges import steps
from fpformat_tools.streams.sharing import Shared, share
from fpformat_tools.streams.state import State

_ROOT: Final = "archive"
_ALIGN: Final = 64
_LOCAL_NBYTES: Final = 30
_ZIP64_EXTRA_NBYTES: Final = 20
_ZIP64_FROM: Final = 1 << 30


class _Archive:
    """A zip archive that is being written."""

    def __init__(self, opened: IO[bytes]) -> None:
        self._opened = opened
        self._zipped = zipfile.ZipFile(opened, "w", zipfile.ZIP_STORED, allowZip64=True)

    def _member(self, name: str, nbytes: int) -> tuple[zipfile.ZipInfo, bool]:
        """Return a member whose bytes will begin on a multiple of 64, and whether it is large."""
        member = zipfile.ZipInfo(f"{_ROOT}/{name}")
        large = nbytes >= _ZIP64_FROM
        header = _LOCAL_NBYTES + len(member.filename.encode()) + _ZIP64_EXTRA_NBYTES * large
        padding = -(self._opened.tell() + header + 4) % _ALIGN
        member.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
        member.file_size = nbytes
        return member, large

    def add(self, name: str, content: bytes) -> None:
        """Write a member from memory."""
        member, large = self._member(name, len(content))
        with self._zipped.open(member, "w", force_zip64=large) as opened:
            opened.write(content)

    def add_streamed(
        self, name: str, source: TensorSource, nbytes: int, progress: Progress
    ) -> None:
        """Write a member from a source, step by step."""
        member, large = self._member(name, nbytes)
        with self._zipped.open(member, "w", force_zip64=large) as opened:
            for offset, step in steps(nbytes):
                opened.write(source.read(offset=offset, nbytes=step))
                progress(step)

    def close(self) -> None:
        """Write the directory of the archive."""
        self._zipped.close()


def _owner_key(entry: TensorEntry) -> TensorKey:
    return entry.target or entry.key


def _stored_tensors(shared: Shared) -> tuple[dict[str, StoredTensor], dict[str, TensorEntry]]:
    """Return the tensors by name, and the entry that owns each storage by the storage's key."""
    by_owner: dict[TensorKey, list[TensorEntry]] = defaultdict(list)
    owners: dict[TensorKey, TensorEntry] = {}
    for entry in shared.entries:
        if entry.alias is None:
            owners[entry.key] = entry
        if not entry.hidden:
            by_owner[_owner_key(entry)].append(entry)
    stored: dict[str, StoredTensor] = {}
    storages: dict[str, TensorEntry] = {}
    for position, (key, entries) in enumerate(by_owner.items()):
        owner = owners[key]
        storages[str(position)] = owner
        typed = len({entry.dtype.code for entry in entries}) == 1
        typed = typed and entries[0].dtype.name in STORAGE_OF_DTYPE
        for entry in entries:
            view = entry.alias if isinstance(entry.alias, View) else None
            stored[entry.name] = StoredTensor(
                key=str(position),
                storage_nbytes=owner.nbytes,
                dtype=entry.dtype,
                typed=typed,
                shape=entry.shape,
                strides=view.strides if view else c_strides(entry.shape),
                offset=view.offset if view else 0,
            )
    return stored, storages


def _write(
    archive: _Archive,
    pickled: bytes,
    storages: Mapping[str, TensorEntry],
    shared: Shared,
    state: State,
    progress: Progress,
) -> None:
    archive.add("data.pkl", pickled)
    archive.add("byteorder", b"little")
    if state.user or state.step is not None:
        notes = {"step": state.step, "user": state.user}
        archive.add(NOTES_NAME, json.dumps(notes, ensure_ascii=False).encode())
    for key, owner in storages.items():
        nbytes = owner.nbytes
        if nbytes:
            archive.add_streamed(f"data/{key}", shared.sources[owner.key], nbytes, progress)
        else:
            archive.add(f"data/{key}", b"")
    archive.add("version", b"3\n")


def write_torch(state: State, target: Target, progress: Progress) -> Written:
    """Write a state as a torch file.

    Raises:
        TargetError: The system refused to write, or the target exists.
    """
    refuse_existing(target.path)
    shared = share(state)
    stored, storages = _stored_tensors(shared)
    pickled = TorchPickle(stored).dump(state.node)
    needed = sum(owner.nbytes for owner in storages.values())
    check_space(target.path, nbytes=len(pickled) + needed)
    with (
        new_file(target.path, warn=state.warnings.append) as output,
        os.fdopen(os.dup(output.descriptor), "w+b") as opened,
    ):
        archive = _Archive(opened)
        try:
            _write(archive, pickled, storages, shared, state, progress)
        except BaseException:
            # The archive must not try to finish itself later, when its file is gone.
            with suppress(OSError, ValueError):
                archive.close()
            raise
        archive.close()
        nbytes = opened.tell()
    return Written(paths=(target.path,), nbytes=nbytes)
