"""The manifest: the one document that makes a checkpoint exist, to and from canonical JSON.

The bytes are ``{"checkpoint":X,"id":"H"}`` with H the SHA-256 of the bytes X. So integrity can be
checked before anything is parsed. Canonical means that a document has one spelling: a reader
writes what it understood and compares bytes, which refuses duplicate keys, white space, other
escapes and floats in one rule.
"""

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any, Final

from fpformat.errors import fault
from fpformat.limits import (
    FEATURE_UNREGISTERED,
    FORMAT_NAME,
    INCOMPAT_BITS,
    MAX_INT,
    MAX_JSON_DEPTH,
    MAX_MANIFEST_NBYTES,
    MAX_SEGMENTS,
    MAX_WORLD_SIZE,
    SAVE_ID_NBYTES,
    VERSION,
)
from fpformat.records.model import Extension, Features, Manifest, SegmentRecord

_PREFIX: Final = b'{"checkpoint":'
_SUFFIX: Final = re.compile(rb',"id":"([0-9a-f]{64})"\}\Z')
_SUFFIX_NBYTES: Final = 73
_KEYS: Final = {
    "created_us",
    "extensions",
    "features",
    "format",
    "save_id",
    "segments",
    "user",
    "version",
    "world_size",
}
_SEGMENT_KEYS: Final = {"crc32c", "index_nbytes", "index_offset", "index_sha256", "nbytes"}
_FEATURE_SETS: Final = ("compat", "incompat", "ro_compat")
_STRING_OR_BRACKET: Final = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)


