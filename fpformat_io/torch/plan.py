"""A tied state as a save plan, and the line of stages that leads there.

flatten -> tie -> plan: each stage is a function from one value to the next, none looks back. What
follows, write and publish, knows nothing of torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from fpformat.errors import PlanError
from fpformat.limits import MAX_INT
from fpformat.names import TREE_NAME
from fpformat.records.index import OBJECT_TREE
from fpformat.records.layout import plan_checkpoint
from fpformat.records.model import ObjectEntry, SavePlan, ShardKey, ShardSource
from fpformat.records.tree import dump_tree
from fpformat_io.torch.flatten import Slot, flatten
from fpformat_io.torch.tie import TiedState, tie

_MAX_METADATA_NBYTES: Final = 8 * 1024 * 1024

Sources: TypeAlias = Callable[[Sequence[Slot]], Mapping[str, ShardSource]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A state that is ready to be written.

    Attributes:
        plan: What goes where.
        sources: The bytes of every tensor that owns some.
        tensor_count: Names of tensors and arrays, tied ones included.
        untied: Names that shared memory and are stored apart.
    """

    plan: SavePlan
    sources: Mapping[ShardKey, ShardSource]
    tensor_count: int
    untied: tuple[str, ...]


def prepare(
    state: Any, *, step: int | None, metadata: Mapping[str, str] | None, sources: Sources
) -> Prepared:
    """Take a state apart and plan its save.

    Args:
        state: What the caller wants to save.
        step: Training step for the manifest.
        metadata: Strings for the manifest.
        sources: Makes the sources of the tensors that own bytes.

    Raises:
        PlanError: The state, the step or the metadata cannot be stored.
        StagingError: The state could not be copied.
    """
    _check_step(step)
    user = _checked_metadata(metadata)
    tied = tie(flatten(state))
    plan = plan_state(tied, step=step, user=user)
    return Prepared(
        plan=plan,
        sources={((name, None), None): each for name, each in sources(tied.owners).items()},
        tensor_count=tied.tensor_count,
        untied=tied.untied,
    )


def plan_state(tied: TiedState, *, step: int | None, user: dict[str, str]) -> SavePlan:
    """Return the plan of a save by one process: one segment with all tensors and the tree."""
    tree = ObjectEntry(name=TREE_NAME, kind=OBJECT_TREE, payload=dump_tree(tied.node))
    return plan_checkpoint(tied.entries, [tree], step=step, user=user)


def _check_step(step: int | None) -> None:
    """Raise PlanError for a step that a manifest cannot hold."""
    if step is not None and (type(step) is not int or not 0 <= step <= MAX_INT):
        raise PlanError(f"step={step!r}: expected an int from 0 to 2^53-1, or None")


def _checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise PlanError(
            f"metadata is a {type(metadata).__name__}, expected a mapping of str to str"
        )
    problems = []
    for key, value in metadata.items():
        for text in (key, value):
            if type(text) is not str:
                problems.append(f"{key!r}: {text!r} is a {type(text).__name__}, expected str")
            elif not text.isascii() and text != text.encode(errors="replace").decode():
                problems.append(f"{key!r}: {text!r} has a lone surrogate, so no UTF-8 form")
    if problems:
        raise PlanError("metadata must map str to str:", *problems)
    nbytes = sum(len(key.encode()) + len(text.encode()) for key, text in metadata.items())
    if nbytes > _MAX_METADATA_NBYTES:
        raise PlanError(f"metadata has {nbytes} bytes, at most {_MAX_METADATA_NBYTES} fit")
    return dict(metadata)
