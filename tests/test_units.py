"""The arithmetic of sizes: what a person wrote, exactly, and back."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wazn.errors import InputError
from wazn.units import (
    ceil_div,
    format_ratio,
    format_size,
    parse_count,
    parse_decimal,
    parse_size,
    round_up,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0.5GB", 500_000_000),
        ("0.1GB", 100_000_000),
        ("512 MiB", 536_870_912),
        ("20gb", 20_000_000_000),
        (" 80 GiB ", 85_899_345_920),
        ("1,024", 1024),
        ("1_024 KiB", 1_048_576),
        (".5kb", 500),
        ("1.5 TiB", 1_649_267_441_664),
        ("0", 0),
        ("2e9", 2_000_000_000),
    ],
)
def test_a_size_is_read_as_people_write_it(text: str, num_bytes: int) -> None:
    """GB is 10^9 and GiB 2^30, in any case, with or without a space (IEC 80000-13)."""
    assert parse_size(text) == num_bytes


def test_a_fraction_of_a_byte_is_rounded_up() -> None:
    """Half a byte needs a byte."""
    assert parse_size("0.5") == 1


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7B", 7 * 10**9),
        ("1.5b", 15 * 10**8),
        ("350M", 350 * 10**6),
        ("8k", 8000),
        ("65_536", 65536),
    ],
)
def test_a_count_is_read_as_people_write_it(text: str, count: int) -> None:
    """B is 10^9 parameters, as in the names of models."""
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GB",
        "-1GB",
        "1 2",
        "0,5GB",
        "1.2.3",
        "nan",
        "inf",
        "0x10",
        "7Q",
        "1e400",
        "٧",
        "9" * 10_000,
    ],
)
@pytest.mark.parametrize("parse", [parse_size, parse_count, parse_decimal])
def test_anything_else_is_refused_with_what_was_expected(parse: object, text: str) -> None:
    """Nothing is guessed: a decimal comma, a sign, a second point, or a flood of digits is an error."""
    with pytest.raises(InputError, match=r"^expected a .*, found `"):
        parse(text)  # type: ignore[operator]


def test_a_refused_flood_of_digits_is_not_repeated_whole() -> None:
    """An error message stays short whatever was typed."""
    with pytest.raises(InputError) as caught:
        parse_size("9" * 10_000)
    assert len(caught.value.message) < 120


@pytest.mark.parametrize("text", ["0.5", "1.5k7", "0.0001k"])
def test_a_count_is_whole(text: str) -> None:
    """Half a layer is a mistake."""
    with pytest.raises(InputError):
        parse_count(text)


def test_a_point_before_three_noughts_is_not_guessed_at() -> None:
    """`16.000` is 16 in London and sixteen thousand in Berlin: the person chooses."""
    with pytest.raises(InputError) as caught:
        parse_count("16.000")
    assert caught.value.hint == "write `16000` or `16`"
    assert parse_count("1.000k") == 1000


def test_a_bare_prefix_is_answered_with_both_readings() -> None:
    """`24G` may mean 24 x 10^9 or 24 x 2^30: the person chooses."""
    with pytest.raises(InputError) as caught:
        parse_size("24G")
    assert caught.value.hint == "write `24GB` (powers of 1000) or `24GiB` (powers of 1024)"


def test_a_decimal_is_exact() -> None:
    """4.5 bits are nine halves, not a float."""
    assert parse_decimal("4.5") == Fraction(9, 2)
    assert parse_decimal("0.1") == Fraction(1, 10)


@given(st.integers(min_value=0, max_value=10**15))
def test_plain_bytes_read_back_as_they_are(num_bytes: int) -> None:
    """Without a unit a number is bytes."""
    assert parse_size(str(num_bytes)) == num_bytes
    assert parse_size(f"{num_bytes:,}") == num_bytes


@given(st.integers(), st.integers(min_value=1))
def test_rounding_up_lands_on_the_next_multiple(value: int, multiple: int) -> None:
    """The result is a multiple, not below the value, and less than one multiple above it."""
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert 0 <= rounded - value < multiple
    assert ceil_div(value, multiple) * multiple == rounded


@given(st.integers(-(10**20), 10**20), st.integers(1, 10**20), st.integers(0, 6))
def test_a_ratio_is_rounded_like_the_exact_fraction(top: int, bottom: int, digits: int) -> None:
    """Half to even at the last digit, as `round` does to a Fraction; no float in between."""
    assert Fraction(format_ratio(top, bottom, digits=digits)) == round(
        Fraction(top, bottom), digits
    )


def test_sizes_are_written_with_their_unit() -> None:
    """72,434,837,504 bytes are 67.46 GiB and 72.43 GB."""
    assert format_size(72_434_837_504) == "67.46 GiB"
    assert format_size(72_434_837_504, unit="GB") == "72.43 GB"
    assert format_size(-(2**29), digits=1) == "-0.5 GiB"
    assert format_size(1, digits=0) == "0 GiB"
