"""Finding the newest checkpoint below a root.

Newest means the highest step; the time in a manifest only decides between equal steps, because
clocks of hosts differ. A directory that cannot be loaded is skipped with its reason. Staging and
trash (names that begin with ``.fps-``) and directories put aside are never looked at.

A writer may retire checkpoints meanwhile, and commits a newer one before it does. So a directory
that was listed and is gone when it is opened is no fault but a reason to list again, as long as the
root changes. Only a name that stays listed although nothing is there, as a network file system with
an outdated cache may have it, is given up in the end.
"""

import itertools
import json
import logging
import os
import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

from fpformat.arguments import checked_path
from fpformat.errors import (
    FormatError,
    PlanError,
    StorageError,
    UncommittedError,
    fault,
    storage_fault,
)
from fpformat.limits import MAX_INT, MAX_MANIFEST_NBYTES
from fpformat.names import MANIFEST_NAME, is_out_of_search
from fpformat.read.reader import Checkpoint, open_checkpoint
from fpformat.read.source import open_regular, read_exact
from fpformat.read.verify import verify_open

_LOG: Final = logging.getLogger("fpformat_io")
_STEP: Final = re.compile(r"step-(\d{10,})")
# What parsing and looking into a document of unknown content may raise.
_NOT_A_MANIFEST: Final = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
# In so many listings a directory that is gone ends the search; later the next one is opened.
_EARLY_ROUNDS: Final = 50
_IDLE_WAIT_S: Final = 0.01

