"""A run that goes back: what becomes of checkpoints that are newer than where it resumes.

They would stay the newest, so the next restart would resume from the future that the run left.
Nobody but the user can tell a run that goes back from one that was pointed at a wrong directory, so
the first says so and the second gets an error.
"""

import os
from pathlib import Path
from typing import Final

from fpformat.errors import PlanError
from fpformat_io.session.latest import LatestCheckpoint, Verify, latest, step_of
from fpformat_io.session.retention import supersede

_MARK_NBYTES: Final = 16


def _newer(root: Path, step: int, verify: Verify = "structure") -> LatestCheckpoint | None:
    newest = latest(root, verify=verify)
    if newest is None or newest.step is None or newest.step <= step:
        return None
    return newest


def check_newest(root: Path, step: int) -> None:
    """Refuse to save a step in a root where it would not become the newest.

    Raises:
        PlanError: There is a checkpoint of a higher step of which every byte is right.
        StorageError: The root cannot be read.
    """
    # A run resumes from the newest sound one; those above that are damaged are in nobody's way.
    newest = _newer(root, step) and _newer(root, step, "full")
    if newest:
        raise PlanError(
            f"step {step}: {newest.path} has step {newest.step} and would stay the latest. To go "
            "back, open the root once with resume_from=<the step that is resumed>, which moves "
            "newer checkpoints out of the way; give a new run a root of its own"
        )


def go_back(root: Path, step: int) -> tuple[Path, ...]:
    """Move all checkpoints above a step out of the way of searches, the newest first.

    Nothing is removed: a directory gets its name back by a rename.

    Args:
        root: Directory of the checkpoints.
        step: The step that a run resumes from.

    Returns:
        Where they are now.

    Raises:
        PlanError: One is not named after its step, so it is not a run's own.
        OSError: One cannot be renamed.
        StorageError: The root cannot be read.
    """
    mark = os.urandom(_MARK_NBYTES)
    moved: list[Path] = []
    while newest := _newer(root, step):
        if step_of(newest.path.name) != newest.step:
            detail = f"has step {newest.step}, above {step}, and another name than a Checkpointer's"
            raise PlanError(f"resume_from={step}: {newest.path} {detail}; move it elsewhere first")
        moved.append(supersede(newest.path, mark))
    return tuple(moved)
