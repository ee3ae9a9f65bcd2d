"""Parts of the comparison of a template with a checkpoint that need neither of them open."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from fpformat.names import HIDDEN_PREFIX
from fpformat.records.model import TensorKey, View
from fpformat_io.torch.dtypes import from_torch
from fpformat_io.torch.flatten import Slot, tensor_problem
from fpformat_io.torch.tie import tie_slots


def shared_names(values: Mapping[str, Any]) -> dict[str, "TensorKey | View"]:
    """Return how tensors of the template share memory, by name; see `fpformat.rules.ties`."""
    slots = []
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and not tensor_problem(value):
            dtype = from_torch(value.dtype)
            if dtype is not None:
                slots.append(Slot(name=name, value=value, dtype=dtype))
    ties, _ = tie_slots(slots)
    return ties.aliases


def relative(alias: "TensorKey | View | None", prefix: str) -> tuple[Any, ...] | None:
    """Return an alias as a template knows it: without scope, names below `prefix`."""
    if alias is None:
        return None
    target = alias.target[0] if isinstance(alias, View) else alias[0]
    if prefix:
        is_hidden = target.startswith(HIDDEN_PREFIX)
        start = f"{HIDDEN_PREFIX if is_hidden else ''}{prefix}/"
        if not target.startswith(start):
            return None
        target = (HIDDEN_PREFIX if is_hidden else "") + target[len(start) :]
    return (target, alias.strides, alias.offset) if isinstance(alias, View) else (target,)


def parts_of(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return names, those of a part that `others` have nothing of as one entry with a count."""
    present = {prefix for name in others for prefix in _prefixes(name)}
    counts: Counter[str] = Counter()
    for name in names:
        counts[next((prefix for prefix in _prefixes(name) if prefix not in present), name)] += 1
    return [
        repr(part) if count == 1 else f"{part!r} with {count} values"
        for part, count in counts.items()
    ]


def _prefixes(name: str) -> Iterator[str]:
    elements = name.split("/")
    return ("/".join(elements[:count]) for count in range(1, len(elements) + 1))
