"""The settings of the engine, and the only place that reads them from the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, cast, get_args

from fpformat.errors import PlanError

Mode = Literal["auto", "direct", "buffered"]

_MIB: Final = 1024 * 1024
_BUFFER_UNIT_NBYTES: Final = 2 * _MIB  # the largest block size of the format, and a huge page


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How a save uses memory, threads and the disk. No setting changes a byte of what is written.

    Attributes:
        staging_nbytes: Host memory of one save beyond the state, at most.
        buffer_nbytes: Size of a staging buffer, and so of a write; a multiple of 2 MiB.
        worker_count: Threads that copy, checksum and write; fewer when the memory does not reach.
        mode: ``"direct"`` bypasses the page cache where the file system allows it, as ``"auto"``
            does; ``"buffered"`` never does.
    """

    staging_nbytes: int = 64 * _MIB
    buffer_nbytes: int = 4 * _MIB
    worker_count: int = 4
    mode: Mode = "auto"

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            PlanError: With the setting, its value and what was expected.
        """
        if self.buffer_nbytes < 1 or self.buffer_nbytes % _BUFFER_UNIT_NBYTES:
            raise PlanError(f"buffer_nbytes={self.buffer_nbytes}: expected a multiple of 2 MiB")
        if self.staging_nbytes < 3 * self.buffer_nbytes:
            least = f"expected at least three buffers of {self.buffer_nbytes} bytes"
            raise PlanError(f"staging_nbytes={self.staging_nbytes}: {least}")
        if self.worker_count < 1:
            raise PlanError(f"worker_count={self.worker_count}: expected at least 1")
        if self.mode not in get_args(Mode):
            raise PlanError(f"mode={self.mode!r}: expected one of {', '.join(get_args(Mode))}")


def from_env(environment: Mapping[str, str] | None = None) -> EngineConfig:
    """Return the settings with what ``FPFORMAT_*`` variables change.

    ``FPFORMAT_STAGING_MIB``, ``FPFORMAT_BUFFER_MIB``, ``FPFORMAT_WORKERS`` and ``FPFORMAT_MODE``.

    Args:
        environment: The variables; those of the process by default.

    Raises:
        PlanError: A value is not a number, or makes no sense.
    """
    variables = os.environ if environment is None else environment
    default = EngineConfig()
    return EngineConfig(
        staging_nbytes=_number(variables, "FPFORMAT_STAGING_MIB", default.staging_nbytes, _MIB),
        buffer_nbytes=_number(variables, "FPFORMAT_BUFFER_MIB", default.buffer_nbytes, _MIB),
        worker_count=_number(variables, "FPFORMAT_WORKERS", default.worker_count, 1),
        mode=cast(Mode, variables.get("FPFORMAT_MODE", default.mode)),
    )


def _number(variables: Mapping[str, str], name: str, default: int, unit: int) -> int:
    text = variables.get(name)
    if text is None:
        return default
    try:
        return int(text) * unit
    except ValueError:
        raise PlanError(f"{name}={text!r}: expected a whole number") from None
