"""What a pickle yields when nothing in it is executed: inert records beside Python's own values."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Global:
    """A name that a pickle asks to import; here it stays a name."""

    module: str
    name: str

    def __str__(self) -> str:
        """Return the dotted name."""
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Built:
    """A call that a pickle asks for, and what it then puts into the result.

    Attributes:
        function: What is called: a `Global` in every sound pickle.
        arguments: The positional arguments; None when they are no tuple.
        states: Each value that the object would be told to take as its state.
        members: What would be appended to it.
        pairs: What would be set in it by key.
    """

    function: Any
    arguments: tuple[Any, ...]
    states: list[Any] = field(default_factory=list)
    members: list[Any] = field(default_factory=list)
    pairs: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def caller(self) -> str:
        """The dotted name of what is called."""
        return str(self.function) if isinstance(self.function, Global) else "a computed function"


@dataclass(slots=True, eq=False)
class Persistent:
    """A reference to something outside the pickle, such as a storage."""

    identity: Any


@dataclass(slots=True, eq=False)
class Members:
    """A set or a frozen set; members are kept as a list because they may not be hashable."""

    kind: str
    members: list[Any]


@dataclass(slots=True, eq=False)
class OddKey:
    """A dictionary key of a type that is not looked into, such as a tuple."""

    value: Any
