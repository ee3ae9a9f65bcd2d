"""The commit: staging directory, syncs, the rename that is the commit.

A save is open while its segments are written, sealed when all of them are durable, committed when
the directory has its final name. From every state before that it can be abandoned. An error of the
rename leaves the outcome to what stands at the final name afterwards; when that cannot be read
either, nothing more is done.

Each sync closes one gap: a segment's, so that its bytes outlive a power cut; the staging
directory's, so that the names in it do; the manifest's and the directory's again, so that the
final name never shows a directory without a whole manifest; the parent's, so that the rename does.
A lock on the staging directory tells garbage collection that its writer lives.
"""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Final, TypeVar

from fpformat.errors import CommitOutcomeUnknownError, NotDurableError, PlanError, SaveError
from fpformat.names import MANIFEST_NAME, segment_name, staging_name
from fpformat.publish.durability import lock_own, make_directories, sync_directory, sync_names
from fpformat.publish.latch import Latch
from fpformat.publish.leftovers import collect
from fpformat.publish.shield import run_whole

T = TypeVar("T")

# Less the mask of the process: who shares a directory with a team sets that.
_FILE_MODE: Final = 0o666
_NONE: Final = -1
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

# Descriptors of staging directories that are being written. A forked child inherits them, and with
# them a share in their locks, so that a save which died would look alive as long as the child does.
_HELD: Final[set[int]] = set()


def _close_inherited() -> None:
    for descriptor in _HELD:
        with suppress(OSError):
            os.close(descriptor)
    _HELD.clear()


os.register_at_fork(after_in_child=_close_inherited)


