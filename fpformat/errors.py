"""What can go wrong, sorted by whose fault it is.

Every exception of the project is a `FpformatError` and carries ``error_class``, one of the eight
classes of the specification (clause ERR-1). Bytes that break a clause give a `FormatError` that
names the clause, the place and what was found; a request of the caller that cannot be written
gives a `PlanError`. Operating system errors are chained, never swallowed.
"""

from dataclasses import dataclass

from fpformat.clauses import CLAUSE_CLASS, ErrorClass


class FpformatError(Exception):
    """Base of all errors of fpformat."""

    error_class: ErrorClass = "invalid"


class FormatError(FpformatError):
    """Bytes on disk break a clause of the specification.

    Attributes:
        clause: Id of the broken clause, such as ``"SEG-4"``.
        where: The file, table, record or tensor.
        detail: What was found and what was expected.
    """

    def __init__(self, clause: str, where: str, detail: str) -> None:
        self.clause = clause
        self.where = where
        self.detail = detail
        self.error_class = CLAUSE_CLASS[clause]
        super().__init__(clause, where, detail)

    def __str__(self) -> str:
        """Return place, fault, clause and class on one line."""
        return f"{self.where}: {self.detail} [{self.clause}, {self.error_class}]"


class ChecksumError(FormatError):
    """A checksum, digest, size or identity differs from what was saved (class corrupt)."""


class TruncatedError(ChecksumError):
    """A file is shorter than the checkpoint says (class corrupt)."""


class UnsupportedError(FormatError):
    """The checkpoint is sound but needs something that this reader does not know."""


class UncommittedError(FormatError):
    """A part is missing: the save was never finished, or files were removed since."""


class NotFpformatError(FormatError):
    """What the caller named is not a checkpoint of this format."""


class StorageError(FormatError):
    """The operating system failed to open or read; the `OSError` is chained.

    Attributes:
        errno: The error number, 0 when there is none; the path stands in `where`.
    """

    def __init__(self, clause: str, where: str, detail: str, *, errno: int = 0) -> None:
        self.errno = errno
        super().__init__(clause, where, detail)


class PlanError(FpformatError):
    """The caller asked for something that cannot be stored or found; nothing was changed.

    Attributes:
        problems: Every fault found, one line each.
    """

    def __init__(self, message: str, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n  ".join((message, *problems)))


_BY_CLASS: dict[ErrorClass, type[FormatError]] = {
    "corrupt": ChecksumError,
    "unsupported": UnsupportedError,
    "incomplete": UncommittedError,
    "not_fpformat": NotFpformatError,
    "io": StorageError,
}


def fault(clause: str, where: str, detail: str) -> FormatError:
    """Return the exception that belongs to a broken clause, for the caller to raise."""
    return _BY_CLASS.get(CLAUSE_CLASS[clause], FormatError)(clause, where, detail)


def storage_fault(where: str, action: str, error: OSError) -> StorageError:
    """Return the exception for an error of the operating system, for the caller to chain."""
    detail = f"{action}: {error.strerror or error}"
    return StorageError("DIR-7", where, detail, errno=error.errno or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One fault that a check found, for reports that list them all."""

    clause: str
    where: str
    detail: str

    @property
    def error_class(self) -> ErrorClass:
        """The class of the broken clause."""
        return CLAUSE_CLASS[self.clause]

    def __str__(self) -> str:
        """Return the same line as the exception of this fault."""
        return str(fault(self.clause, self.where, self.detail))

    @classmethod
    def of(cls, error: FormatError) -> "Problem":
        """Return the problem that an exception describes."""
        return cls(clause=error.clause, where=error.where, detail=error.detail)


class SaveError(FpformatError):
    """The operating system failed during a save; the `OSError` is chained.

    Nothing was committed, but for the two children that say otherwise.

    Attributes:
        path: The file or directory concerned.
        errno: The error number, 0 when there is none.
    """

    error_class: ErrorClass = "io"

    def __init__(self, path: str, action: str, error: OSError) -> None:
        self.path = path
        self.errno = error.errno or 0
        super().__init__(f"{path}: {action} failed: {error.strerror or error}")


class NotDurableError(SaveError):
    """The checkpoint is committed and stands, but its name may not survive power loss."""


class CommitOutcomeUnknownError(SaveError):
    """Whether the save was committed could not be found out; nothing was removed."""
