"""Checkpoints of fpformat, as the table of formats has them."""

import re
from collections.abc import Sequence
from typing import Final

from fpformat.names import MANIFEST_NAME
from fpformat_tools.formats.fpformat.read import open_fpformat
from fpformat_tools.formats.fpformat.reproducible import source_date_us
from fpformat_tools.formats.fpformat.write import write_fpformat
from fpformat_tools.formats.interface import Format, Kind, Output, SaveId, Target

_SEGMENT: Final = re.compile(r"seg-\d{6}\.fps")


def _is_checkpoint(names: Sequence[str]) -> bool:
    return MANIFEST_NAME in names or any(_SEGMENT.fullmatch(name) for name in names)


def _check(target: Target) -> None:
    source_date_us()


def _readings(target: Target) -> int:
    return 2 if target.save_id is SaveId.CONTENT else 1


FORMAT: Final = Format(
    name="fpformat",
    help="a checkpoint of fpformat",
    kinds=(
        Kind(
            name="fpformat",
            title="fpformat",
            sought="fpformat",
            is_directory=_is_checkpoint,
            open=open_fpformat,
        ),
    ),
    output=Output(
        endings=("", ".fpformat", ".fp"),
        help="a directory (no ending, .fpformat, .fp)",
        check=_check,
        readings=_readings,
        write=write_fpformat,
    ),
)
