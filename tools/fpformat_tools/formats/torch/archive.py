"""The zip archive that `torch.save` writes: its directory, its members, their checksums.

The central directory is read with the standard library; members are then read by position. Where
a member is stored as it is, nothing is copied beyond what is asked for; a deflated one (somebody
unpacked the archive and packed it again) is inflated on the way. A member's CRC-32 is checked on
the first whole pass over it; torch can be told to write none, which leaves a zero.
"""

import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fpformat_tools.errors import SourceError
from fpformat_tools.streams.ranges import ByteRange, InflatedRange, Input, StoredRange, crc32_of
from fpformat_tools.text import count_text

_LOCAL: Final = struct.Struct("<4s22xHH")
_ENCRYPTED: Final = 0x1
_UTF8: Final = 0x800
_END_OF_DIRECTORY: Final = b"PK\x05\x06"
_MAX_COMMENT_NBYTES: Final = 65_535 + 22


class CheckedRange:
    """A member whose CRC-32 is compared when a pass over it is complete."""

    def __init__(self, stretch: ByteRange, *, crc32: int, where: str) -> None:
        self.nbytes = stretch.nbytes
        self._stretch = stretch
        self._expected = crc32
        self._where = where
        self._position = 0
        self._crc = 0

    def read_at(self, *, offset: int, nbytes: int) -> bytes:
        """Return exactly `nbytes` bytes from `offset`.

        Raises:
            SourceError: The last byte was read and the checksum differs.
        """
        part = self._stretch.read_at(offset=offset, nbytes=nbytes)
        if offset == 0:
            self._position = self._crc = 0
        if offset == self._position:
            self._crc = zlib.crc32(part, self._crc)
            self._position += nbytes
            if self._position == self.nbytes:
                self._compare(self._crc)
        return part

    def check(self) -> None:
        """Read the whole member and compare its checksum."""
        self._compare(crc32_of(self._stretch))

    def _compare(self, crc: int) -> None:
        if self._expected and crc != self._expected:
            detail = f"CRC-32 is {crc:08x}, the archive says {self._expected:08x}"
            raise SourceError("corrupt", self._where, detail)


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """An open archive of `torch.save`; `members` are by name below its one folder."""

    source: Input
    root: str
    members: Mapping[str, zipfile.ZipInfo]

    def is_stored(self, name: str) -> bool:
        """Whether a member lies in the archive as it is."""
        member = self.members.get(name)
        return member is not None and member.compress_type == zipfile.ZIP_STORED

    def open(self, name: str) -> CheckedRange:
        """Return the bytes of a member.

        Raises:
            SourceError: No such member, or its place in the file is wrong.
        """
        where = f"{self.source.path}: {self.root}/{name}"
        member = self.members.get(name)
        if member is None:
            raise SourceError("corrupt", where, "is missing from the archive")
        if member.flag_bits & _ENCRYPTED:
            raise SourceError("unsupported", where, "is encrypted")
        stored = StoredRange(
            self.source, start=self._start(member, where), nbytes=member.compress_size
        )
        if member.compress_type == zipfile.ZIP_DEFLATED:
            inflated = InflatedRange(stored, nbytes=member.file_size, where=where)
            return CheckedRange(inflated, crc32=member.CRC, where=where)
        if member.compress_type != zipfile.ZIP_STORED:
            detail = f"is compressed by method {member.compress_type}; only deflate is read"
            raise SourceError("unsupported", where, detail)
        if member.compress_size != member.file_size:
            raise SourceError("malformed", where, "is stored but has two sizes")
        return CheckedRange(stored, crc32=member.CRC, where=where)

    def _start(self, member: zipfile.ZipInfo, where: str) -> int:
        raw = self.source.read_at(offset=member.header_offset, nbytes=_LOCAL.size)
        magic, name_nbytes, extra_nbytes = _LOCAL.unpack(raw)
        after = member.header_offset + _LOCAL.size
        name = self.source.read_at(offset=after, nbytes=name_nbytes)
        encoding = "utf-8" if member.flag_bits & _UTF8 else "cp437"
        if magic != b"PK\x03\x04" or name.decode(encoding, "replace") != member.orig_filename:
            raise SourceError("corrupt", where, f"no such member begins at {member.header_offset}")
        start = int(after + name_nbytes + extra_nbytes)
        if start + member.compress_size > self.source.nbytes:
            detail = f"truncated: ends at {start + member.compress_size:,}"
            raise SourceError("corrupt", where, f"{detail}, the file at {self.source.nbytes:,}")
        return start


def _list_members(source: Input) -> list[zipfile.ZipInfo]:
    where = str(source.path)
    tail = min(source.nbytes, _MAX_COMMENT_NBYTES)
    end = source.read_at(offset=source.nbytes - tail, nbytes=tail).rfind(_END_OF_DIRECTORY)
    if end < 0 or tail - end < 22:
        detail = f"truncated: has {source.nbytes:,} bytes and no zip directory at its end"
        raise SourceError("corrupt", where, detail)
    try:
        with (
            os.fdopen(os.dup(source.descriptor), "rb") as opened,
            zipfile.ZipFile(opened) as zipped,
        ):
            return zipped.infolist()
    except (
        zipfile.BadZipFile,
        NotImplementedError,
        OSError,
        ValueError,
        EOFError,
        struct.error,
    ) as error:
        detail = f"truncated or damaged: its zip directory cannot be read ({error})"
        raise SourceError("corrupt", where, f"{detail}; it has {source.nbytes:,} bytes") from error


def _refuse_relatives(names: list[str], where: str) -> None:
    """Name the archives that look like one of torch.save and are not."""
    below = {name.partition("/")[2] for name in names}
    if "constants.pkl" in below or any(name.startswith("code/") for name in below):
        detail = "is a TorchScript archive (torch.jit.save), which holds code; save the state dict"
        raise SourceError("unsupported", where, detail)
    if "archive_format" in below or any(name.startswith("models/") for name in below):
        detail = "is a package of torch.export, which holds a program; save the state dict"
        raise SourceError("unsupported", where, detail)
    if names and all(name.endswith(".npy") for name in names):
        raise SourceError("unsupported", where, "is a numpy .npz archive, which is not read yet")
    if "data.pkl" not in below:
        detail = f"is a zip archive of {count_text(len(names), 'member')} but not one of torch.save"
        raise SourceError("unsupported", where, f"{detail} (it has no data.pkl)")


def open_archive(source: Input) -> Archive:
    """Return the archive in an open input.

    Raises:
        SourceError: It is cut, damaged, or no archive of `torch.save`.
    """
    where = str(source.path)
    listed = [member for member in _list_members(source) if not member.filename.endswith("/")]
    names = [member.filename for member in listed]
    if "" in names:
        raise SourceError("malformed", where, "has a member without a name")
    _refuse_relatives(names, where)
    roots = {name.partition("/")[0] for name in names if name.partition("/")[2] == "data.pkl"}
    if len(roots) != 1 or len(set(names)) != len(names):
        raise SourceError("malformed", where, "has several data.pkl, or two members of one name")
    (root,) = roots
    members = {
        member.filename[len(root) + 1 :]: member
        for member in listed
        if member.filename.startswith(f"{root}/")
    }
    archive = Archive(source=source, root=root, members=members)
    if "byteorder" in members:
        order = archive.open("byteorder")
        if order.read_at(offset=0, nbytes=min(order.nbytes, 8)) != b"little":
            detail = "was saved on a big-endian machine; load it there and save it as fpformat"
            raise SourceError("unsupported", where, detail)
    return archive
