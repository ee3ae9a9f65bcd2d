"""What a pickle yields when nothing in it is executed: inert records beside Python's own values."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fpformat_tools.text import shown

# What a pickle names when it is meant to do harm. Nothing is ever called, so that this list only
# decides how loud the refusal is.
_DANGEROUS_MODULES: Final = frozenset(
    {
        *("asyncio", "bdb", "cffi", "code", "codeop", "commands", "ctypes", "http", "importlib"),
        *("marshal", "multiprocessing", "nt", "os", "pdb", "pip", "pkgutil", "popen2", "posix"),
        *("profile", "pty", "runpy", "shutil", "smtplib", "socket", "ssl", "subprocess", "sys"),
        *("tempfile", "threading", "timeit", "trace", "urllib", "urllib2", "webbrowser"),
        *("_posixsubprocess", "_pickle", "cPickle", "cProfile", "dill", "cloudpickle", "pickle"),
    }
)
_SHOWN_NAME_LIMIT: Final = 200
_BUILTINS: Final = ("__builtin__", "builtins")
_DANGEROUS_BUILTINS: Final = frozenset(
    {
        *("__import__", "apply", "breakpoint", "compile", "delattr", "eval", "exec", "execfile"),
        *("file", "getattr", "globals", "input", "locals", "open", "setattr", "vars"),
    }
)


class Unrepresentable(Exception):
    """A value that fpformat has no form for; the reason is its only argument."""


@dataclass(frozen=True, slots=True)
class Global:
    """A name that a pickle asks to import; here it stays a name."""

    module: str
    name: str

    def __str__(self) -> str:
        """Return the dotted name, on one line and cut if long."""
        text = f"{self.module}.{self.name}"
        return text if len(text) <= _SHOWN_NAME_LIMIT and text.isprintable() else shown(text)


def runs_code(named: Global) -> bool:
    """Whether a name is one of those by which pickles run what their authors want."""
    if named.module in _BUILTINS:
        return named.name.partition(".")[0] in _DANGEROUS_BUILTINS
    return named.module.partition(".")[0] in _DANGEROUS_MODULES


@dataclass(slots=True, eq=False)
class Built:
    """A call that a pickle asks for, and what it then puts into the result.

    Attributes:
        function: What is called: a `Global` in every sound pickle.
        arguments: The positional arguments.
        states: Each value that the object would be told to take as its state.
        members: What would be appended to it.
        pairs: What would be set in it by key.
    """

    function: Any
    arguments: tuple[Any, ...]
    states: Sequence[Any] = ()
    members: Sequence[Any] = ()
    pairs: Sequence[tuple[Any, Any]] = ()

    def add_state(self, state: Any) -> None:
        """Record a state; lists are made only where there is something to hold."""
        self.states = grown(self.states, (state,))

    @property
    def caller(self) -> str:
        """The dotted name of what is called."""
        return str(self.function) if isinstance(self.function, Global) else "a computed function"


def grown(held: Sequence[Any], values: Iterable[Any]) -> list[Any]:
    """Return a list of what was held and more; the same list, if it was one."""
    grown = held if isinstance(held, list) else list(held)
    grown.extend(values)
    return grown


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
