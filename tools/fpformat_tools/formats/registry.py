"""The formats that there are. A new one is a room, an import and an entry here."""

from collections.abc import Iterator

from fpformat_tools.formats.fpformat.format import FORMAT as FPFORMAT
from fpformat_tools.formats.interface import Format, Kind, Output
from fpformat_tools.formats.safetensors.format import FORMAT as SAFETENSORS
from fpformat_tools.formats.torch.format import FORMAT as TORCH

# In the order in which an input is compared with them.
FORMATS: tuple[Format, ...] = (
    SAFETENSORS,
    TORCH,
    FPFORMAT,
)


def kinds() -> Iterator[Kind]:
    """Yield every kind of input, the one to be asked first in front."""
    for each in FORMATS:
        yield from each.kinds


def kind_named(name: str) -> Kind:
    """Return the kind of input that a name means."""
    return {kind.name: kind for kind in kinds()}[name]


def outputs() -> dict[str, Output]:
    """Return how each format is written that is, by its name and in the order of names."""
    found = {each.name: each.output for each in FORMATS if each.output is not None}
    return dict(sorted(found.items()))
