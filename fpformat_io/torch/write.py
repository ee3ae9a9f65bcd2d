"""A prepared state on its way to disk, and what a save amounts to."""

import os
import time
from os import PathLike
from pathlib import Path

from fpformat.errors import PlanError, SaveError
from fpformat_io.control import SaveControl
from fpformat_io.engine import EngineReport, write_checkpoint
from fpformat_io.errors import EngineError, engine_error
from fpformat_io.session.saves import SaveReport
from fpformat_io.torch.plan import Prepared


def write(
    path: "str | PathLike[str]",
    ready: Prepared,
    save_id: bytes | None = None,
    control: SaveControl | None = None,
) -> EngineReport:
    """Write and commit a prepared state.

    Raises:
        PlanError: Something stands at `path`.
        EngineError: The operating system failed; nothing was committed.
    """
    try:
        return write_checkpoint(
            Path(path), ready.plan, ready.sources, save_id=save_id, control=control
        )
    except (PlanError, EngineError):
        raise
    except OSError as error:
        raise engine_error(SaveError(os.fspath(path), "saving", error)) from error
    except Exception as error:
        raise engine_error(error) from error


def report_of(
    written: EngineReport, ready: Prepared, *, begin: float, stall_seconds: float | None = None
) -> SaveReport:
    """Return the report of a save that began at `begin` on the performance counter."""
    seconds = time.perf_counter() - begin
    return SaveReport(
        path=written.path,
        checkpoint_id=written.checkpoint_id,
        nbytes=written.nbytes,
        data_nbytes=written.data_nbytes,
        tensor_count=ready.tensor_count,
        seconds=seconds,
        stall_seconds=seconds if stall_seconds is None else stall_seconds,
        untied=ready.untied,
        warnings=written.warnings,
        mode=written.mode,
        bandwidth_bytes_per_s=written.nbytes / written.seconds,
    )
