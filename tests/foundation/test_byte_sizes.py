"""Numbers of bytes as text."""

import pytest

from keras_towers.foundation.byte_sizes import (
    format_bytes,
    parse_bytes,
    parse_rate,
)
from keras_towers.foundation.errors import TowerError


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("24GiB", 24 * 2**30),
        ("24 gb", 24 * 10**9),
        ("0.5M", 500_000),
        ("1000B", 1000),
        ("0", 0),
    ],
)
def test_numbers_of_bytes_have_units(text, number):
    assert parse_bytes("it", text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("100Gbit", 12.5e9),
        ("25 Gbit/s", 3.125e9),
        ("1gbit", 1.25e8),
        ("300GB/s", 3e11),
        ("0.5 MiB/s", 2**19),
    ],
)
def test_rates_are_bytes_per_second(text, number):
    assert parse_rate("it", text) == number


@pytest.mark.parametrize("text", ["", "100", "0Gbit", "100GB", "-1Gbit", "G/s"])
def test_other_rates_are_refused(text):
    with pytest.raises(TowerError, match="^it is not allowed: give a rate"):
        parse_rate("it", text)


@pytest.mark.parametrize("text", ["", "GB", "-1", "24", "1 XB", "1e9", "3i"])
def test_other_texts_are_refused(text):
    with pytest.raises(TowerError, match="^it is not allowed: .* its unit"):
        parse_bytes("it", text)


def test_bits_are_not_taken_for_bytes():
    for text in ("24Gb", "24 Gib"):
        with pytest.raises(TowerError, match="may be bits, so write Gi?B$"):
            parse_bytes("it", text)
    for text in ("100Gb/s", "100gb/s", "100 Mb"):
        with pytest.raises(TowerError, match="bits or bytes, so write .bit/s"):
            parse_rate("it", text)


@pytest.mark.parametrize(
    ("number", "text"),
    [(1, "1 byte"), (999, "999 bytes"), (1000, "1 KB"), (2**28, "268 MB")],
)
def test_three_digits_are_shown(number, text):
    assert format_bytes(number) == text
