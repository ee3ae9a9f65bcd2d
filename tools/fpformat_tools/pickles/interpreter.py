"""An interpreter of pickle opcodes, protocols 0 to 5, that executes nothing and imports nothing.

It is a stack machine over a bounded stream. Python's own values come out as themselves; a name to
import, a call, a persistent reference come out as the inert records of `pickle_values`, for the
caller to know or to refuse. Each operation is charged with the memory that its value takes beyond
the bytes of the pickle, and the sum has a limit: a byte of a pickle may make an object of a hundred
bytes, and a deflated pickle costs its author next to nothing. Values are never compared, printed or
hashed on the way (a deep tuple would exhaust the C stack, one that holds the same tuple twice at
each level would take forever), except the few types of key that a checkpoint may have.

spec: CNV-6, CNV-22
"""

import codecs
import re
import struct
from collections.abc import Callable
from typing import Any, Final

from fpformat.limits import KEY_INTS
from fpformat_tools.errors import SourceError
from fpformat_tools.pickles.values import Built, Global, Members, OddKey, Persistent, grown
from fpformat_tools.streams.ranges import ByteRange

MAX_PICKLE_NBYTES: Final = 512 * 1024 * 1024
MAX_OPERATIONS: Final = 1 << 25
_WINDOW_NBYTES: Final = 256 * 1024
_LINE_LIMIT: Final = 4096
# Text is hashed with a secret of the process; whole numbers are not, hence the range of the keys.
_PLAIN_KEYS: Final = frozenset({str, bool, type(None)})
MAX_MEMORY_NBYTES: Final = 400 * 1024 * 1024
# What values take, rounded up; the slots that hold a value in stack, memo and container included.
_SLOT_NBYTES: Final = 16
_MARK_NBYTES: Final = 64
_OBJECT_NBYTES: Final = 64
_CALL_NBYTES: Final = 96
_PAIR_NBYTES: Final = 112
_ENTRY_NBYTES: Final = 128
_WIDE: Final = re.compile(rb"[\xf0-\xff]")
_DOUBLE: Final = re.compile(rb"[\xc4-\xef]")


class PickleStream:
    """Reads forward through a stretch of bytes, one window at a time."""

    def __init__(self, stretch: ByteRange, *, start: int, where: str) -> None:
        self.position = start
        self.where = where
        self._stretch = stretch
        self._limit = min(stretch.nbytes, start + MAX_PICKLE_NBYTES)
        self._window = b""
        self._window_start = start

    def fail(self, detail: str) -> SourceError:
        """Return the error of a fault at the present position."""
        return SourceError("malformed", self.where, f"pickle, byte {self.position:,}: {detail}")

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        begin = self.position - self._window_start
        stop = begin + nbytes
        if stop > len(self._window):
            left = self._limit - self.position
            if nbytes > left:
                raise self._ends(nbytes)
            if nbytes > _WINDOW_NBYTES:
                self.position += nbytes
                self._window, self._window_start = b"", self.position
                return self._stretch.read_at(offset=self.position - nbytes, nbytes=nbytes)
            reach = min(_WINDOW_NBYTES, left)
            self._window = self._stretch.read_at(offset=self.position, nbytes=reach)
            self._window_start = self.position
            begin, stop = 0, nbytes
        self.position += nbytes
        return self._window[begin:stop]

    def _ends(self, nbytes: int) -> SourceError:
        if self._limit < self._stretch.nbytes:
            detail = f"pickle is longer than {MAX_PICKLE_NBYTES:,} bytes"
            return SourceError("limit", self.where, detail)
        detail = f"truncated: the pickle needs {nbytes:,} bytes at {self.position:,}"
        return SourceError("corrupt", self.where, f"{detail}, it ends at {self._limit:,}")

    def raw_line(self) -> bytes:
        """Return the bytes up to the next line feed."""
        begin = self.position - self._window_start
        end = self._window.find(b"\n", begin, begin + _LINE_LIMIT)
        if end >= 0:
            return self.take(end + 1 - begin)[:-1]
        raw = bytearray()
        while (byte := self.take(1)) != b"\n":
            raw += byte
            if len(raw) > _LINE_LIMIT:
                raise self.fail(f"a line is longer than {_LINE_LIMIT} bytes")
        return bytes(raw)

    def line(self) -> str:
        """Return the text up to the next line feed."""
        return self.raw_line().decode("utf-8", "replace")


