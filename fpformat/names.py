"""Names: of tensors from their paths in the state, of files and directories from numbers.

A path is a tuple of elements. An element is a pair of its kind and its value; its text is unique,
so that no two paths share a name. The escape character is ``~``.
"""

import re
from typing import Final, Literal, TypeAlias

from fpformat.errors import PlanError
from fpformat.limits import MAX_NAME_NBYTES

Key: TypeAlias = str | int | bool | None
PathElement: TypeAlias = (
    tuple[Literal["key"], Key]
    | tuple[Literal["index"], int]
    | tuple[Literal["attr", "part"], str]
    | tuple[Literal["context"], None]
)
Path: TypeAlias = tuple[PathElement, ...]

MANIFEST_NAME: Final = "manifest.json"
STAGING_PREFIX: Final = ".fps-"
TREE_NAME: Final = "tree"
HIDDEN_PREFIX: Final = "~h/"
_SET_ASIDE: Final = re.compile(r".*\.(bad|superseded)-[0-9a-f]{32}", re.DOTALL)
_ESCAPES: Final = {"0": "~", "1": "/", "2": "\0"}


def escape(text: str) -> str:
    """Return `text` with the three reserved characters escaped."""
    return text.replace("~", "~0").replace("/", "~1").replace("\0", "~2")


def unescape(text: str) -> str:
    """Return the text that `escape` was given; ValueError for an unknown escape."""
    head, *rest = text.split("~")
    pieces = [head]
    for part in rest:
        if not part or part[0] not in _ESCAPES:
            raise ValueError(f"unknown escape in name element {text!r}")
        pieces += (_ESCAPES[part[0]], part[1:])
    return "".join(pieces)


def element_text(element: PathElement) -> str:
    """Return the text of one path element.

    spec: NAM-4
    """
    kind, value = element
    if kind == "index":
        return f"~l{value}"
    if kind == "context":
        return "~c"
    if kind in ("attr", "part"):
        return f"~{kind[0]}{escape(str(value))}"
    if value is None:
        return "~n"
    if isinstance(value, bool):
        return f"~b{int(value)}"
    return escape(value) if isinstance(value, str) else f"~i{value}"


def name_of(path: Path) -> str:
    """Return the name of the tensor at `path`.

    Raises:
        PlanError: The name is longer than 65,535 bytes of UTF-8, or has no UTF-8 form.
    """
    name = "/".join(map(element_text, path))
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError as error:
        raise PlanError(f"{name!r}: has a lone surrogate, so no UTF-8 form (NAM-2)") from error
    if nbytes > MAX_NAME_NBYTES:
        limit = f"at most {MAX_NAME_NBYTES} are allowed (NAM-4)"
        raise PlanError(f"{name[:60]!r}...: the name has {nbytes} bytes, {limit}")
    return name


def _element_of(text: str) -> PathElement:
    if len(text) < 2 or text[0] != "~" or text[1] in _ESCAPES:
        return ("key", unescape(text))
    tag, rest = text[1], text[2:]
    if tag == "i":
        return ("key", int(rest))
    if tag == "l":
        return ("index", int(rest))
    if tag == "b" and rest in ("0", "1"):
        return ("key", rest == "1")
    if text == "~n":
        return ("key", None)
    if text == "~c":
        return ("context", None)
    if tag == "a":
        return ("attr", unescape(rest))
    if tag == "p":
        return ("part", unescape(rest))
    raise ValueError(f"unknown escape in name element {text!r}")


def path_of(name: str) -> Path:
    """Return the path whose name is `name`; the empty name is taken for one empty key.

    Raises:
        ValueError: No path has this name.
    """
    path = tuple(map(_element_of, name.split("/")))
    if "/".join(map(element_text, path)) != name:
        raise ValueError(f"{name!r} spells a number in a way that no path does")
    return path


def segment_name(ordinal: int) -> str:
    """Return the file name of segment number `ordinal`."""
    return f"seg-{ordinal:06d}.fps"


def staging_name(save_id: bytes) -> str:
    """Return the name of the staging directory of a save."""
    return f"{STAGING_PREFIX}{save_id.hex()}"


def trash_name(save_id: bytes) -> str:
    """Return the name that a retired checkpoint gets before its files are removed."""
    return f"{STAGING_PREFIX}trash-{save_id.hex()}"


def aside_name(name: str, save_id: bytes) -> str:
    """Return the name to which an unloadable directory called `name` is moved."""
    return f"{name}.bad-{save_id.hex()}"


def superseded_name(name: str, mark: bytes) -> str:
    """Return the name to which a checkpoint that a run went back behind is moved."""
    return f"{name}.superseded-{mark.hex()}"


def is_out_of_search(name: str) -> bool:
    """Return whether a search for checkpoints passes a name over.

    spec: COM-19
    """
    return name.startswith(STAGING_PREFIX) or _SET_ASIDE.fullmatch(name) is not None


def step_name(step: int) -> str:
    """Return the name of the checkpoint directory of a training step."""
    return f"step-{step:010d}"
