"""What the commands refuse, as exceptions with the classes of the specification.

A `SourceError` is the fault of the input, a `TargetError` of what was asked of the output. Both
print as one line that names the place; lists of many places follow it, one a line.
"""

from collections.abc import Iterable

from fpformat.clauses import ErrorClass
from fpformat.errors import FpformatError


class ToolError(FpformatError):
    """Base of what the commands raise themselves.

    Attributes:
        where: The input or output, and the tensor where one is to blame.
        detail: What was found and what was expected.
        problems: Every place concerned, one line each, where there are several.
    """

    def __init__(
        self, error_class: ErrorClass, where: str, detail: str, problems: Iterable[str] = ()
    ) -> None:
        self.error_class = error_class
        self.where = where
        self.detail = detail
        self.problems = tuple(problems)
        super().__init__(error_class, where, detail)

    def __str__(self) -> str:
        """Return place, fault and class on one line, then the places."""
        return "\n  ".join((f"{self.where}: {self.detail} [{self.error_class}]", *self.problems))


class SourceError(ToolError):
    """The input is damaged, is something else, or holds what has no representation."""


class TargetError(ToolError):
    """The output cannot hold the state, exists already, or could not be written."""


class UsageError(ToolError):
    """The command line asks for something that makes no sense (exit code 2)."""

    def __init__(self, detail: str) -> None:
        super().__init__("invalid", "usage", detail)

    def __str__(self) -> str:
        """Return the fault alone."""
        return self.detail