class PickleMachine:
    """The stack, the marks and the memo of one pickle.

    Attributes:
        left_nbytes: What its values may still take of memory.
    """

    def __init__(self, stream: PickleStream, *, left_nbytes: int = MAX_MEMORY_NBYTES) -> None:
        self.left_nbytes = left_nbytes
        self._stream = stream
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        # Positions follow one another but in hand-made pickles.
        self._memo: list[Any] = []
        self._far_memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Interpret up to the stop opcode and return the value on the stack.

        Raises:
            SourceError: The pickle is damaged, too long, or uses an opcode with no place in it.
        """
        take, operations = self._stream.take, _OPERATIONS
        for _ in range(MAX_OPERATIONS):
            opcode = take(1)
            if opcode == b".":
                break
            operation = operations.get(opcode)
            if operation is None:
                raise self._stream.fail(f"opcode {opcode!r} has no place in a saved state")
            self.charge(_COSTS.get(opcode, _SLOT_NBYTES))
            operation(self)
        else:
            detail = f"its pickle has more than {MAX_OPERATIONS:,} operations"
            raise SourceError("limit", self._stream.where, detail)
        if len(self._stack) != 1 or self._marks:
            raise self._stream.fail("stops with values left over")
        return self._stack[0]

    def charge(self, nbytes: int) -> None:
        """Count memory that values take.

        Raises:
            SourceError: Class limit, when they take too much.
        """
        self.left_nbytes -= nbytes
        if self.left_nbytes < 0:
            detail = f"the values of its pickle take more than {MAX_MEMORY_NBYTES:,} bytes"
            raise SourceError("limit", self._stream.where, detail)

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self._stack.append(value)

    def pop(self) -> Any:
        """Take the topmost value off the stack."""
        if not self._stack:
            raise self._stream.fail("takes a value from an empty stack")
        return self._stack.pop()

    def top(self) -> Any:
        """Return the topmost value."""
        if not self._stack:
            raise self._stream.fail("looks at an empty stack")
        return self._stack[-1]

    def mark(self) -> None:
        """Begin a group of values."""
        self._marks.append(self._stack)
        self._stack = []

    def group(self) -> list[Any]:
        """Return the values since the last mark."""
        if not self._marks:
            raise self._stream.fail("ends a group that never began")
        values = self._stack
        self._stack = self._marks.pop()
        self.left_nbytes += _MARK_NBYTES
        return values

    def several(self, count: int) -> tuple[Any, ...]:
        """Take `count` values off the stack, in the order they were put there."""
        if len(self._stack) < count:
            raise self._stream.fail("takes a value from an empty stack")
        values = tuple(self._stack[-count:])
        del self._stack[-count:]
        return values

    def put(self, position: int) -> None:
        """Remember the topmost value."""
        value = self.top()
        if position == len(self._memo):
            self._memo.append(value)
            self._far_memo.pop(position, None)
        elif 0 <= position < len(self._memo):
            self._memo[position] = value
        elif position > 0:
            if position not in self._far_memo:
                self.charge(_ENTRY_NBYTES)
            self._far_memo[position] = value
        else:
            raise self._stream.fail("a memo position is negative")

    def memoize(self) -> None:
        """Remember the topmost value at the next free position."""
        self.put(len(self._memo) + len(self._far_memo))

    def get(self, position: int) -> None:
        """Put a remembered value on the stack."""
        if 0 <= position < len(self._memo):
            self.push(self._memo[position])
        elif position in self._far_memo:
            self.push(self._far_memo[position])
        else:
            raise self._stream.fail("asks for a place of the memo that is empty")

    def text(self, nbytes: int) -> None:
        """Put UTF-8 text of `nbytes` bytes on the stack."""
        raw = self._stream.take(nbytes)
        # One character beyond the first 256 or 65,536 makes all the others as wide.
        self.charge(3 * nbytes if _WIDE.search(raw) else nbytes if _DOUBLE.search(raw) else 0)
        try:
            self.push(raw.decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError as error:
            raise self._stream.fail("text is not UTF-8") from error

    def old_text(self, raw: bytes) -> None:
        """Put a string of Python 2 on the stack: text if it is UTF-8, else bytes."""
        try:
            self.push(raw.decode())
        except UnicodeDecodeError:
            self.push(raw)

    def quoted(self) -> None:
        """Put the string on the stack that a line of protocol 0 quotes."""
        line = self._stream.raw_line().strip()
        if len(line) < 2 or line[:1] not in (b"'", b'"') or line[-1:] != line[:1]:
            raise self._stream.fail("a string is not quoted")
        try:
            self.old_text(codecs.escape_decode(line[1:-1])[0])
        except ValueError as error:
            raise self._stream.fail("a string has a bad escape") from error

    def decimal(self) -> None:
        """Put the number of a line of protocol 0 on the stack."""
        line = self._stream.line().strip().rstrip("L")
        try:
            self.push({"00": False, "01": True}[line] if line in ("00", "01") else int(line))
        except ValueError as error:
            raise self._stream.fail("a number is not a number") from error

    def real(self) -> None:
        """Put the floating-point number of a line of protocol 0 on the stack."""
        try:
            self.push(float(self._stream.line()))
        except ValueError as error:
            raise self._stream.fail("a number is not a number") from error

    def integer(self, nbytes: int) -> None:
        """Put a two's complement number of `nbytes` bytes on the stack."""
        if nbytes < 0:
            raise self._stream.fail("a number has a negative length")
        self.push(int.from_bytes(self._stream.take(nbytes), "little", signed=True))

    def extend(self, values: list[Any]) -> None:
        """Append values to the list on top of the stack."""
        target = self.top()
        if isinstance(target, Built | Members):
            target.members = grown(target.members, values)
        elif isinstance(target, list):
            target.extend(values)
        else:
            raise self._stream.fail("appends to something that is no list")

    def set_pairs(self, values: list[Any]) -> None:
        """Set keys and values in the dictionary on top of the stack."""
        target = self.top()
        pairs = list(zip(values[::2], values[1::2], strict=False))
        if len(values) % 2:
            raise self._stream.fail("sets a key without a value")
        self.charge(_PAIR_NBYTES * len(pairs))
        if isinstance(target, Built):
            target.pairs = grown(target.pairs, pairs)
        elif isinstance(target, dict):
            for key, value in pairs:
                target[plain_key(key)] = value
        else:
            raise self._stream.fail("sets a key in something that is no dictionary")

    def make_dict(self) -> None:
        """Put a dictionary of the group's keys and values on the stack."""
        values = self.group()
        self.push({})
        self.set_pairs(values)

    def call(self, function: Any, arguments: Any) -> None:
        """Record a call; nothing is called."""
        if not isinstance(arguments, tuple):
            raise self._stream.fail("calls something without a tuple of arguments")
        self.push(Built(function, arguments))

    def call_with_keywords(self) -> None:
        """Record a call with keywords, which stay unknown to the caller unless empty."""
        function, arguments, keywords = self.several(3)
        self.call(function, arguments)
        if keywords != {}:
            self.top().add_state(keywords)

    def call_group(self, values: list[Any]) -> None:
        """Record a call whose function is the first of the group."""
        if not values:
            raise self._stream.fail("calls nothing")
        self.call(values[0], tuple(values[1:]))

    def instantiate(self) -> None:
        """Record a call of protocol 0: the name in two lines, the arguments in the group."""
        named = Global(self._stream.line(), self._stream.line())
        self.call(named, tuple(self.group()))

    def build(self) -> None:
        """Record the state that an object would take."""
        state = self.pop()
        target = self.top()
        if not isinstance(target, Built):
            raise self._stream.fail("sets the state of something that was not built")
        if not target.states:
            self.charge(_OBJECT_NBYTES)
        target.add_state(state)

    def name(self, module: Any, name: Any) -> None:
        """Put a name to import on the stack; nothing is imported."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise self._stream.fail("a name to import is no text")
        if len(module) > _LINE_LIMIT or len(name) > _LINE_LIMIT:
            raise self._stream.fail(f"a name to import is longer than {_LINE_LIMIT} characters")
        self.push(Global(module, name))

    def unsigned(self, nbytes: int) -> int:
        """Return the next number of the stream, at least 0."""
        return int.from_bytes(self._stream.take(nbytes), "little")

    def signed(self, nbytes: int) -> int:
        """Return the next number of the stream, in two's complement."""
        return int.from_bytes(self._stream.take(nbytes), "little", signed=True)

    def raw(self, nbytes: int) -> bytes:
        """Return the next bytes of the stream."""
        return self._stream.take(nbytes)

    def line(self) -> str:
        """Return the next line of the stream."""
        return self._stream.line()

    def raw_unicode(self) -> None:
        """Put the text of a line of protocol 0 on the stack."""
        try:
            self.push(self._stream.raw_line().decode("raw-unicode-escape"))
        except UnicodeDecodeError as error:
            raise self._stream.fail("text has a bad escape") from error

    def position_line(self) -> int:
        """Return the memo position that a line of protocol 0 spells."""
        try:
            return int(self._stream.line())
        except ValueError as error:
            raise self._stream.fail("a memo position is not a number") from error


