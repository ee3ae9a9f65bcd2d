"""The commit with real files: staging directory, syncs, the rename that is the commit.

Each sync closes one gap: a segment's, so that its bytes outlive a power cut; the staging
directory's, so that the names in it do; the manifest's and the directory's again, so that the
final name never shows a directory without a whole manifest; the parent's, so that the rename does.
A lock on the staging directory tells garbage collection that its writer lives.
"""

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from fpformat.commit import Event, State, next_state
from fpformat.errors import CommitOutcomeUnknownError, NotDurableError, PlanError, SaveError
from fpformat.names import MANIFEST_NAME, segment_name, staging_name

T = TypeVar("T")


class Staging:
    """The staging directory of one save, from its creation to commit or removal."""

    def __init__(self, final: "str | os.PathLike[str]", save_id: bytes) -> None:
        """Create the directory beside its final name and lock it.

        Raises:
            PlanError: Something stands at the final name already.
            SaveError: The directory cannot be made.
        """
        self.final = Path(os.path.abspath(final))
        self.path = self.final.parent / staging_name(save_id)
        self._state = State.OPEN
        self._ordinals: set[int] = set()
        if self.attempt("looking at the name", lambda: _exists(self.final), path=self.final):
            raise PlanError(f"{self.final}: exists already; a checkpoint is never overwritten")
        self.attempt("creating the staging directory", self._create)

    def _create(self) -> None:
        self.final.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir()
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.path.rmdir()
            raise

    def attempt(self, action: str, work: Callable[[], T], *, path: Path | None = None) -> T:
        """Run `work` and turn an `OSError` into a `SaveError` that names path and action."""
        try:
            return work()
        except OSError as error:
            raise SaveError(str(path or self.path), action, error) from error

    def create_segment(self, ordinal: int) -> int:
        """Create the file of a segment, which must not exist, and return its descriptor."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._ordinals.add(ordinal)
        name = segment_name(ordinal)
        return self.attempt(
            "creating the segment",
            lambda: os.open(name, flags, 0o644, dir_fd=self._descriptor),
            path=self.path / name,
        )

    def seal(self) -> None:
        """Make the names of the written and synced segments durable.

        spec: COM-4
        """
        self.attempt("syncing the staging directory", lambda: os.fsync(self._descriptor))
        self._state = next_state(self._state, Event.SEAL)

    def publish(self, manifest: bytes) -> None:
        """Write the manifest and give the directory its final name: the commit.

        spec: COM-5, COM-6

        Raises:
            SaveError: An earlier step failed, or the final name was taken meanwhile.
            NotDurableError: The commit succeeded, the sync of the parent directory did not.
            CommitOutcomeUnknownError: The rename failed and the final name cannot be read.
        """
        self.attempt("writing the manifest", lambda: self._write_manifest(manifest))
        self.attempt("syncing the staging directory", lambda: os.fsync(self._descriptor))
        try:
            os.rename(self.path, self.final)
        except OSError as error:
            if not self._stands_at_final(manifest, error):
                raise SaveError(str(self.final), "publishing", error) from error
        self._state = next_state(self._state, Event.PUBLISH)
        try:
            os.close(self._descriptor)
            sync_directory(self.final.parent)
        except OSError as error:
            action = "the checkpoint is committed, but making its name durable"
            raise NotDurableError(str(self.final), action, error) from error

    def _write_manifest(self, manifest: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(MANIFEST_NAME, flags, 0o644, dir_fd=self._descriptor)
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
        """Remove what was staged, by derived names only; nothing once the outcome is decided."""
        if self._state is State.UNKNOWN:
            os.close(self._descriptor)
            self._state = next_state(self._state, Event.ABANDON)
        if self._state not in (State.OPEN, State.SEALED):
            return
        self._state = next_state(self._state, Event.ABANDON)
        names = [MANIFEST_NAME, *map(segment_name, self._ordinals)]
        for name in names:
            with suppress(OSError):
                os.unlink(name, dir_fd=self._descriptor)
        with suppress(OSError):
            os.rmdir(self.path)
        os.close(self._descriptor)


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


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
