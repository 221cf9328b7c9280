"""Element types by PyTorch's names, with their size."""

from __future__ import annotations

from dataclasses import dataclass

from wazn.errors import InputError

__all__ = [
    "BFLOAT16",
    "BOOL",
    "FLOAT16",
    "FLOAT32",
    "INT8",
    "INT64",
    "UINT8",
    "Dtype",
    "parse_dtype",
]


@dataclass(frozen=True, slots=True)
class Dtype:
    """An element type: PyTorch's name and the bytes of one element."""

    name: str
    itemsize: int


FLOAT32 = Dtype("float32", 4)
BFLOAT16 = Dtype("bfloat16", 2)
FLOAT16 = Dtype("float16", 2)
INT64 = Dtype("int64", 8)
INT32 = Dtype("int32", 4)
UINT8 = Dtype("uint8", 1)
INT8 = Dtype("int8", 1)
BOOL = Dtype("bool", 1)

_FLOATING = {
    "float32": FLOAT32,
    "fp32": FLOAT32,
    "bfloat16": BFLOAT16,
    "bf16": BFLOAT16,
    "float16": FLOAT16,
    "fp16": FLOAT16,
}


def parse_dtype(text: str) -> Dtype:
    """Return the floating-point type that a person named: `bf16`, `float32`, ...

    Raises: InputError for any other name.

    >>> parse_dtype("bf16").itemsize
    2
    """
    dtype = _FLOATING.get(text.lower().removeprefix("torch."))
    if dtype is None:
        raise InputError(
            f"expected a floating-point type, found `{text[:40]}`",
            hint="one of " + ", ".join(f"`{name}`" for name in _FLOATING),
        )
    return dtype
