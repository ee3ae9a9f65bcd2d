"""The fast writer: the segments of the plain one, by threads without the interpreter lock.

Commit, layout, index and manifest are those of `fpformat`; the engine only replaces how the bytes
of a segment come to be on the disk. Its kernels, and numba with them, are imported by the first
save: a program that only loads never pays for them. Where they cannot be had, the plain writer,
`fpformat.write.writer`, writes the same bytes, and the log says so once.
"""

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import TYPE_CHECKING, Final

from fpformat.arguments import check_kind, checked_path
from fpformat.errors import SaveError
from fpformat.limits import SAVE_ID_NBYTES
from fpformat.publish.shield import run_whole
from fpformat.records.model import SavePlan, ShardKey, ShardSource
from fpformat.write.layout import SaveLayout, check_attempt, lay_out
from fpformat.write.writer import WriteReport, write_layout
from fpformat_io.config import EngineConfig, from_env
from fpformat_io.control import SaveControl
from fpformat_io.errors import engine_error

if TYPE_CHECKING:
    from fpformat_io.write.pipeline import Save

_LOG: Final = logging.getLogger("fpformat_io")
_COMPILER: Final = ("numba", "llvmlite")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport(WriteReport):
    """What a committed save amounts to, and how it was written.

    Attributes:
        mode: ``"direct"`` or ``"buffered"``.
        reason: Why.
        calls: System calls that wrote segments; the plain writer does not count and gives 0.
    """

    mode: str = "buffered"
    reason: str = "by the plain writer, without native workers"
    calls: int = 0


def write_checkpoint(
    path: "str | os.PathLike[str]",
    plan: SavePlan,
    sources: Mapping[ShardKey, ShardSource],
    *,
    save_id: bytes | None = None,
    created_us: int | None = None,
    config: EngineConfig | None = None,
    control: SaveControl | None = None,
) -> EngineReport:
    """Write and commit a checkpoint; it is durable when this returns.

    Sources that are memory (they have a `buffer`) are read by the workers where they are and must
    not change meanwhile; others are read piece by piece, in file order, by one thread.

    An interrupt, such as Ctrl-C, stops the save; it is raised when what was written is removed.

    Args:
        path: Directory to create; nothing may stand there.
        plan: What goes where.
        sources: The bytes of every shard that the plan's parts name.
        save_id: 16 bytes that identify this attempt; random by default.
        created_us: Time for the manifest in microseconds since 1970; now by default.
        config: Memory, threads and way to the disk; from the environment by default.
        control: Tells when the sources were read, and takes the wish to stop.

    Raises:
        CancelledError: `control` was told to stop; what was written is removed again.
        PlanError: The plan breaks a clause, `path` exists, or an argument is of a wrong kind;
            nothing was written.
        EngineError: A system call failed, or there is no memory; what was written is removed
            again.
    """
    place = checked_path(path)
    check_attempt(save_id, created_us)
    check_kind("config", config, EngineConfig | None, "an EngineConfig or None")
    check_kind("control", control, SaveControl | None, "a SaveControl or None")
    layout = lay_out(plan, sources)
    control = SaveControl() if control is None else control
    save_id = os.urandom(SAVE_ID_NBYTES) if save_id is None else save_id
    native = _native()
    try:
        if native is None:
            work = partial(_write_plainly, place, layout, sources, save_id, created_us, control)
        else:
            config = from_env() if config is None else config
            work = partial(
                _write_natively,
                native,
                place,
                layout,
                sources,
                save_id,
                created_us,
                config,
                control,
            )
        report = run_whole(work, stop=control.cancel)
    except SaveError as error:
        raise engine_error(error) from error
    finally:
        control.note_staged()
    _tell(report)
    return report


def _tell(report: EngineReport) -> None:
    for warning in report.warnings:
        _warn_once(warning)
    for path in report.removed:
        _LOG.warning("removed %s, which a writer that died left behind", path)
    _LOG.info("%s: written %s (%s)", report.path, report.mode, report.reason)


@cache
def _warn_once(text: str) -> None:
    _LOG.warning("%s", text)


@cache
def _native() -> "type[Save] | None":
    """Return what saves with kernels; None, with a line in the log, where they cannot be trusted.

    Compiling reaches into numba, and caching into parts of it that are not public: with a version
    that nobody has tried anything may be missing, or be there and mean something else.
    """
    try:
        from fpformat_io.native.kernels import warm_up
        from fpformat_io.write.pipeline import Save

        warm_up()
    except Exception as error:  # noqa: BLE001  a save must not depend on it
        _LOG.warning(
            "no native workers: %s; the plain writer saves the same bytes, in one thread",
            _reason(error),
        )
        return None
    return Save


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name in _COMPILER:
        return f"{error.name} is not installed, which fpformat[engine] would bring"
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _write_natively(
    native: "type[Save]",
    path: str,
    layout: SaveLayout,
    sources: Mapping[ShardKey, ShardSource],
    save_id: bytes,
    created_us: int | None,
    config: EngineConfig,
    control: SaveControl,
) -> EngineReport:
    begin = time.perf_counter()
    save = native(path, layout, save_id, config, control)
    document, checkpoint_id = save.write(sources, created_us)
    volume = save.volumes[-1]
    return EngineReport(
        path=save.staging.final,
        checkpoint_id=checkpoint_id,
        save_id=save_id,
        nbytes=len(document) + sum(record.nbytes for record in save.records),
        data_nbytes=layout.data_nbytes,
        seconds=time.perf_counter() - begin,
        mode=volume.mode,
        reason=volume.reason,
        calls=save.calls,
        warnings=tuple(save.staging.warnings),
        removed=save.staging.removed,
    )


class _Stoppable:
    """A source that is read only while the save may go on."""

    def __init__(self, source: ShardSource, control: SaveControl) -> None:
        self._source = source
        self._control = control

    def read(self, *, offset: int, nbytes: int) -> memoryview:
        """Return the bytes of the source.

        Raises:
            CancelledError: The save was told to stop.
        """
        self._control.check()
        return self._source.read(offset=offset, nbytes=nbytes)


def _write_plainly(
    path: str,
    layout: SaveLayout,
    sources: Mapping[ShardKey, ShardSource],
    save_id: bytes,
    created_us: int | None,
    control: SaveControl,
) -> EngineReport:
    stoppable = {key: _Stoppable(source, control) for key, source in sources.items()}
    plain = write_layout(path, layout, stoppable, save_id=save_id, created_us=created_us)
    return EngineReport(**{field.name: getattr(plain, field.name) for field in fields(plain)})
