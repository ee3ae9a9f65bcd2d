"""A trainer killed at any moment of its saves can always go on from the newest checkpoint."""

import os
import random
import signal
import subprocess
import sys
import time

import torch

from fpformat_io.torch import Checkpointer, latest, load

TRAINER = """
import itertools, sys, torch
from fpformat_io.torch import Checkpointer, latest, load
root = sys.argv[1]
found = latest(root)
start = found.step + 1 if found else 0
with Checkpointer(root, keep=2) as ckpt:
    for step in itertools.count(start):
        state = {"step": step, "w": torch.full((300_000,), float(step)), "x": [torch.tensor(step)]}
        handle = ckpt.save(step, state)
        print(step, flush=True)
        handle.wait_durable()
"""


def killed_after(root, count, delay_s):
    """Run the trainer until it began `count` saves, then kill it; return the last one begun."""
    command = [sys.executable, "-c", TRAINER, str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        begun = [int(process.stdout.readline()) for _ in range(count)]
        try:
            process.wait(delay_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
    assert process.returncode == -signal.SIGKILL
    return max(begun + [int(line) for line in rest if line])


def test_the_newest_checkpoint_is_always_whole(tmp_path):
    chance = random.Random(7)
    last = -1
    for _ in range(5):
        begun = killed_after(tmp_path, chance.randint(2, 4), chance.random() * 0.03)
        found = latest(tmp_path, verify="full")
        assert found.skipped == ()
        assert last <= found.step <= begun
        assert found.step >= begun - 1
        last = found.step
        state = load(found)
        assert state["step"] == found.step
        assert torch.equal(state["w"], torch.full((300_000,), float(found.step)))
        assert state["x"][0] == found.step
    # An old time stands for the second that must pass before what dead writers left is removed.
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    with Checkpointer(tmp_path, keep=2) as ckpt:
        ckpt.save(last + 1, {})
    assert not list(tmp_path.glob(".fps-*"))
    assert len(list(tmp_path.iterdir())) == 2


SAVER = """
import itertools, sys, torch
from pathlib import Path
from fpformat_io.torch import Checkpointer, save
root, state = Path(sys.argv[1]), {f"w{place}": torch.ones(1_000_000) for place in range(8)}
save(state, root / "first")
print("begins", flush=True)
if sys.argv[2] == "save":
    for number in itertools.count():
        save(state, root / str(number))
ckpt = Checkpointer(root / "runs", keep=1)
for step in itertools.count():
    ckpt.save(step, state)
"""


def test_several_interrupts_in_a_row_leave_nothing(tmp_path):
    """In the middle of a save, of its clean-up, and of the end of the interpreter."""
    chance = random.Random(7)
    for number in range(6):
        root = tmp_path / str(number)
        root.mkdir()
        command = [sys.executable, "-c", SAVER, str(root), ("save", "Checkpointer")[number % 2]]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout.readline() == "begins\n"
            for _ in range(chance.randint(2, 6)):
                time.sleep(chance.random() * 0.05)  # any moment will do
                process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        assert process.returncode == -signal.SIGINT
        assert list(root.rglob(".fps-*")) == []
