"""What kernels need and numba's language lacks: raw memory, CRC-32C, atomics, calls into libc.

Each one is a Python function that does the same, its twin, with the LLVM instructions attached.
Kernels get the instructions; with ``NUMBA_DISABLE_JIT=1`` the twins run, except that an atomic
addition is one only among threads of Python. Everything is an int64: addresses, sizes, checksums.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from llvmlite import binding, ir
from numba import types
from numba.core import config
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., int])
Build = Callable[[Any, list[Any]], Any]

_BYTE: Final = ir.IntType(8)
_INT: Final = ir.IntType(32)
_WORD: Final = ir.IntType(64)
_POLYNOMIAL: Final = 0x82F63B78


# numba sets its options when it is imported, where no type checker sees them.
_NUMBA: Final[Any] = config
_TURN: Final = threading.Lock()
IS_INTERPRETED: Final = bool(_NUMBA.DISABLE_JIT)


def _is_x86_crc(features: str, triple: str) -> bool:
    return triple.startswith("x86_64") and "+sse4.2" in features.split(",")


def _is_arm_crc(features: str, triple: str) -> bool:
    return triple.startswith(("aarch64", "arm64")) and "+crc" in features.split(",")


def _features() -> str:
    """Return the features that numba compiles for, as it decides them itself."""
    if _NUMBA.CPU_FEATURES is not None:
        return str(_NUMBA.CPU_FEATURES)
    return str(binding.get_host_cpu_features().flatten())


_TRIPLE: Final = str(binding.get_process_triple())
_IS_X86: Final = _is_x86_crc(_features(), _TRIPLE)
_IS_ARM: Final = _is_arm_crc(_features(), _TRIPLE)
HAS_CRC_INSTRUCTION: Final = _IS_X86 or _IS_ARM or IS_INTERPRETED


def _native(build: Build) -> Callable[[F], F]:
    """Attach instructions to a twin of one to five int64 arguments."""

    def decorate(twin: F) -> F:
        if IS_INTERPRETED:
            # Cells of arrays are numbers of numpy, which ctypes does not take.
            return cast(F, lambda *args: twin(*map(int, args)))
        count = twin.__code__.co_argcount
        signature = types.int64(*[types.int64] * count)

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            del context, signature
            return build(builder, list(args))

        # intrinsic() reads the argument names of what it is given, so each count has its own.
        definitions: dict[int, Callable[..., Any]] = {
            1: lambda typing, a: (signature, emit),
            2: lambda typing, a, b: (signature, emit),
            3: lambda typing, a, b, c: (signature, emit),
            4: lambda typing, a, b, c, d: (signature, emit),
            5: lambda typing, a, b, c, d, e: (signature, emit),
        }
        return cast(F, intrinsic(definitions[count]))

    return decorate


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _build_load_word(builder: Any, args: list[Any]) -> Any:
    return builder.load(_pointer(builder, args[0], _WORD), align=1)


@_native(_build_load_word)
def load_word(address: int) -> int:
    """Return the eight bytes at `address`, which may have any alignment."""
    return ctypes.c_int64.from_address(address).value


def _build_load_byte(builder: Any, args: list[Any]) -> Any:
    return builder.zext(builder.load(_pointer(builder, args[0], _BYTE), align=1), _WORD)


@_native(_build_load_byte)
def load_byte(address: int) -> int:
    """Return the byte at `address`."""
    return ctypes.c_uint8.from_address(address).value


def _build_store_byte(builder: Any, args: list[Any]) -> Any:
    builder.store(builder.trunc(args[1], _BYTE), _pointer(builder, args[0], _BYTE), align=1)
    return ir.Constant(_WORD, 0)


@_native(_build_store_byte)
def store_byte(address: int, value: int) -> int:
    """Write one byte."""
    ctypes.c_uint8.from_address(address).value = value
    return 0


def _build_stream_word(builder: Any, args: list[Any]) -> Any:
    store = builder.store(args[1], _pointer(builder, args[0], _WORD), align=8)
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_INT, 1)]))
    return ir.Constant(_WORD, 0)


@_native(_build_stream_word)
def stream_word(address: int, value: int) -> int:
    """Write eight bytes past the caches; `address` is a multiple of 8. Needs `fence` later.

    A staging buffer is read by the disk, not by this processor, so caching it only costs.
    """
    ctypes.c_int64.from_address(address).value = value
    return 0


def _build_zero(builder: Any, args: list[Any]) -> Any:
    kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _BYTE, _WORD, ir.IntType(1)])
    memset = builder.module.declare_intrinsic("llvm.memset", [_BYTE.as_pointer(), _WORD], kind)
    target = _pointer(builder, args[0], _BYTE)
    builder.call(memset, [target, ir.Constant(_BYTE, 0), args[1], ir.Constant(ir.IntType(1), 0)])
    return ir.Constant(_WORD, 0)


@_native(_build_zero)
def zero(address: int, nbytes: int) -> int:
    """Fill memory with zeros."""
    ctypes.memset(address, 0, nbytes)
    return 0


def _build_prefetch(builder: Any, args: list[Any]) -> Any:
    kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _INT, _INT, _INT])
    fetch = builder.module.declare_intrinsic("llvm.prefetch", [_BYTE.as_pointer()], kind)
    read, without_reuse, of_bytes = (ir.Constant(_INT, value) for value in (0, 0, 1))
    builder.call(fetch, [_pointer(builder, args[0], _BYTE), read, without_reuse, of_bytes])
    return ir.Constant(_WORD, 0)


@_native(_build_prefetch)
def prefetch(address: int) -> int:
    """Ask for the cache line at `address`, which may lie anywhere, even outside of memory."""
    del address
    return 0


def _build_crc_word(builder: Any, args: list[Any]) -> Any:
    module = builder.module
    if _IS_X86:
        kind = ir.FunctionType(_WORD, [_WORD, _WORD])
        return builder.call(module.declare_intrinsic("llvm.x86.sse42.crc32.64.64", (), kind), args)
    kind = ir.FunctionType(_INT, [_INT, _WORD])
    step = module.declare_intrinsic("llvm.aarch64.crc32cx", (), kind)
    return builder.zext(builder.call(step, [builder.trunc(args[0], _INT), args[1]]), _WORD)


@_native(_build_crc_word)
def crc_word(state: int, word: int) -> int:
    """Return a CRC-32C state after eight more bytes; only with `HAS_CRC_INSTRUCTION`."""
    state = int(state) ^ (int(word) & 0xFFFFFFFFFFFFFFFF)
    for _ in range(64):
        state = (state >> 1) ^ (_POLYNOMIAL if state & 1 else 0)
    return state


def _build_fence(builder: Any, args: list[Any]) -> Any:
    builder.fence("seq_cst")
    return args[0]


@_native(_build_fence)
def fence(value: int) -> int:
    """Return `value` once every store before is visible, those of `stream_word` too."""
    return value


def _build_atomic_add(builder: Any, args: list[Any]) -> Any:
    return builder.atomic_rmw("add", _pointer(builder, args[0], _WORD), args[1], "seq_cst")


@_native(_build_atomic_add)
def atomic_add(address: int, value: int) -> int:
    """Add to the int64 at `address` and return what was there before."""
    cell = ctypes.c_int64.from_address(address)
    with _TURN:
        before = cell.value
        cell.value = before + value
    return before


def _build_atomic_load(builder: Any, args: list[Any]) -> Any:
    return builder.load_atomic(_pointer(builder, args[0], _WORD), "seq_cst", 8)


@_native(_build_atomic_load)
def atomic_load(address: int) -> int:
    """Return the int64 at `address` as other threads left it."""
    return ctypes.c_int64.from_address(address).value


def _build_pwrite(builder: Any, args: list[Any]) -> Any:
    kind = ir.FunctionType(_WORD, [_INT, _BYTE.as_pointer(), _WORD, _WORD])
    function, descriptor, address, nbytes, offset = args
    where = _pointer(builder, address, _BYTE)
    values = [builder.trunc(descriptor, _INT), where, nbytes, offset]
    return builder.call(_pointer(builder, function, kind), values)


@_native(_build_pwrite)
def call_pwrite(function: int, descriptor: int, address: int, nbytes: int, offset: int) -> int:
    """Call a function with the signature of ``pwrite(2)``."""
    kind = ctypes.CFUNCTYPE(
        ctypes.c_ssize_t,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int64,
        use_errno=True,
    )
    return int(kind(function)(descriptor, address, nbytes, offset))


def _build_sync_range(builder: Any, args: list[Any]) -> Any:
    kind = ir.FunctionType(_INT, [_INT, _WORD, _WORD, _INT])
    function, descriptor, offset, nbytes, flags = args
    values = [builder.trunc(descriptor, _INT), offset, nbytes, builder.trunc(flags, _INT)]
    return builder.sext(builder.call(_pointer(builder, function, kind), values), _WORD)


@_native(_build_sync_range)
def call_sync_range(function: int, descriptor: int, offset: int, nbytes: int, flags: int) -> int:
    """Call a function with the signature of ``sync_file_range(2)``."""
    kind = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint, use_errno=True
    )
    return int(kind(function)(descriptor, offset, nbytes, flags))


def _build_errno(builder: Any, args: list[Any]) -> Any:
    kind = ir.FunctionType(_INT.as_pointer(), [])
    place = builder.call(_pointer(builder, args[0], kind), [])
    return builder.sext(builder.load(place, align=4), _WORD)


@_native(_build_errno)
def call_errno(function: int) -> int:
    """Return this thread's errno; `function` is ``__errno_location``."""
    del function
    return ctypes.get_errno()
