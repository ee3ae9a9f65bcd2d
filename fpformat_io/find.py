"""Finding the newest checkpoint below a root.

Newest means the highest step; the time in a manifest only decides between equal steps, because
clocks of hosts differ. A directory that cannot be loaded is skipped with its reason. Staging and
trash (names that begin with ``.fps-``) and directories put aside are never looked at.
"""

import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from fpformat.errors import FormatError, PlanError, StorageError, fault
from fpformat.names import MANIFEST_NAME, is_out_of_search
from fpformat.reader import open_checkpoint
from fpformat.verify import verify_checkpoint

_LOG: Final = logging.getLogger("fpformat_io")
_STEP: Final = re.compile(r"step-(\d{10,})")
_PEEK_NBYTES: Final = 16 * 1024 * 1024

Verify = Literal["structure", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestCheckpoint:
    """The newest checkpoint that can be loaded.

    Attributes:
        path: Its directory; the object itself is accepted wherever a path is.
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


def _candidates(root: Path) -> Iterator[Path]:
    with os.scandir(root) as entries:
        for entry in entries:
            if is_out_of_search(entry.name):
                continue
            path = root / entry.name
            if entry.is_dir() and (step_of(entry.name) is not None or _has_manifest(path)):
                yield path


def _has_manifest(path: Path) -> bool:
    return os.path.lexists(path / MANIFEST_NAME)


def _peek(path: Path) -> tuple[int, int]:
    """Return step and time that the manifest claims, to sort by; nothing is trusted yet."""
    claimed = step_of(path.name)
    created_us = -1
    try:
        with open(path / MANIFEST_NAME, "rb") as manifest:
            document = json.loads(manifest.read(_PEEK_NBYTES))["checkpoint"]
        step = document.get("step")
        created_us = int(document["created_us"])
        claimed = step if type(step) is int else claimed
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    return (-1 if claimed is None else claimed, created_us)


def _examine(path: Path, verify: Verify) -> LatestCheckpoint:
    with open_checkpoint(path) as checkpoint:
        found = LatestCheckpoint(
            path=path, step=checkpoint.manifest.step, checkpoint_id=checkpoint.checkpoint_id
        )
    if verify == "full":
        report = verify_checkpoint(path)
        if report.problems:
            first = report.problems[0]
            raise fault(first.clause, first.where, first.detail)
    return found


def latest(
    root: "str | os.PathLike[str]", *, verify: Verify = "structure"
) -> LatestCheckpoint | None:
    """Find the newest checkpoint below `root` that can be loaded.

    Args:
        root: Directory that holds checkpoints, such as a `Checkpointer`'s.
        verify: ``"structure"`` opens it and checks everything but the stored bytes of tensors;
            ``"full"`` reads and checks every byte.

    Returns:
        The checkpoint with the highest step, or None when there is none. What was skipped is in
        the result and in the log.

    Raises:
        PlanError: `verify` is something else, or `root` is itself a checkpoint.
        StorageError: `root` cannot be read, or nothing could be loaded and the operating system
            failed to read a candidate.
    """
    if verify not in ("structure", "full"):
        raise PlanError(f"verify={verify!r}: expected 'structure' or 'full'")
    root = Path(root)
    if _has_manifest(root):
        raise PlanError(f"{root}: is itself a checkpoint; name the directory that holds them")
    try:
        paths = sorted(_candidates(root), key=lambda path: (_peek(path), path.name), reverse=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise fault("DIR-7", str(root), f"cannot be listed: {error.strerror}") from error
    skipped: list[tuple[Path, str]] = []
    failure: StorageError | None = None
    for path in paths:
        try:
            found = _examine(path, verify)
        except FormatError as error:
            _LOG.warning("skipped: %s", error)
            skipped.append((path, str(error)))
            if isinstance(error, StorageError):
                failure = failure or error
        else:
            return LatestCheckpoint(
                path=found.path,
                step=found.step,
                checkpoint_id=found.checkpoint_id,
                skipped=tuple(skipped),
            )
    if failure:
        raise failure
    return None
