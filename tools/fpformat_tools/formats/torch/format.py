"""Files of ``torch.save``, as the table of formats has them."""

import re
from typing import Final

from fpformat.records.nodes import ArrayRef, NumpyScalar
from fpformat_tools.formats.interface import Format, Head, Kind, Output, Problems
from fpformat_tools.formats.torch.pickled import reason_to_refuse
from fpformat_tools.formats.torch.read import open_legacy, open_zip
from fpformat_tools.formats.torch.write import write_torch
from fpformat_tools.streams.state import State
from fpformat_tools.streams.trees import prune

# The number 0x1950a86a20f9469cfc6c, which begins every file that torch wrote before its zip files.
_LEGACY: Final = re.compile(rb"\x80[\x02-\x05](\x95.{8})?\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20", re.S)


def _is_zip(head: Head) -> bool:
    return head.start.startswith((b"PK\x03\x04", b"PK\x05\x06"))


def _is_legacy(head: Head) -> bool:
    return _LEGACY.match(head.start) is not None


def _fit(state: State) -> Problems:
    state.node, problems = prune(state.node, reason_to_refuse)
    return problems


FORMAT: Final = Format(
    name="torch",
    help="a file of torch.save (zip or legacy, never executed)",
    kinds=(
        Kind(
            name="torch_zip",
            title="a torch file",
            sought="a torch file",
            detect=_is_zip,
            is_lone=True,
            open=open_zip,
        ),
        Kind(
            name="torch_legacy",
            title="a legacy torch file",
            detect=_is_legacy,
            is_lone=True,
            open=open_legacy,
        ),
    ),
    output=Output(
        endings=(".pt", ".pth", ".bin", ".ckpt"),
        help="a file for torch.load(weights_only=True) (.pt .pth .bin .ckpt)",
        fit=_fit,
        holds="what weights_only accepts",
        numpy=(ArrayRef, NumpyScalar),
        write=write_torch,
    ),
)
