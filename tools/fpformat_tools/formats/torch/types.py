"""How torch spells the registered data types: as dtypes and as classes of storages."""

from typing import Final

from fpformat.dtypes import DType, by_name

# The names of torch's dtypes, each with the name in the registry.
_NAMES: Final = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4_E2M1_X2",
    "complex32": "C32",
    "complex64": "C64",
    "complex128": "C128",
}
# Typed storages exist for the older data types only; the others lie in an untyped one.
_STORAGES: Final = {
    "BoolStorage": "BOOL",
    "ByteStorage": "U8",
    "CharStorage": "I8",
    "ShortStorage": "I16",
    "IntStorage": "I32",
    "LongStorage": "I64",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "FloatStorage": "F32",
    "DoubleStorage": "F64",
    "ComplexFloatStorage": "C64",
    "ComplexDoubleStorage": "C128",
    "UntypedStorage": "U8",
}

DTYPE_OF_TORCH: Final[dict[str, DType]] = {name: by_name(ours) for name, ours in _NAMES.items()}
TORCH_OF_DTYPE: Final[dict[str, str]] = {ours: name for name, ours in _NAMES.items()}
DTYPE_OF_STORAGE: Final[dict[str, DType]] = {
    name: by_name(ours) for name, ours in _STORAGES.items()
}
STORAGE_OF_DTYPE: Final[dict[str, str]] = {
    ours: name for name, ours in _STORAGES.items() if name != "UntypedStorage"
}
