"""A state written as a checkpoint of fpformat."""

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from fpformat.errors import SaveError
from fpformat.names import TREE_NAME, name_of, staging_name
from fpformat.records.layout import plan_checkpoint, sort_key
from fpformat.records.model import ObjectEntry, SavePlan, ShardKey, ShardSource
from fpformat.records.nodes import walk_tensors
from fpformat.records.tree import dump_tree
from fpformat.write.writer import WriteReport, write_checkpoint
from fpformat_tools.formats.fpformat.reproducible import SteadySource, content_save_id, is_taken
from fpformat_tools.streams.gather import TensorSource
from fpformat_tools.streams.output import check_space, refuse_existing
from fpformat_tools.streams.progress import Progress, silent
from fpformat_tools.streams.sharing import share
from fpformat_tools.streams.state import State
from fpformat_tools.streams.trees import renumber
from fpformat_tools.text import listed

OBJECT_TREE = 1


class SaveId(Enum):
    """Where the save id of a checkpoint comes from."""

    RANDOM = "random"
    CONTENT = "content"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What an output amounts to.

    Attributes:
        paths: Every file or directory that appeared.
        nbytes: Size of all files.
        checkpoint_id: Of a checkpoint, else None.
    """

    paths: tuple[Path, ...]
    nbytes: int
    checkpoint_id: str | None = None


class _Metered:
    """A source that reports what is read from it."""

    def __init__(self, source: TensorSource, progress: Progress) -> None:
        self._source = source
        self._progress = progress

    def read(self, *, offset: int, nbytes: int) -> memoryview:
        part = self._source.read(offset=offset, nbytes=nbytes)
        self._progress(nbytes)
        return part


def write_fpformat(
    state: State,
    target: Path,
    *,
    progress: Progress,
    save_id: SaveId = SaveId.RANDOM,
    created_us: int | None = None,
) -> Written:
    """Write a state as a checkpoint, its ties kept and its bytes streamed.

    Args:
        state: What to write.
        target: The directory to create.
        progress: Called with the number of bytes just read; twice for each where the save id is
            taken from the content.
        save_id: Where the save id comes from.
        created_us: Time for the manifest in microseconds since 1970; now by default.

    Raises:
        PlanError: The state cannot be stored, or `target` exists.
        SaveError: The system refused to write.
    """
    refuse_existing(target)
    shared = share(state)
    if shared.untied:
        state.warnings.append(
            f"{state.where}: shared bytes that lie too far apart are stored separately: "
            f"{listed(shared.untied)}"
        )
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
    check_space(target, nbytes=needed + len(tree.payload))
    if save_id is SaveId.RANDOM:
        report = write_checkpoint(target, plan, sources, created_us=created_us)
    else:
        nbytes = {entry.key: entry.nbytes for entry in ordered}
        steady = {
            key: SteadySource(source, nbytes=nbytes[key[0]], where=f"{state.where}: {key[0][0]!r}")
            for key, source in sources.items()
        }
        report = _write_again(target, plan, steady, created_us=created_us or 0)
    state.warnings += report.warnings
    state.warnings += [
        f"removed {path}, which a writer that died left behind" for path in report.removed
    ]
    return Written(paths=(target,), nbytes=report.nbytes, checkpoint_id=report.checkpoint_id)


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
