"""Bytes, sizes and the arithmetic of rounding.

GB is 10^9 bytes and GiB is 2^30 bytes; both are always written out. Bytes are `int`.
"""

from __future__ import annotations

import re
from fractions import Fraction

from wazn.errors import InputError

__all__ = [
    "GB",
    "GIB",
    "KIB",
    "MB",
    "MIB",
    "ceil_div",
    "format_size",
    "parse_count",
    "parse_size",
    "round_up",
]

KIB = 2**10
MIB = 2**20
GIB = 2**30
MB = 10**6
GB = 10**9

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_NUMBER_WITH_UNIT = re.compile(r"\s*(\d[\d_,]*(?:\.\d+)?|\.\d+)\s*([a-zA-Z]*)\s*", re.ASCII)
_LONGEST_NUMBER = 40  # characters; a longer one is a mistake or an attack, and int() is quadratic


def ceil_div(numerator: int, denominator: int) -> int:
    """Return numerator / denominator rounded up, in integers.

    >>> ceil_div(7, 2)
    4
    """
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`.

    >>> round_up(513, 512)
    1024
    """
    return ceil_div(value, multiple) * multiple


def parse_size(text: str) -> int:
    """Return the bytes that a person wrote: `512 MiB`, `0.5GB`, `20gb`, `1024`.

    A fraction of a byte is rounded up.

    Raises: InputError for anything else.

    >>> parse_size("0.5GB"), parse_size("512 MiB")
    (500000000, 536870912)
    """
    return _parse(text, units=_SIZE_UNITS, what="a size such as `512 MiB` or `0.5GB`")


def parse_count(text: str) -> int:
    """Return the number that a person wrote: `7B` parameters, `65_536`, `8k`.

    Raises: InputError for anything else, and for a number that is not whole.

    >>> parse_count("7B"), parse_count("1.5B")
    (7000000000, 1500000000)
    """
    return _parse(text, units=_COUNT_UNITS, what="a count such as `7B`, `350M` or `4096`", whole=True)


def _parse(text: str, *, units: dict[str, int], what: str, whole: bool = False) -> int:
    match = _NUMBER_WITH_UNIT.fullmatch(text) if len(text) <= _LONGEST_NUMBER else None
    if match is None or match[2].lower() not in units:
        raise InputError(f"expected {what}, found `{text[:_LONGEST_NUMBER]}`")
    value = Fraction(match[1].replace("_", "").replace(",", "")) * units[match[2].lower()]
    if whole and value.denominator != 1:
        raise InputError(f"expected {what}, found `{text}`, which is not a whole number")
    return ceil_div(value.numerator, value.denominator)


def format_size(num_bytes: int, *, unit: str = "GiB", digits: int = 2) -> str:
    """Return the bytes in one written-out unit, rounded half to even.

    >>> format_size(72_434_837_504)
    '67.46 GiB'
    """
    return f"{num_bytes / _SIZE_UNITS[unit.lower()]:.{digits}f} {unit}"
