"""Parses and formats numbers of bytes, for users."""

from __future__ import annotations

import re

from keras_towers.foundation.errors import TowerError

_NUMBER = r"(\d+(?:\.\d+)?)"
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
# Others call bits so. In a size, a text without any capital means bytes.
_MAY_BE_BITS = re.compile(r"[KMGT]i?b\b")
_MAY_BE_BITS_PER_SECOND = re.compile(r"[kmgtKMGT]i?b(?:/s)?\s*$")


def parse_bytes(given: str, text: str) -> int:
    """Return a number of bytes, given one with its unit.

    Args:
        given: what errors call it.
        text: such as "24GiB", "80 GB", "0.5MB" or "1000B"; or "0".

    Raises:
        TowerError: it has no unit, or is no number of bytes.
    """
    match = re.fullmatch(
        rf"{_NUMBER}\s*(?:([kmgt]?)(i?)b|([kmgt]))|0", text.strip().lower()
    )
    if match is None:
        raise TowerError(
            f"{given} is not allowed: give a number of bytes with its unit, "
            "such as 24GiB, 80GB, 500MB or 1000B"
        )
    if unit := _MAY_BE_BITS.search(text):
        raise TowerError(
            f"{given} is not allowed: {unit[0]} may be bits, so write "
            f"{unit[0][:-1]}B"
        )
    number, before_b, is_binary, alone = match.groups()
    return round(_multiplied(number or "0", before_b or alone, is_binary))


def parse_rate(given: str, text: str) -> float:
    """Return a number of bytes per second, given a rate with its unit.

    Args:
        given: what errors call it.
        text: such as "100Gbit", "25 Gbit/s" or "300GB/s".

    Raises:
        TowerError: it has no unit, or is no rate above 0.
    """
    if unit := _MAY_BE_BITS_PER_SECOND.search(text):
        name = unit[0].strip().removesuffix("/s")
        raise TowerError(
            f"{given} is not allowed: {name} may be bits or bytes, so write "
            f"{name[:-1]}bit/s or {name[:-1]}B/s"
        )
    match = re.fullmatch(
        rf"{_NUMBER}\s*([kmgt]?)(i?)(?:(bit)(?:/?s)?|b/s)", text.strip().lower()
    )
    if match is None or not float(match[1]):
        raise TowerError(
            f"{given} is not allowed: give a rate with its unit, such as "
            "100Gbit or 300GB/s"
        )
    number, prefix, is_binary, in_bits = match.groups()
    return _multiplied(number, prefix, is_binary) / (8 if in_bits else 1)


def _multiplied(
    number: str, prefix: str | None, is_binary: str | None
) -> float:
    factor = 1024 if is_binary else 1000
    return float(number) * factor ** _UNITS[prefix or ""]


def format_bytes(number: int) -> str:
    """Return a number of bytes with three digits, such as 1.07 GB."""
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if number >= least:
            return f"{number / least:.3g} {unit}"
    return f"{number} byte{'' if number == 1 else 's'}"
