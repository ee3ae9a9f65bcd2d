"""Progress on a terminal: a bar on standard error, only where somebody looks at it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int], None]
"""Called with the number of bytes just moved."""


def silent(nbytes: int) -> None:
    """Show nothing."""


@contextmanager
def bar(title: str, *, total_nbytes: int | None) -> Iterator[Progress]:
    """Yield what moves a bar of `total_nbytes`; without a terminal, or tqdm, nothing is shown."""
    if not sys.stderr.isatty():
        yield silent
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield silent
        return
    with tqdm(
        total=total_nbytes,
        desc=title,
        unit="B",
        unit_scale=True,
        leave=False,
        mininterval=0.2,
        file=sys.stderr,
    ) as shown:
        yield lambda nbytes: shown.update(nbytes) and None