def plain_key(key: Any) -> Any:
    """Return a key that may stand in a dictionary: itself, or wrapped so that it is not hashed."""
    if type(key) in _PLAIN_KEYS or (type(key) is int and key in KEY_INTS):
        return key
    return OddKey(key)


_OPERATIONS: Final[dict[bytes, Callable[[PickleMachine], object]]] = {
    b"\x80": lambda m: m.raw(1),
    b"\x95": lambda m: m.raw(8),
    b"(": PickleMachine.mark,
    b"0": PickleMachine.pop,
    b"1": PickleMachine.group,
    b"2": lambda m: m.push(m.top()),
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"I": PickleMachine.decimal,
    b"L": PickleMachine.decimal,
    b"J": lambda m: m.push(m.signed(4)),
    b"K": lambda m: m.push(m.unsigned(1)),
    b"M": lambda m: m.push(m.unsigned(2)),
    b"\x8a": lambda m: m.integer(m.unsigned(1)),
    b"\x8b": lambda m: m.integer(m.signed(4)),
    b"F": PickleMachine.real,
    b"G": lambda m: m.push(struct.unpack(">d", m.raw(8))[0]),
    b"S": PickleMachine.quoted,
    b"T": lambda m: m.old_text(m.raw(max(m.signed(4), 0))),
    b"U": lambda m: m.old_text(m.raw(m.unsigned(1))),
    b"B": lambda m: m.push(m.raw(m.unsigned(4))),
    b"C": lambda m: m.push(m.raw(m.unsigned(1))),
    b"\x8e": lambda m: m.push(m.raw(m.unsigned(8))),
    b"\x96": lambda m: m.push(bytearray(m.raw(m.unsigned(8)))),
    b"V": PickleMachine.raw_unicode,
    b"X": lambda m: m.text(m.unsigned(4)),
    b"\x8c": lambda m: m.text(m.unsigned(1)),
    b"\x8d": lambda m: m.text(m.unsigned(8)),
    b"]": lambda m: m.push([]),
    b"a": lambda m: m.extend([m.pop()]),
    b"e": lambda m: m.extend(m.group()),
    b"l": lambda m: m.push(m.group()),
    b")": lambda m: m.push(()),
    b"t": lambda m: m.push(tuple(m.group())),
    b"\x85": lambda m: m.push(m.several(1)),
    b"\x86": lambda m: m.push(m.several(2)),
    b"\x87": lambda m: m.push(m.several(3)),
    b"}": lambda m: m.push({}),
    b"d": PickleMachine.make_dict,
    b"s": lambda m: m.set_pairs(list(m.several(2))),
    b"u": lambda m: m.set_pairs(m.group()),
    b"\x8f": lambda m: m.push(Members("set", [])),
    b"\x90": lambda m: m.extend(m.group()),
    b"\x91": lambda m: m.push(Members("frozenset", m.group())),
    b"g": lambda m: m.get(m.position_line()),
    b"h": lambda m: m.get(m.unsigned(1)),
    b"j": lambda m: m.get(m.unsigned(4)),
    b"p": lambda m: m.put(m.position_line()),
    b"q": lambda m: m.put(m.unsigned(1)),
    b"r": lambda m: m.put(m.unsigned(4)),
    b"\x94": PickleMachine.memoize,
    b"c": lambda m: m.name(m.line(), m.line()),
    b"\x93": lambda m: m.name(*m.several(2)),
    b"R": lambda m: m.call(*m.several(2)),
    b"\x81": lambda m: m.call(*m.several(2)),
    b"\x92": PickleMachine.call_with_keywords,
    b"o": lambda m: m.call_group(m.group()),
    b"i": PickleMachine.instantiate,
    b"b": PickleMachine.build,
    b"P": lambda m: m.push(Persistent(m.line())),
    b"Q": lambda m: m.push(Persistent(m.pop())),
}


def _costs(opcodes: bytes, nbytes: int) -> dict[bytes, int]:
    return {bytes((opcode,)): nbytes for opcode in opcodes}


_COSTS: Final[dict[bytes, int]] = {
    **_costs(b"IJLMFG", _SLOT_NBYTES + 32),
    **_costs(b"]}ldt\x85\x86\x87PQc\x93", _SLOT_NBYTES + _OBJECT_NBYTES),
    **_costs(b"STUVXBC\x8a\x8b\x8c\x8d\x8e\x96", _SLOT_NBYTES + _OBJECT_NBYTES),
    **_costs(b"Roi\x81\x8f\x91\x92", _SLOT_NBYTES + _CALL_NBYTES),
    **_costs(b"(", _SLOT_NBYTES + _MARK_NBYTES),
}
