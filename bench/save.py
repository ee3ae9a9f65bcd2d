"""Save the same tensors in several ways, each durable when its time stops.

    python bench/save.py --gib 1 --tensors 64 --repeat 7 --folder .

The ways take turns, so that what else happens on the machine hits all of them; medians count, and
ratios to the raw loop. "raw" writes memory that it never fills, in blocks of the engine's size past
the page cache, from four threads: what the disk gives. "busy" is the engine in a thread while the
main thread runs Python.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fpformat import BytesSource, SavePlan, TensorEntry, plan_checkpoint
from fpformat import write_checkpoint as write_plain
from fpformat.dtypes import by_name
from fpformat.records.model import ShardKey, ShardSource
from fpformat_io.config import EngineConfig
from fpformat_io.engine import write_checkpoint
from fpformat_io.write.aligned import AlignedMemory

MIB = 1024 * 1024
RAW_THREADS = 4


@dataclass(frozen=True)
class Work:
    """The tensors, and where to write them."""

    tensors: dict[str, torch.Tensor]
    plan: SavePlan
    sources: Mapping[ShardKey, ShardSource]
    folder: Path
    nbytes: int


def make_work(folder: Path, gib: float, count: int) -> Work:
    """Return random tensors of equal size."""
    size = int(gib * 1024 * MIB) // count // 4
    tensors = {f"layers.{i:04}.weight": torch.randn(size) for i in range(count)}
    entries = [
        TensorEntry(name=name, dtype=by_name("F32"), shape=(size,)) for name in sorted(tensors)
    ]
    return Work(
        tensors=tensors,
        plan=plan_checkpoint(entries),
        sources={(e.key, None): BytesSource(tensors[e.name].numpy()) for e in entries},
        folder=folder,
        nbytes=size * 4 * count,
    )


def raw(work: Work) -> None:
    """Write the same number of bytes from one buffer for each thread, past the page cache."""
    size = EngineConfig().buffer_nbytes
    memory = AlignedMemory(RAW_THREADS * size)
    memory.view(0, RAW_THREADS * size)[:] = np.frombuffer(os.urandom(MIB), np.uint8)[0]
    views = [memory.view(i * size, size) for i in range(RAW_THREADS)]
    flags = os.O_CREAT | os.O_WRONLY | os.O_DIRECT
    descriptor = os.open(work.folder / "raw", flags)
    os.posix_fallocate(descriptor, 0, work.nbytes)

    def write(worker: int) -> None:
        for offset in range(worker * size, work.nbytes // size * size, RAW_THREADS * size):
            os.pwrite(descriptor, views[worker], offset)

    with ThreadPoolExecutor(RAW_THREADS) as pool:
        list(pool.map(write, range(RAW_THREADS)))
    os.fsync(descriptor)
    os.close(descriptor)


def torch_save(work: Work) -> None:
    """Save as torch does, and sync."""
    with open(work.folder / "state.pt", "wb") as file:
        torch.save(work.tensors, file)
        file.flush()
        os.fsync(file.fileno())


def engine(work: Work, config: EngineConfig | None = None) -> None:
    """Save with the engine."""
    write_checkpoint(work.folder / "fast", work.plan, work.sources, config=config)


def busy(work: Work) -> None:
    """Save in a thread while this one runs Python."""
    thread = threading.Thread(target=engine, args=(work,))
    thread.start()
    number = 0
    while thread.is_alive():
        number += 1
    thread.join()


WAYS: dict[str, Callable[[Work], object]] = {
    "raw": raw,
    "engine": engine,
    "engine, busy": busy,
    "engine, buffered": lambda work: engine(work, EngineConfig(mode="buffered")),
    "plain writer": lambda work: write_plain(work.folder / "plain", work.plan, work.sources),
    "torch.save": torch_save,
}


def measure(way: Callable[[Work], object], work: Work) -> tuple[float, float]:
    """Return wall and processor seconds of one save; what it wrote is removed."""
    shutil.rmtree(work.folder, ignore_errors=True)
    work.folder.mkdir()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    way(work)
    taken = time.perf_counter() - begin, time.process_time() - begin_cpu
    shutil.rmtree(work.folder)
    return taken


def main() -> None:
    """Take turns and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None, help="where to write (a temp folder)")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        work = make_work(Path(folder) / "saves", options.gib, options.tensors)
        engine(Work(work.tensors, work.plan, work.sources, Path(folder) / "warm", work.nbytes))
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
        for _ in range(options.repeat):
            for name, way in WAYS.items():
                times[name].append(measure(way, work))
    gigabytes = work.nbytes / 1e9
    wall = {name: statistics.median(t for t, _ in taken) for name, taken in times.items()}
    cpu = {name: statistics.median(c for _, c in taken) for name, taken in times.items()}
    print(f"{options.tensors} tensors, {gigabytes:.2f} GB, medians of {options.repeat}")
    print(f"{'':18} {'s':>7} {'GB/s':>6} {'of raw':>7} {'CPU s/GB':>9}")
    for name, seconds in wall.items():
        ratio = wall["raw"] / seconds
        rate = gigabytes / seconds
        print(f"{name:18} {seconds:7.3f} {rate:6.2f} {ratio:7.2f} {cpu[name] / gigabytes:9.3f}")
    if options.json:
        options.json.write_text(json.dumps({"gigabytes": gigabytes, "seconds": times}, indent=1))


if __name__ == "__main__":
    main()
