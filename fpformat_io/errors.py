"""What can go wrong in a save beyond the format: the operating system, and memory to copy into."""

from fpformat.clauses import ErrorClass
from fpformat.errors import (
    CommitOutcomeUnknownError,
    FpformatError,
    NotDurableError,
    SaveError,
)


class EngineError(FpformatError):
    """Base of the errors of the engine; the cause is chained."""

    def __init__(self, message: str, error_class: ErrorClass = "io") -> None:
        self.error_class = error_class
        super().__init__(message)


class WriteError(EngineError):
    """A save failed before its commit; the checkpoints that exist are untouched.

    Attributes:
        path: The file or directory concerned, None when there is none.
        offset: Where in the file, None when it was no write.
        nbytes: How much was to be written there, None when it was no write.
        errno: The error number, 0 when there is none.
    """

    def __init__(
        self,
        message: str,
        error_class: ErrorClass = "io",
        *,
        path: str | None = None,
        offset: int | None = None,
        nbytes: int | None = None,
        errno: int = 0,
    ) -> None:
        super().__init__(message, error_class)
        self.path = path
        self.offset = offset
        self.nbytes = nbytes
        self.errno = errno


class StagingError(EngineError):
    """The state could not be copied to host memory; nothing was written."""


class CancelledError(EngineError):
    """The save was stopped at its caller's wish before its commit; nothing of it is left."""


class CommitError(EngineError):
    """The save is committed but may not be durable, or its outcome is unknown: see the message."""


def engine_error(error: Exception) -> EngineError:
    """Return the engine's error for a failed save; the caller chains `error`."""
    if isinstance(error, WriteError):
        return WriteError(
            str(error),
            error.error_class,
            path=error.path,
            offset=error.offset,
            nbytes=error.nbytes,
            errno=error.errno,
        )
    if isinstance(error, EngineError):
        return type(error)(str(error), error.error_class)
    if isinstance(error, CommitOutcomeUnknownError | NotDurableError):
        return CommitError(str(error), error.error_class)
    if isinstance(error, SaveError):
        return WriteError(str(error), error.error_class, path=error.path, errno=error.errno)
    if isinstance(error, FpformatError):
        return WriteError(f"the save was refused: {error}", error.error_class)
    return WriteError(f"the save failed: {type(error).__name__}: {error}")
