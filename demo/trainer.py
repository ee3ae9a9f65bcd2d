"""Start the trainer as a process of its own, and kill one in the middle of a save."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from demo.checks import Failure
from demo.places import Places

# Enough to say that bytes of the state are on their way; far from all of a checkpoint.
STAGED_ENOUGH_NBYTES = 4 << 20


@dataclass(slots=True, kw_only=True)
class Log:
    """What the trainer wrote down: losses and times to save, by step."""

    losses: dict[int, str] = field(default_factory=dict)
    save_s: dict[int, float] = field(default_factory=dict)


def command(places: Places, *, name: str, steps: int) -> list[str]:
    """Return the command line of a trainer whose checkpoints lie under ``name``."""
    options = {
        "model": places.model,
        "base": places.base,
        "root": places.root(name),
        "log": places.log(name),
        "steps": steps,
    }
    pairs = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    return [sys.executable, "-m", "demo.train", *pairs]


def run_to_the_end(places: Places, *, name: str, steps: int) -> float:
    """Run a trainer until it is done; return the seconds that it took."""
    started = time.perf_counter()
    subprocess.run(command(places, name=name, steps=steps), check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def kill_during_save(places: Places, *, name: str, steps: int, step: int) -> tuple[int, int]:
    """Send SIGKILL to a trainer in the middle of a save at ``step`` or soon after.

    Returns:
        The step whose save was cut off, and the bytes that lay in its staging directory.

    Raises:
        Failure: The trainer came to its end before a save could be caught.
    """
    root = places.root(name)
    while True:
        current = _kill_once(places, name=name, steps=steps, step=step)
        if staging_directories(root):
            return current, staged_nbytes(root)
        step = current + 1  # the save was quicker than the signal


def _kill_once(places: Places, *, name: str, steps: int, step: int) -> int:
    process = subprocess.Popen(
        command(places, name=name, steps=steps), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            current = int(line.removeprefix("saving "))
            if current >= step and _wait_for_bytes(places.root(name), step=current):
                process.send_signal(signal.SIGKILL)
                return current
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    raise Failure("the trainer ended before one of its saves could be cut off")


def _wait_for_bytes(root: Path, *, step: int) -> bool:
    """Wait until a save has staged some bytes; False if it was published before that was seen."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if staged_nbytes(root) >= STAGED_ENOUGH_NBYTES:
            return True
        if published(root, step=step).exists():
            return False
    raise Failure(f"nothing was staged under {root} within a minute")


def published(root: Path, *, step: int) -> Path:
    """Return where the checkpoint of a step lies once it is committed."""
    return root / f"step-{step:010d}"


def staging_directories(root: Path) -> list[Path]:
    """Return the staging directories below a root, whoever left them."""
    every = root.glob(".fps-*") if root.exists() else []
    return [each for each in every if not each.name.startswith(".fps-trash-")]


def staged_nbytes(root: Path) -> int:
    """Return the disk space of all files in staging directories; they may vanish meanwhile."""
    return sum(_disk_nbytes(each) for each in staging_directories(root))


def _disk_nbytes(directory: Path) -> int:
    try:
        return sum(entry.stat().st_blocks * 512 for entry in os.scandir(directory))
    except FileNotFoundError:
        return 0


def read_log(path: Path) -> Log:
    """Read a trainer's log; a step that was computed twice must have the same loss."""
    log = Log()
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        step = entry["step"]
        if log.losses.setdefault(step, entry["loss"]) != entry["loss"]:
            raise Failure(f"step {step} was computed twice, with different losses")
        log.save_s[step] = entry["save_s"]
    return log
