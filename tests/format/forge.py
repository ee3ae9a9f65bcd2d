"""Break one thing in a checkpoint and mend every checksum above it.

This shares no code with the library: positions come from the byte tables of the specification. A
test names a stage and a patch; everything that covers the patched bytes is computed again, so that
exactly one thing is wrong with the result.
"""

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENTRY = struct.Struct("<IIIIQQ32s")
POLYNOMIAL = 0x82F63B78
TABLE = [0] * 256
for _byte in range(256):
    _state = _byte
    for _ in range(8):
        _state = (_state >> 1) ^ (POLYNOMIAL if _state & 1 else 0)
    TABLE[_byte] = _state


def crc32c(data: bytes) -> int:
    state = 0xFFFFFFFF
    for byte in data:
        state = (state >> 8) ^ TABLE[(state ^ byte) & 0xFF]
    return state ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")


Patch = Callable[[bytearray], None]


@dataclass(slots=True)
class Table:
    kind: int
    record_nbytes: int
    body: bytearray
    flags: int = 1
    zero: int = 0
    count: int | None = None
    shift: int = 0

    def __len__(self) -> int:
        return len(self.body) // self.record_nbytes

    def put(self, row: int, offset: int, code: str, value: int) -> None:
        """Set one little-endian field of one record."""
        struct.pack_into("<" + code, self.body, row * self.record_nbytes + offset, value)

    def get(self, row: int, offset: int, code: str) -> int:
        return struct.unpack_from("<" + code, self.body, row * self.record_nbytes + offset)[0]


@dataclass(slots=True)
class Patches:
    """What to do at each stage of rebuilding one segment, in this order."""

    data: Patch | None = None
    tables: Callable[[dict[int, Table]], None] | None = None
    index: Patch | None = None
    footer: Patch | None = None
    header: Patch | None = None
    file: Patch | None = None
    sum_pieces: bool = True
    sum_header: bool = True
    sum_footer: bool = True
    sum_directory: bool = True


@dataclass(slots=True)
class Forge:
    """A committed checkpoint in memory, to be broken and written elsewhere."""

    source: Path
    patches: dict[int, Patches] = field(default_factory=dict)
    manifest: Callable[[dict[str, Any]], None] | None = None
    inner: Callable[[bytes], bytes] | None = None
    document: Callable[[bytes], bytes] | None = None

    def write(self, target: Path) -> Path:
        target.mkdir()
        state = json.loads((self.source / "manifest.json").read_bytes())["checkpoint"]
        for ordinal, record in enumerate(state["segments"]):
            name = f"seg-{ordinal:06d}.fps"
            raw = bytearray((self.source / name).read_bytes())
            if ordinal in self.patches:
                raw, new = rebuild(raw, self.patches[ordinal])
                record.update(new)
            (target / name).write_bytes(raw)
        if self.manifest:
            self.manifest(state)
        inner = json.dumps(state, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(
            "utf-8", "surrogatepass"
        )
        inner = self.inner(inner) if self.inner else inner
        digest = hashlib.sha256(inner).hexdigest()
        document = b'{"checkpoint":' + inner + f',"id":"{digest}"}}'.encode()
        document = self.document(document) if self.document else document
        (target / "manifest.json").write_bytes(document)
        return target


def read_tables(raw: bytearray) -> tuple[int, dict[int, Table]]:
    """Return where the index lies and its tables."""
    (index_offset,) = struct.unpack_from("<Q", raw, len(raw) - 128)
    (count,) = struct.unpack_from("<I", raw, index_offset + 8)
    tables = {}
    for number in range(count):
        entry = ENTRY.unpack_from(raw, index_offset + 32 + 64 * number)
        kind, flags, record_nbytes, _, rows, offset, _ = entry
        begin = index_offset + offset
        body = raw[begin : begin + rows * record_nbytes]
        tables[kind] = Table(kind, record_nbytes, bytearray(body), flags)
    return index_offset, tables


def rebuild(raw: bytearray, patches: Patches) -> tuple[bytearray, dict[str, Any]]:
    """Return the patched segment and what the manifest has to say of it."""
    align = 1 << raw[64]
    header, footer = raw[:align], raw[-align:]
    index_offset, tables = read_tables(raw)
    data = raw[align:index_offset]
    if patches.data:
        patches.data(data)
        if patches.sum_pieces:
            sum_pieces(data, tables, align, 1 << raw[66])
    if patches.tables:
        patches.tables(tables)
    index = build_index(list(tables.values()), align)
    if patches.index:
        patches.index(index)
    (count,) = struct.unpack_from("<I", index, 8)
    digest = hashlib.sha256(index[: 32 + 64 * count]).digest()
    record = len(footer) - 128
    nbytes = align + len(data) + len(index) + align
    struct.pack_into("<QQ", footer, record, align + len(data), len(index))
    if patches.sum_directory:
        footer[record + 16 : record + 48] = digest
    struct.pack_into("<Q", footer, record + 64, nbytes)
    if patches.footer:
        patches.footer(footer)
    if patches.sum_footer:
        footer[record + 116 : record + 120] = masked(bytes(footer[record : record + 116]))
    if patches.header:
        patches.header(header)
    if patches.sum_header:
        header[124:128] = masked(bytes(header[:124]))
    whole = header + data + index + footer
    if patches.file:
        patches.file(whole)
    return whole, {
        "crc32c": f"{crc32c(bytes(whole)):08x}",
        "index_nbytes": len(index),
        "index_offset": align + len(data),
        "index_sha256": bytes(footer[record + 16 : record + 48]).hex(),
        "nbytes": len(whole),
    }


def build_index(tables: list[Table], align: int) -> bytearray:
    position = 32 + 64 * len(tables)
    entries, bodies = bytearray(), bytearray()
    for table in tables:
        offset = -(-position // 64) * 64 + table.shift
        bodies += bytes(offset - position) + table.body
        position = offset + len(table.body)
        count = len(table) if table.count is None else table.count
        digest = hashlib.sha256(table.body).digest()
        entries += ENTRY.pack(
            table.kind, table.flags, table.record_nbytes, table.zero, count, offset, digest
        )
    nbytes = -(-position // align) * align
    header = struct.pack("<8sIIQQ", b"FPSINDEX", len(tables), 64, nbytes, 0)
    return bytearray((header + entries + bodies).ljust(nbytes, b"\0"))


def sum_pieces(data: bytearray, tables: dict[int, Table], align: int, piece: int) -> None:
    """Compute the checksum of every piece again."""
    sums = []
    for row in range(len(tables[2])):
        offset, nbytes = tables[2].get(row, 0, "Q") - align, tables[2].get(row, 16, "Q")
        sums += [
            crc32c(bytes(data[at : min(at + piece, offset + nbytes)]))
            for at in range(offset, offset + nbytes, piece)
        ]
    tables[5].body = bytearray(struct.pack(f"<{len(sums)}I", *sums))