def canonical(value: Any) -> bytes:
    """Return the one spelling of `value`; ValueError for a lone surrogate or a NaN."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def dump_manifest(manifest: Manifest) -> tuple[bytes, str]:
    """Return the bytes of the manifest and the checkpoint id (64 hex digits)."""
    document: dict[str, Any] = {
        "created_us": manifest.created_us,
        "extensions": [
            {"data": e.content, "must_understand": e.must_understand, "name": e.name}
            for e in manifest.extensions
        ],
        "features": {name: list(getattr(manifest.features, name)) for name in _FEATURE_SETS},
        "format": FORMAT_NAME,
        "save_id": manifest.save_id.hex(),
        "segments": [
            {
                "crc32c": f"{record.crc32c:08x}",
                "index_nbytes": record.index_nbytes,
                "index_offset": record.index_offset,
                "index_sha256": record.index_sha256.hex(),
                "nbytes": record.nbytes,
            }
            for record in manifest.segments
        ],
        "user": [[key, manifest.user[key]] for key in sorted(manifest.user)],
        "version": list(manifest.version),
        "world_size": manifest.world_size,
    }
    if manifest.step is not None:
        document["step"] = manifest.step
    inner = canonical(document)
    digest = hashlib.sha256(inner).hexdigest()
    return _PREFIX + inner + f',"id":"{digest}"}}'.encode(), digest


def parse_manifest(document: bytes, where: str) -> tuple[Manifest, str]:
    """Parse the manifest and return it with the checkpoint id.

    Raises:
        FormatError: MAN-1 to MAN-11 or FEA-1, in the order of clause RDR-2.
    """
    inner, checkpoint_id = _unframe(document, where)
    value = _parse_canonical(inner, where)
    _check_version(value, where)
    return _from_document(value, where), checkpoint_id


def _unframe(document: bytes, where: str) -> tuple[bytes, str]:
    if len(document) > MAX_MANIFEST_NBYTES:
        raise fault("MAN-4", where, f"has {len(document)} bytes; the limit is 16 MiB")
    suffix = _SUFFIX.search(document, max(len(document) - _SUFFIX_NBYTES, 0))
    framed = (document.startswith(_PREFIX), suffix is not None)
    if document[:1] in (b"", b"\0"):
        raise fault("MAN-2", where, "is empty or overwritten with zeros")
    if not any(framed):
        raise fault("MAN-1", where, "is not the manifest of a checkpoint")
    if not all(framed) or suffix is None:
        part = "end" if framed[0] else "start"
        raise fault("MAN-2", where, f"the {part} of the manifest is damaged or missing")
    inner = document[len(_PREFIX) : -_SUFFIX_NBYTES]
    if hashlib.sha256(inner).hexdigest() != (stated := suffix[1].decode()):
        raise fault("MAN-3", where, "the SHA-256 of the content differs from the id it states")
    return inner, stated


def _parse_canonical(inner: bytes, where: str) -> Any:
    if (depth := _nesting(inner)) > MAX_JSON_DEPTH:
        raise fault("MAN-10", where, f"nests {depth} levels; the limit is {MAX_JSON_DEPTH}")
    try:
        value = json.loads(inner)
        same = canonical(value) == inner
    except (ValueError, RecursionError) as error:
        raise fault("MAN-5", where, f"is not canonical JSON: {error}") from error
    if not same:
        raise fault("MAN-5", where, "is not canonical JSON: it has another spelling")
    _check_values(value, where)
    return value


def _nesting(inner: bytes) -> int:
    """Return the depth of nesting without parsing; strings are passed over."""
    depth = deepest = 0
    for match in _STRING_OR_BRACKET.finditer(inner):
        first = inner[match.start()]
        if first in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif first in b"]}":
            depth -= 1
    return deepest


def _check_values(value: Any, where: str) -> None:
    """Refuse what JSON has but the profile has not: null, floats, other integers, other keys."""
    if isinstance(value, dict):
        for key in value:
            if not key.isascii():
                raise fault("MAN-5", where, f"key {key!r} is not ASCII")
        for item in value.values():
            _check_values(item, where)
    elif isinstance(value, list):
        for item in value:
            _check_values(item, where)
    elif isinstance(value, float) or value is None:
        raise fault("MAN-5", where, f"has the value {value}; floats and null have no place")
    elif isinstance(value, int) and not 0 <= value <= MAX_INT:
        raise fault("MAN-5", where, f"has the integer {value}; the range is 0 to 2^53-1")


def _check_version(value: Any, where: str) -> None:
    version = value.get("version") if isinstance(value, dict) else None
    if not (isinstance(version, list) and len(version) == 2 and all(map(_is_int, version))):
        raise fault("MAN-6", where, "version is not a list of two integers")
    if version[0] != VERSION[0]:
        detail = f"format version {version[0]}.{version[1]}; this reader knows {VERSION[0]}.x"
        raise fault("MAN-7", where, detail)


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_hex(value: Any, *, digits: int) -> bool:
    return isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", value) is not None


def _from_document(value: dict[str, Any], where: str) -> Manifest:
    _check_types(value, where)
    _check_sorting(value, where)
    _check_meaning(value, where)
    return Manifest(
        save_id=bytes.fromhex(value["save_id"]),
        segments=tuple(map(_segment, value["segments"])),
        created_us=value["created_us"],
        step=value.get("step"),
        user=dict(value["user"]),
        world_size=value["world_size"],
        features=Features(**{name: tuple(value["features"][name]) for name in _FEATURE_SETS}),
        extensions=tuple(
            Extension(name=e["name"], must_understand=e["must_understand"], content=e["data"])
            for e in value["extensions"]
        ),
        version=(value["version"][0], value["version"][1]),
    )


def _check_types(value: dict[str, Any], where: str) -> None:
    """Check that every key is there, no other, and each has a value of its type."""
    if set(value) - {"step"} != _KEYS:
        differing = sorted(set(value) - {"step"} ^ _KEYS)
        raise fault("MAN-6", where, f"missing or unknown keys: {', '.join(differing)}")
    expected = {
        "created_us, world_size and step": all(
            _is_int(value.get(name, 0)) for name in ("created_us", "world_size", "step")
        ),
        "save_id": _is_hex(value["save_id"], digits=2 * SAVE_ID_NBYTES),
        "format": isinstance(value["format"], str),
        "segments": isinstance(value["segments"], list),
        "user": _is_list_of(value["user"], _is_pair),
        "features": isinstance(value["features"], dict)
        and set(value["features"]) == set(_FEATURE_SETS)
        and all(_is_list_of(names, _is_str) for names in value["features"].values()),
        "extensions": _is_list_of(value["extensions"], _is_extension),
    }
    for name, is_right in expected.items():
        if not is_right:
            raise fault("MAN-6", where, f"{name}: not of the type that the key demands")
    for ordinal, record in enumerate(value["segments"]):
        if not _is_segment(record):
            detail = f"is not an object of {', '.join(sorted(_SEGMENT_KEYS))} with their types"
            raise fault("MAN-6", f"{where}: segment {ordinal}", detail)


def _is_list_of(value: Any, is_item: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_item, value))


def _is_str(value: Any) -> bool:
    return isinstance(value, str)


def _is_pair(value: Any) -> bool:
    return _is_list_of(value, _is_str) and len(value) == 2


def _is_extension(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"data", "must_understand", "name"}
        and isinstance(value["must_understand"], bool)
        and isinstance(value["name"], str)
    )


def _is_segment(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == _SEGMENT_KEYS
        and _is_hex(value["crc32c"], digits=8)
        and _is_hex(value["index_sha256"], digits=64)
        and all(_is_int(value[name]) for name in ("index_nbytes", "index_offset", "nbytes"))
    )


def _segment(value: dict[str, Any]) -> SegmentRecord:
    return SegmentRecord(
        nbytes=value["nbytes"],
        index_offset=value["index_offset"],
        index_nbytes=value["index_nbytes"],
        index_sha256=bytes.fromhex(value["index_sha256"]),
        crc32c=int(value["crc32c"], 16),
    )


def _check_sorting(value: dict[str, Any], where: str) -> None:
    _check_ascending([pair[0] for pair in value["user"]], "user", where)
    for name in _FEATURE_SETS:
        _check_ascending(value["features"][name], f"features.{name}", where)
    _check_ascending([item["name"] for item in value["extensions"]], "extensions", where)


def _check_meaning(value: dict[str, Any], where: str) -> None:
    if not 1 <= (count := len(value["segments"])) <= MAX_SEGMENTS:
        raise fault("MAN-10", where, f"lists {count} segments, not 1 to {MAX_SEGMENTS}")
    if value["format"] != FORMAT_NAME:
        raise fault("MAN-11", where, f"format is {value['format']!r}, not {FORMAT_NAME!r}")
    if not 1 <= value["world_size"] <= MAX_WORLD_SIZE:
        raise fault("MAN-11", where, f"world_size is {value['world_size']}, not 1 to 2^32-1")
    if unknown := [name for name in value["features"]["incompat"] if name not in INCOMPAT_BITS]:
        raise fault("FEA-1", where, f"needs the unknown feature {', '.join(unknown)}")
    if needed := [item["name"] for item in value["extensions"] if item["must_understand"]]:
        raise fault("MAN-9", where, f"needs the unknown extension {', '.join(needed)}")


def _check_ascending(names: list[str], what: str, where: str) -> None:
    if any(first >= second for first, second in zip(names, names[1:], strict=False)):
        raise fault("MAN-8", where, f"{what} is not sorted by unique names")


def check_editor(manifest: Manifest, where: str) -> None:
    """Check that an editor (one that copies, collects or removes) knows all it must keep.

    Raises:
        FormatError: FEA-2 for a feature that readers may ignore and editors may not.
    """
    if unknown := manifest.features.ro_compat:
        detail = f"has features that this editor does not know: {', '.join(unknown)}"
        raise fault("FEA-2", where, detail)


def feature_words(features: Features) -> tuple[int, int, int]:
    """Return the header words (incompat, ro_compat, compat) of a set of features.

    spec: FEA-4
    """
    words = []
    for names, bits in (
        (features.incompat, INCOMPAT_BITS),
        (features.ro_compat, {}),
        (features.compat, {}),
    ):
        word = 0
        for name in names:
            word |= bits.get(name, FEATURE_UNREGISTERED)
        words.append(word)
    return words[0], words[1], words[2]