class Staging:
    """The staging directory of one save, from its creation to commit or removal.

    Attributes:
        final: Where the checkpoint will stand, absolute.
        path: The staging directory.
        warnings: What the file system cannot do for a save, one line each.
        removed: Directories of dead writers that were removed from beside it.
    """

    def __init__(
        self, final: "str | os.PathLike[str]", save_id: bytes, *, stop: Latch | None = None
    ) -> None:
        """Remove what dead writers left beside the final name, then create the directory there.

        Args:
            final: Where the checkpoint will stand; nothing may stand there.
            save_id: 16 bytes that identify this attempt.
            stop: Once it is set, nothing more is attempted.

        Raises:
            PlanError: Something stands at the final name already.
            SaveError: The directory cannot be made.
        """
        self.warnings: list[str] = []
        self.removed: tuple[Path, ...] = ()
        self._state = State.OPEN
        self._ordinals: set[int] = set()
        self._process = os.getpid()
        self._stop = Latch() if stop is None else stop
        self._descriptor = _NONE
        self.path = Path(final)  # for messages, until the next line
        self.final = self.attempt("finding its place", lambda: Path(os.path.abspath(final)))
        self.path = self.final.parent / staging_name(save_id)
        if self.attempt("looking at the name", lambda: _exists(self.final), path=self.final):
            raise PlanError(f"{self.final}: exists already; a checkpoint is never overwritten")
        self.attempt("creating the directory", self._make_parent, path=self.final.parent)
        try:
            self.attempt("creating the staging directory", lambda: run_whole(self._create))
        except BaseException:
            self.abandon()
            raise

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def _make_parent(self) -> None:
        make_directories(self.final.parent, self._warn)
        # To tidy up is a courtesy: a directory that cannot be listed can still be saved into.
        with suppress(OSError):
            self.removed = collect(self.final.parent, warn=self._warn)

    def _create(self) -> None:
        self.path.mkdir()
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            self.path.rmdir()
            raise
        _HELD.add(self._descriptor)
        lock_own(self._descriptor, self.path, self._warn)

    def _close(self) -> None:
        if self._descriptor != _NONE:
            descriptor, self._descriptor = self._descriptor, _NONE
            _HELD.discard(descriptor)
            os.close(descriptor)

    def attempt(self, action: str, work: Callable[[], T], *, path: Path | None = None) -> T:
        """Run `work` and turn an `OSError` into a `SaveError` that names path and action."""
        try:
            if self._stop.is_set():
                raise InterruptedError(errno.EINTR, "the save was told to stop")
            return work()
        except OSError as error:
            raise SaveError(str(path or self.path), action, error) from error

    def create_segment(self, ordinal: int) -> int:
        """Create the file of a segment, which must not exist, and return its descriptor."""
        self._ordinals.add(ordinal)
        name = segment_name(ordinal)
        return self.attempt(
            "creating the segment",
            lambda: os.open(name, _CREATE, _FILE_MODE, dir_fd=self._descriptor),
            path=self.path / name,
        )

    def seal(self) -> None:
        """Make the names of the written and synced segments durable.

        spec: COM-4
        """
        self.attempt("syncing the staging directory", self._sync_names)
        self._state = next_state(self._state, Event.SEAL)

    def _sync_names(self) -> None:
        sync_names(self._descriptor, self.final.parent, self._warn)

    def publish(self, manifest: bytes) -> None:
        """Write the manifest and give the directory its final name: the commit.

        spec: COM-5, COM-6

        Raises:
            SaveError: An earlier step failed, or the final name was taken meanwhile.
            NotDurableError: The commit succeeded, the sync of the parent directory did not.
            CommitOutcomeUnknownError: The rename failed and the final name cannot be read.
        """
        self.attempt("writing the manifest", lambda: self._write_manifest(manifest))
        self.attempt("syncing the staging directory", self._sync_names)
        try:
            os.rename(self.path, self.final)
        except OSError as error:
            if not self._stands_at_final(manifest, error):
                raise SaveError(str(self.final), "publishing", error) from error
        self._state = next_state(self._state, Event.PUBLISH)
        try:
            self._close()
            sync_directory(self.final.parent, self._warn)
        except OSError as error:
            action = "the checkpoint is committed, but making its name durable"
            raise NotDurableError(str(self.final), action, error) from error

    def _write_manifest(self, manifest: bytes) -> None:
        descriptor = os.open(MANIFEST_NAME, _CREATE, _FILE_MODE, dir_fd=self._descriptor)
        try:
            write_all(descriptor, manifest)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _stands_at_final(self, manifest: bytes, error: OSError) -> bool:
        """Return whether our manifest stands at the final name in spite of an error.

        spec: COM-7
        """
        try:
            return (self.final / MANIFEST_NAME).read_bytes() == manifest
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            self._state = next_state(self._state, Event.LOSE)
            raise CommitOutcomeUnknownError(str(self.final), "publishing", error) from error

    def abandon(self) -> None:
        """Remove what was staged, by derived names only; nothing once the outcome is decided.

        A child of the process that saves does nothing, since the directory is its parent's. An
        interrupt is raised when all is removed.

        spec: COM-14
        """
        if self._process == os.getpid():
            run_whole(self._abandon)

    def _abandon(self) -> None:
        if self._state is State.UNKNOWN:
            self._close()
            self._state = next_state(self._state, Event.ABANDON)
        if self._state not in (State.OPEN, State.SEALED):
            return
        self._state = next_state(self._state, Event.ABANDON)
        if self._is_staged():
            for name in (MANIFEST_NAME, *map(segment_name, self._ordinals)):
                with suppress(OSError):
                    os.unlink(name, dir_fd=self._descriptor)
            with suppress(OSError):
                os.rmdir(self.path)
        self._close()

    def _is_staged(self) -> bool:
        """Return whether the directory is certainly still the staging directory.

        An interrupt can come between the rename and the note that it worked.
        """
        if self._descriptor == _NONE:
            return False
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.lstat(self.path))
        except OSError:
            return False


def _exists(path: Path) -> bool:
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    except ValueError as error:
        raise PlanError(f"{str(path)!r}: is no path: {error}") from error
    return True


def write_all(descriptor: int, buffer: "bytes | memoryview") -> None:
    """Write the whole buffer at the file's position, continuing after short writes."""
    view = memoryview(buffer)
    while view:
        view = view[os.write(descriptor, view) :]


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
