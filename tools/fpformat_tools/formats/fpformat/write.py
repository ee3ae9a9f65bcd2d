"""A state written as a checkpoint of fpformat."""

import errno
from collections.abc import Mapping
from pathlib import Path

from fpformat.errors import SaveError
from fpformat.names import TREE_NAME, name_of, staging_name
from fpformat.records.layout import plan_checkpoint, sort_key
from fpformat.records.model import ObjectEntry, SavePlan, ShardKey, ShardSource
from fpformat.records.nodes import walk_tensors
from fpformat.records.tree import dump_tree
from fpformat.write.writer import WriteReport, write_checkpoint
from fpformat_tools.formats.fpformat.reproducible import (
    SteadySource,
    content_save_id,
    is_taken,
    source_date_us,
)
from fpformat_tools.formats.interface import SaveId, Target, Written
from fpformat_tools.streams.gather import TensorSource
from fpformat_tools.streams.output import check_space, refuse_existing
from fpformat_tools.streams.progress import Progress, silent
from fpformat_tools.streams.sharing import share
from fpformat_tools.streams.state import State
from fpformat_tools.streams.trees import renumber

OBJECT_TREE = 1


class _Metered:
    """A source that reports what is read from it."""

    def __init__(self, source: TensorSource, progress: Progress) -> None:
        self._source = source
        self._progress = progress

    def read(self, *, offset: int, nbytes: int) -> memoryview:
        part = self._source.read(offset=offset, nbytes=nbytes)
        self._progress(nbytes)
        return part


def write_fpformat(state: State, target: Target, progress: Progress) -> Written:
    """Write a state as a checkpoint, its ties kept and its bytes streamed.

    The time in the manifest is the one that the environment asks for, else now.

    Args:
        state: What to write.
        target: The directory to create, and where the save id comes from.
        progress: Called with the number of bytes just read; twice for each where the save id is
            taken from the content.

    Raises:
        UsageError: The environment asks for a time that makes no sense.
        PlanError: The state cannot be stored, or the target exists.
        SaveError: The system refused to write.
    """
    refuse_existing(target.path)
    created_us = source_date_us()
    shared = share(state)
    ordered = sorted(shared.entries, key=sort_key)
    numbers = {entry.name: position for position, entry in enumerate(ordered)}
    names = iter([name_of(path) for path, _ in walk_tensors(state.node)])
    node = renumber(state.node, lambda _: numbers[next(names)])
    tree = ObjectEntry(name=TREE_NAME, kind=OBJECT_TREE, payload=dump_tree(node))
    plan = plan_checkpoint(ordered, [tree], step=state.step, user=state.user)
    sources: dict[ShardKey, ShardSource] = {
        (key, None): _Metered(source, progress) for key, source in shared.sources.items()
    }
    needed = sum(part.nbytes for segment in plan.segments for part in segment.parts)
    check_space(target.path, nbytes=needed + len(tree.payload))
    if target.save_id is SaveId.RANDOM:
        report = write_checkpoint(target.path, plan, sources, created_us=created_us)
    else:
        nbytes = {entry.key: entry.nbytes for entry in ordered}
        steady = {
            key: SteadySource(source, nbytes=nbytes[key[0]], where=f"{state.where}: {key[0][0]!r}")
            for key, source in sources.items()
        }
        report = _write_again(target.path, plan, steady, created_us=created_us or 0)
    state.warnings += report.warnings
    state.warnings += [
        f"removed {path}, which a writer that died left behind" for path in report.removed
    ]
    return Written(paths=(target.path,), nbytes=report.nbytes, checkpoint_id=report.checkpoint_id)


def _write_again(
    target: Path, plan: SavePlan, sources: Mapping[ShardKey, SteadySource], *, created_us: int
) -> WriteReport:
    """Write what gives the same bytes each time, for which every source is read twice."""
    save_id = content_save_id(plan, sources, created_us=created_us, progress=silent)
    staging = target.absolute().parent / staging_name(save_id)
    try:
        return write_checkpoint(target, plan, sources, save_id=save_id, created_us=created_us)
    except SaveError as error:
        if error.errno == errno.EEXIST and error.path == str(staging):
            raise is_taken(target, staging) from error
        raise