Verify = Literal["structure", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestCheckpoint:
    """The newest checkpoint that can be loaded.

    Attributes:
        path: Its directory; the object itself is accepted wherever a path is. It is only a name:
            where a writer retires checkpoints, it may be gone at any time.
        step: Training step in the manifest, if any.
        checkpoint_id: SHA-256 in hex that names the whole state.
        skipped: Newer directories that cannot be loaded, each with the reason.
    """

    path: Path
    step: int | None
    checkpoint_id: str
    skipped: tuple[tuple[Path, str], ...] = ()

    def __fspath__(self) -> str:
        """Return the path as text."""
        return os.fspath(self.path)


def step_of(name: str) -> int | None:
    """Return the step in the name of a `Checkpointer`'s directory, None for another name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


_Identity: TypeAlias = tuple[int, int]
_Claim: TypeAlias = tuple[int, int]
_UNKNOWN: Final[_Identity] = (-1, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A directory that may be a checkpoint.

    Attributes:
        identity: Device and inode, which tell it from another one of the same name; None when it
            is gone.
        claim: Step and time that its manifest claims, to sort by; nothing is trusted yet.
    """

    path: Path
    identity: _Identity | None
    claim: _Claim


class _GoneError(Exception):
    """A directory that was listed is not there any more, or another one has its name."""


def _identity(path: "int | Path") -> _Identity | None:
    """Return device and inode of a directory, None when there is none."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return _UNKNOWN
    return status.st_dev, status.st_ino


def _listing(root: Path) -> dict[str, int]:
    """Return name and inode of every directory and link to one, staging and trash included.

    Raises:
        StorageError: The root cannot be listed, or is a relative path and the working directory
            was removed, so that nobody can say whether it exists.
    """
    try:
        with os.scandir(root) as entries:
            return {entry.name: entry.inode() for entry in entries if _is_directory(entry)}
    except FileNotFoundError as error:
        try:
            os.getcwd()
        except OSError as outer:
            if not root.is_absolute():
                raise storage_fault(str(root), "no working directory", outer) from error
        return {}
    except OSError as error:
        raise storage_fault(str(root), "cannot be listed", error) from error


def _is_directory(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _candidate(path: Path) -> _Candidate | None:
    """Return the candidate at a path, None for a directory that is none."""
    claimed = step_of(path.name)
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return _gone(path)
    except OSError:
        if claimed is None and not os.path.lexists(path / MANIFEST_NAME):
            return None
        return _Candidate(path=path, identity=_identity(path), claim=_as_claim(claimed))
    try:
        identity = _identity(directory)
        claim = _claim(path, directory)
    finally:
        os.close(directory)
    if claim is None and identity != _identity(path):
        return _gone(path)
    if claim is None and claimed is None:
        return None
    return _Candidate(path=path, identity=identity, claim=claim or _as_claim(claimed))


def _gone(path: Path) -> _Candidate:
    """Return what stands for a directory that is gone: it may have been the newest."""
    claimed = step_of(path.name)
    return _Candidate(path=path, identity=None, claim=(MAX_INT if claimed is None else claimed, 0))


def _as_claim(step: int | None, created_us: int = -1) -> _Claim:
    return (-1 if step is None else step, created_us)


def _claim(path: Path, directory: int) -> _Claim | None:
    """Return step and time in the manifest of an open directory, None without a manifest."""
    claimed = step_of(path.name)
    where = str(path / MANIFEST_NAME)
    try:
        descriptor, nbytes = open_regular(
            directory, MANIFEST_NAME, follow_symlinks=False, where=where, absent="DIR-1"
        )
    except UncommittedError:
        return None
    except FormatError:
        return _as_claim(claimed)
    try:
        manifest = bytearray(min(nbytes, MAX_MANIFEST_NBYTES))
        read_exact(descriptor, manifest, offset=0, where=where)
        document = json.loads(manifest)["checkpoint"]
        step = document.get("step")
        return _as_claim(step if type(step) is int else claimed, int(document["created_us"]))
    except (FormatError, *_NOT_A_MANIFEST):
        return _as_claim(claimed)
    finally:
        os.close(descriptor)


def _examine(candidate: _Candidate, verify: Verify) -> LatestCheckpoint:
    """Open a candidate; what is verified is what was opened, whatever happens to its name.

    Raises:
        FormatError: It cannot be loaded.
        _GoneError: It was removed, or another one took its name.
    """
    if candidate.identity is None:
        raise _GoneError
    try:
        with open_checkpoint(candidate.path) as checkpoint:
            if verify == "full":
                _check_bytes(checkpoint)
            return LatestCheckpoint(
                path=candidate.path,
                step=checkpoint.manifest.step,
                checkpoint_id=checkpoint.checkpoint_id,
            )
    except FormatError as error:
        if _identity(candidate.path) != candidate.identity:
            raise _GoneError from error
        raise


def _check_bytes(checkpoint: Checkpoint) -> None:
    report = verify_open(checkpoint)
    if report.problems:
        first = report.problems[0]
        raise fault(first.clause, first.where, first.detail)


@dataclass(slots=True, kw_only=True)
class _Round:
    """What one listing of a root gave.

    Attributes:
        gone: A directory that was listed and not there any more.
        failure: The first error of the operating system among what was skipped.
    """

    found: LatestCheckpoint | None = None
    skipped: list[tuple[Path, str]] = field(default_factory=list)
    gone: Path | None = None
    failure: StorageError | None = None

    def skip(self, path: Path, error: FormatError) -> None:
        self.skipped.append((path, str(error)))
        if isinstance(error, StorageError):
            self.failure = self.failure or error


def _candidates(root: Path, listing: dict[str, int]) -> list[_Candidate]:
    """Return the candidates of a listing, newest first."""
    names = [name for name in listing if not is_out_of_search(name)]
    candidates = [each for name in names if (each := _candidate(root / name))]
    return sorted(candidates, key=lambda each: (each.claim, each.path.name), reverse=True)


def _search(root: Path, listing: dict[str, int], verify: Verify, *, stop_at_gone: bool) -> _Round:
    """Open the candidates of a listing until one can be loaded."""
    round_ = _Round()
    for candidate in _candidates(root, listing):
        try:
            round_.found = _examine(candidate, verify)
            break
        except _GoneError:
            round_.gone = candidate.path
            if stop_at_gone:
                break
        except FormatError as error:
            round_.skip(candidate.path, error)
    return round_


def latest(
    root: "str | os.PathLike[str]", *, verify: Verify = "structure"
) -> LatestCheckpoint | None:
    """Find the newest checkpoint below `root` that can be loaded.

    A writer may save and retire checkpoints meanwhile: one that is retired while it is opened is
    passed over, and the root is listed again. Its retention may also take the result at any time
    after this returned.

    Args:
        root: Directory that holds checkpoints, such as a `Checkpointer`'s.
        verify: ``"structure"`` opens it and checks everything but the stored bytes of tensors;
            ``"full"`` reads and checks every byte.

    Returns:
        The checkpoint with the highest step, or None when there is none. What was skipped is in
        the result and in the log.

    Raises:
        PlanError: `verify` or `root` is something else, or `root` is itself a checkpoint.
        StorageError: `root` cannot be read, or nothing could be loaded and the operating system
            failed to read a candidate.
    """
    if verify not in ("structure", "full"):
        raise PlanError(f"verify={verify!r}: expected 'structure' or 'full'")
    root = Path(checked_path(root, "root"))
    if os.path.lexists(root / MANIFEST_NAME):
        raise PlanError(f"{root}: is itself a checkpoint; name the directory that holds them")
    last = _last_search(root, verify)
    for _, reason in last.skipped:
        _LOG.warning("skipped: %s", reason)
    if last.found:
        return replace(last.found, skipped=tuple(last.skipped))
    if last.failure:
        raise last.failure
    if last.gone:
        raise fault("DIR-7", str(last.gone), "is listed again and again, but nothing is there")
    return None


def _last_search(root: Path, verify: Verify) -> _Round:
    """List and search until something is found or there is nothing more to wait for.

    One listing alone proves no absence: a rename while it is made can hide both the old name and
    the new one. So nothing is taken for absent before two listings in a row are the same.
    """
    before: dict[str, int] | None = None
    for number in itertools.count():
        listing = _listing(root)
        is_early = number < _EARLY_ROUNDS
        last = _search(root, listing, verify, stop_at_gone=is_early)
        is_unchanged = listing == before
        if last.found or (is_unchanged and not (last.gone and is_early)):
            break
        if is_unchanged:
            time.sleep(_IDLE_WAIT_S)
        before = listing
    return last
