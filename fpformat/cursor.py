"""Reading the values of a state tree off its bytes, front to back, never past the end."""

import struct
from typing import Final, NoReturn

from fpformat.dtypes import DTYPES, DType, numpy_dtype
from fpformat.errors import fault

_U32: Final = struct.Struct("<I")


class Cursor:
    """Reads values off a document from front to back; knows the place for messages."""

    __slots__ = ("document", "position", "where")

    def __init__(self, document: bytes, where: str) -> None:
        self.document = document
        self.position = 0
        self.where = where

    def fail(self, clause: str, detail: str) -> NoReturn:
        """Raise the fault of `clause` at the present position."""
        raise fault(clause, f"{self.where}, before byte {self.position}", detail)

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes.

        spec: TRE-2
        """
        start = self.position
        left = len(self.document) - start
        if nbytes > left:
            self.fail("TRE-2", f"a value of {nbytes} bytes was expected, {left} bytes are left")
        self.position = start + nbytes
        return self.document[start : self.position]

    def u32(self) -> int:
        """Return the next four bytes as a number."""
        position = self.position
        if position + 4 > len(self.document):
            self.take(4)
        self.position = position + 4
        number: int = _U32.unpack_from(self.document, position)[0]
        return number

    def count(self, *, each: int) -> int:
        """Return a count of things that take at least `each` bytes."""
        count = self.u32()
        left = len(self.document) - self.position
        if count * each > left:
            self.fail("TRE-2", f"{count} entries cannot stand in the {left} bytes left")
        return count

    def text(self) -> str:
        """Return a string."""
        raw = self.take(self.u32())
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            self.fail("TRE-7", f"a string is not UTF-8: {error.reason} at its byte {error.start}")

    def dtype(self) -> DType:
        """Return a data type by its code."""
        code = int.from_bytes(self.take(2), "little")
        if code not in DTYPES:
            self.fail("TRE-9", f"data type code {code} is not registered")
        return DTYPES[code]

    def numpy_type(self) -> DType:
        """Return a data type that numpy has, by its code."""
        dtype = self.dtype()
        if numpy_dtype(dtype) is None:
            self.fail("TRE-9", f"numpy has no type {dtype.name}")
        return dtype
