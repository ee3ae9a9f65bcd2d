"""What a format offers: how it is told apart, read and written.

A format is a room below this one. Its `Format` stands in the table of `formats.registry`, which is
all that the commands know of it: nothing outside its room names it.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from fpformat.names import Path as StatePath
from fpformat_tools.streams.progress import Progress
from fpformat_tools.streams.ranges import Input
from fpformat_tools.streams.state import State

HEAD_NBYTES: Final = 4096

Problems = list[tuple[StatePath, str]]
"""Where a state holds what has no form, and what it is or why it has none."""


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a file that is to be told apart.

    Attributes:
        start: Its first bytes, `HEAD_NBYTES` of them unless it is shorter.
        source: The file, for those who have to look further.
    """

    start: bytes
    source: Input

    @property
    def nbytes(self) -> int:
        """Size of the whole file."""
        return self.source.nbytes

    @property
    def where(self) -> str:
        """The file, for messages."""
        return str(self.source.path)


def _no_content(head: Head) -> bool:
    return False


def _no_directory(names: Sequence[str]) -> bool:
    return False


def _no_file(path: Path, names: Sequence[str]) -> Path | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One form that an input may have.

    A file is told apart by its content. The three detectors are asked in this order, each of all
    kinds before the next: `detect_first` before the files of other programs are refused, since what
    it tells apart may look like those; `detect`; and `detect_last` when nothing else is left that
    the file could be, so that it may take what a damaged file begins with.

    Attributes:
        name: In reports for programs, unique among all kinds.
        title: In sentences, such as ``a legacy torch file``.
        open: Returns the state at a path; the stack keeps open what it is read from.
        sought: What was looked for, in the refusal of a file that is nothing; may be empty.
        is_directory: Whether a directory is one, by the names in it.
        find: Returns what to read of a directory that holds one, None where it holds none; raises
            where it cannot choose. Asked where `is_directory` of all kinds was false.
        is_lone: Whether a directory with one file of it, and nothing better, is taken for that.
    """

    name: str
    title: str
    open: Callable[[Path, ExitStack], State]
    sought: str = ""
    detect_first: Callable[[Head], bool] = _no_content
    detect: Callable[[Head], bool] = _no_content
    detect_last: Callable[[Head], bool] = _no_content
    is_directory: Callable[[Sequence[str]], bool] = _no_directory
    find: Callable[[Path, Sequence[str]], Path | None] = _no_file
    is_lone: bool = False


class SaveId(Enum):
    """Where the save id of a checkpoint comes from."""

    RANDOM = "random"
    CONTENT = "content"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What to create, and the choices there are; a format takes no notice of those it lacks.

    Attributes:
        max_shard_nbytes: Limit of a file where the output has several; None for the default.
        save_id: Where the save id comes from.
    """

    path: Path
    max_shard_nbytes: int | None = None
    save_id: SaveId = SaveId.RANDOM


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What an output amounts to.

    Attributes:
        paths: Every file or directory that appeared.
        nbytes: Size of all files.
        checkpoint_id: Of a checkpoint, else None.
    """

    paths: tuple[Path, ...]
    nbytes: int
    checkpoint_id: str | None = None


def _all_fits(state: State) -> Problems:
    return []


def _all_sound(target: Target) -> None:
    return None


def _one_reading(target: Target) -> int:
    return 1


def _one_file(path: Path) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """How a format is written.

    Attributes:
        endings: Of names that mean this format, in lower case; the empty one is that of no ending.
        help: What becomes of DST, for the help of the command.
        write: Writes a state; calls the progress with the number of bytes just moved.
        fit: Takes what the format cannot hold out of a state, and returns it.
        holds: What the format holds, in the refusal of what does not fit.
        numpy: Types of values that do not fit but would, were they made plain.
        is_flat: Whether the output has names only, so that a list has no place left to fill.
        check: Raises for a target or an environment that makes no sense, before anything is read.
        readings: How often the source is read.
        sharded: What an output of several files is called, where there can be one.
        is_sharded: Whether a path would be such an output.
    """

    endings: tuple[str, ...]
    help: str
    write: Callable[[State, Target, Progress], Written]
    fit: Callable[[State], Problems] = _all_fits
    holds: str = ""
    numpy: tuple[type, ...] = ()
    is_flat: bool = False
    check: Callable[[Target], None] = _all_sound
    readings: Callable[[Target], int] = _one_reading
    sharded: str = ""
    is_sharded: Callable[[Path], bool] = _one_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format: the kinds of input that are read as it, and how it is written.

    Attributes:
        name: As ``--to`` takes it.
        help: What is read as it, for the help of the command.
        kinds: Forms of inputs, the one to be asked first in front; none for what is not read.
        output: None for what is not written.
    """

    name: str
    help: str
    kinds: tuple[Kind, ...]
    output: Output | None
