"""Open, fully check and list a checkpoint of very many tensors; read one of them.

    python bench/open_many.py --tensors 1000000 --repeat 5

Prints the median of each phase, and the first beside decoding the same names from JSON, the
cheapest form of the index that other formats have: a ratio holds where absolute times do not.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fpformat import BytesSource, TensorEntry, open_checkpoint, plan_checkpoint, write_checkpoint
from fpformat.dtypes import by_name
from fpformat.records.model import ShardKey, ShardSource


class OneSource(dict[ShardKey, ShardSource]):
    """The same few bytes for every tensor."""

    def __init__(self, source: ShardSource) -> None:
        self._source = source

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: ShardKey) -> ShardSource:
        return self._source


def entries(count: int) -> list[TensorEntry]:
    """Return tensors with names of about 57 bytes, as models have them."""
    dtype = by_name("F32")
    return [
        TensorEntry(
            name=f"model.layers.{i % 97}.mlp.experts.{i}.down_projection.weight",
            dtype=dtype,
            shape=(2, 2),
        )
        for i in range(count)
    ]


def median_s(work: Callable[[], object], repeat: int) -> float:
    """Return the median time of `work` in seconds."""
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> None:
    """Write the checkpoint once and time its reading."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tensors", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where to write (a temp folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "c"
        tensors = entries(options.tensors)
        sources = OneSource(BytesSource(bytes(16)))
        report = write_checkpoint(path, plan_checkpoint(tensors), sources)
        text = json.dumps(
            {e.name: {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} for e in tensors}
        )
        middle = tensors[len(tensors) // 2].name

        def open_and_list() -> int:
            with open_checkpoint(path) as checkpoint:
                return len(checkpoint.segments[0].index.names)

        opening = median_s(open_and_list, options.repeat)
        parsing = median_s(lambda: json.loads(text), options.repeat)
        with open_checkpoint(path) as checkpoint:
            checkpoint.read(middle)
            reading = median_s(lambda: checkpoint.read(middle), options.repeat)
        print(f"{options.tensors} tensors, {report.nbytes / 1e6:.1f} MB of files")
        print(f"open, check and list   {opening:8.3f} s   {opening / parsing:5.2f} of json.loads")
        print(f"read one more tensor   {reading * 1e3:8.3f} ms")


if __name__ == "__main__":
    main()
