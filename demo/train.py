"""Fine-tune the encoder with a checkpoint at every step; start again where the newest one ends.

The state of a run is everything that decides its future: parameters, moments of AdamW, learning
rate schedule, position in the data and the random number generator (dropout is on). So a run that
was killed and started again computes the same bits as one that was not.

The trainer tells its parent on standard output when a save begins ("saving 7") and appends a line
of JSON a step to its log; losses stand there as hexadecimal floats, which lose nothing.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR

from demo.encoder import EncoderConfig, SentenceEncoder
from demo.sentences import PAIRS, Pair
from demo.wordpiece import WordPiece
from fpformat import open_checkpoint
from fpformat_io.torch import Checkpointer, latest, load

BATCH_PAIRS = 8
FIRST_TRAINED_LAYER = 4
THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the command line asks for."""

    model: Path
    base: Path
    root: Path
    log: Path
    steps: int


class Run:
    """Model, optimiser and data position: what a checkpoint holds."""

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(0)
        self.model = SentenceEncoder(EncoderConfig.read(settings.model / "config.json"))
        self.model.load_state_dict(load(settings.base))
        self.model.freeze_below(FIRST_TRAINED_LAYER)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=3e-4)
        self.schedule = CosineAnnealingLR(self.optimizer, T_max=settings.steps)
        self.position = 0
        self.step = 0

    def state(self) -> dict[str, Any]:
        """Return everything that the next step depends on."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "position": self.position,
            "step": self.step,
            "rng": torch.get_rng_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.position, self.step = state["position"], state["step"]
        torch.set_rng_state(state["rng"])

    def next_batch(self) -> list[Pair]:
        """Return the next pairs; every epoch has an order of its own."""
        epoch, start = divmod(self.position, len(PAIRS))
        order = torch.randperm(len(PAIRS), generator=torch.Generator().manual_seed(epoch))
        self.position += BATCH_PAIRS
        return [PAIRS[index] for index in order[start : start + BATCH_PAIRS]]

    def train_step(self, words: WordPiece) -> float:
        """Take one step and return its loss."""
        self.model.train()
        batch = self.next_batch()
        self.optimizer.zero_grad()
        loss = functional.mse_loss(
            similarity(self.model, words, batch), torch.tensor([pair.similarity for pair in batch])
        )
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        return loss.item()


def similarity(model: SentenceEncoder, words: WordPiece, pairs: list[Pair]) -> Tensor:
    """Return the cosine similarity that the model gives each pair."""
    left = model(*words.encode([pair.left for pair in pairs]))
    right = model(*words.encode([pair.right for pair in pairs]))
    product: Tensor = (left * right).sum(-1)
    return product


def train(settings: Settings) -> None:
    """Run to the last step from wherever the newest checkpoint is."""
    run = Run(settings)
    words = WordPiece(settings.model / "vocab.txt")
    found = latest(settings.root)
    if found is not None:
        run.restore(load(found))
    with open_checkpoint(settings.base) as base:
        metadata = base.manifest.user
    with Checkpointer(settings.root, keep=3) as checkpointer, settings.log.open("a") as log:
        while run.step < settings.steps:
            loss = run.train_step(words)
            print(f"saving {run.step}", flush=True)
            started = time.perf_counter()
            checkpointer.save(run.step, run.state(), metadata=metadata).wait_durable()
            line = {"step": run.step, "loss": loss.hex(), "save_s": time.perf_counter() - started}
            print(json.dumps(line), file=log, flush=True)


def parse_arguments() -> Settings:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "base", "root", "log"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    return Settings(**vars(parser.parse_args()))


def main() -> None:
    """Make every run of the program compute the same bits, then train."""
    torch.use_deterministic_algorithms(mode=True)
    torch.set_num_threads(THREADS)
    train(parse_arguments())


if __name__ == "__main__":
    main()
