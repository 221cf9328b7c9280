"""Bytes, sizes and the arithmetic of rounding.

GB is 10^9 bytes and GiB is 2^30 bytes; both are always written out. Bytes are `int`. What a person
wrote is read as an exact fraction, never as a float: `0.1GB` is 100,000,000 bytes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from wazn.errors import InputError

if TYPE_CHECKING:
    from fractions import Fraction  # costs 3 ms at start, and few commands need it

__all__ = [
    "GB",
    "GIB",
    "KIB",
    "MB",
    "MIB",
    "ceil_div",
    "format_ratio",
    "format_size",
    "parse_count",
    "parse_decimal",
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
_NUMBER_WITH_UNIT = re.compile(
    r"""\s*
    ( \d{1,3}(?:,\d{3})+(?:\.\d+)?   # 65,536: a comma stands before three digits, or `0,5` is 5
    | \d[\d_]*(?:\.\d+)?
    | \.\d+ )
    (?: e\+? (\d{1,2}) )?
    \s* ([a-z]*) \s*""",
    re.ASCII | re.IGNORECASE | re.VERBOSE,
)
_POINT_FOR_THOUSANDS = re.compile(r"\s*\d{1,3}\.000\s*", re.ASCII)
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
    return ceil_div(*_parse(text, units=_SIZE_UNITS, what="a size such as `512 MiB` or `0.5GB`"))


def parse_count(text: str, *, examples: str = "`7B`, `350M` or `4096`") -> int:
    """Return the number that a person wrote: `7B` parameters, `65_536`, `8k`, `1e9`.

    Raises: InputError for anything else, and for a number that is not whole; it says the examples.

    >>> parse_count("7B"), parse_count("1.5B")
    (7000000000, 1500000000)
    """
    what = f"a whole number such as {examples}"
    numerator, denominator = _parse(text, units=_COUNT_UNITS, what=what)
    if numerator % denominator:
        raise InputError(f"expected {what}, found `{text}`")
    if _POINT_FOR_THOUSANDS.fullmatch(text):  # 1.000 is one thousand to half of the world
        plain = text.strip().replace(".", "")
        raise InputError(
            f"expected {what}, found `{text}`", hint=f"write `{plain}` or `{plain[:-3]}`"
        )
    return numerator // denominator


def parse_decimal(text: str) -> Fraction:
    """Return the number that a person wrote, exactly: `16`, `4.5`, `0.127`.

    Raises: InputError for anything else.

    >>> parse_decimal("4.5")
    Fraction(9, 2)
    """
    from fractions import Fraction

    return Fraction(*_parse(text, units={"": 1}, what="a number such as `16` or `4.5`"))


def _parse(text: str, *, units: dict[str, int], what: str) -> tuple[int, int]:
    """Return what was written as an exact (numerator, denominator), in the base unit."""
    found = text if len(text) <= _LONGEST_NUMBER else f"{text[:_LONGEST_NUMBER]}..."
    match = _NUMBER_WITH_UNIT.fullmatch(text) if len(text) <= _LONGEST_NUMBER else None
    if match is None:
        raise InputError(f"expected {what}, found `{found}`")
    digits, exponent, unit = match[1].replace("_", "").replace(",", ""), match[2], match[3].lower()
    if unit not in units:
        raise InputError(f"expected {what}, found `{found}`", hint=_written_out(match, units))
    whole, _, decimals = digits.partition(".")
    scale = units[unit] * 10 ** int(exponent or 0)
    return int(f"0{whole}{decimals}") * scale, 10 ** len(decimals)


def _written_out(match: re.Match[str], units: dict[str, int]) -> str | None:
    """`24G` could mean either: offer both."""
    prefix = match[3].upper()
    if f"{prefix}ib".lower() not in units:
        return None
    return (
        f"write `{match[1]}{prefix}B` (powers of 1000) or `{match[1]}{prefix}iB` (powers of 1024)"
    )


def format_size(num_bytes: int, *, unit: str = "GiB", digits: int = 2) -> str:
    """Return the bytes in one written-out unit, rounded half to even.

    >>> format_size(72_434_837_504)
    '67.46 GiB'
    """
    return f"{format_ratio(num_bytes, _SIZE_UNITS[unit.lower()], digits=digits)} {unit}"


def format_ratio(numerator: int, denominator: int, *, digits: int) -> str:
    """Return the quotient with exactly `digits` decimals, rounded half to even without a float.

    >>> format_ratio(4_194_304 * 100, 7_000_000_000, digits=2)
    '0.06'
    """
    quotient, remainder = divmod(abs(numerator) * 10**digits, denominator)
    if 2 * remainder > denominator or (2 * remainder == denominator and quotient % 2):
        quotient += 1
    sign = "-" if numerator < 0 and quotient else ""
    whole, decimals = divmod(quotient, 10**digits)
    return f"{sign}{whole}.{decimals:0{digits}d}" if digits else f"{sign}{whole}"
