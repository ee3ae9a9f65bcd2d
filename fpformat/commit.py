"""The commit protocol as a table of states and events. No I/O.

A save is open while its segments are written, sealed when all of them are durable, committed when
the directory has its final name. From every state before that it can be abandoned. An error of the
rename leaves the outcome to what stands at the final name afterwards; when that cannot be read
either, nothing more is done.
"""

from enum import Enum
from typing import Final


class State(Enum):
    """Where a save stands."""

    OPEN = "open"
    SEALED = "sealed"
    COMMITTED = "committed"
    ABANDONED = "abandoned"
    UNKNOWN = "of unknown outcome"


class Event(Enum):
    """What happens to a save."""

    SEAL = "every segment is durable"
    PUBLISH = "the directory has its final name"
    ABANDON = "a writer failed or gave up"
    LOSE = "the rename failed and the final name cannot be read"


_NEXT: Final = {
    (State.OPEN, Event.SEAL): State.SEALED,
    (State.SEALED, Event.PUBLISH): State.COMMITTED,
    (State.OPEN, Event.ABANDON): State.ABANDONED,
    (State.SEALED, Event.ABANDON): State.ABANDONED,
    (State.SEALED, Event.LOSE): State.UNKNOWN,
    (State.UNKNOWN, Event.ABANDON): State.ABANDONED,
}


def next_state(state: State, event: Event) -> State:
    """Return the state after `event`; AssertionError for a bug of ours."""
    following = _NEXT.get((state, event))
    assert following is not None, f"a save that is {state.value} cannot see: {event.value}"
    return following
