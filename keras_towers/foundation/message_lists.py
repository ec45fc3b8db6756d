"""Lists in messages: the first few of many things, and how many more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from keras_towers.foundation import settings

_Value = TypeVar("_Value")


def named(values: Mapping[str, _Value]) -> dict[str, _Value | str]:
    """Return the values of some of many things, for a message.

    Each value appears once before any appears twice.

    Args:
        values: what is to be said, by the name of each thing.
    """
    number = settings.MAX_RANKS_NAMED
    # One more takes no more room than to say that there is one.
    if len(values) <= number + 1:
        return dict(values)
    firsts: dict[str, str] = {}
    for name, value in values.items():
        firsts.setdefault(str(value), name)
    some = {*[*dict.fromkeys((*firsts.values(), *values))][:number]}
    said = {name: values[name] for name in values if name in some}
    return {**said, f"{len(values) - number} more": "likewise"}


def listed(
    names: Sequence[object],
    most: int | None = None,
    number: int | None = None,
    separator: str = ", ",
) -> str:
    """List names, as in "0, 1, 2 and 7 more".

    Args:
        names: the names, or the first of them.
        most: how many are named of more; None: as many as of ranks.
        number: how many names there are; None: all of them are given.
        separator: what is between two of them.
    """
    most = settings.MAX_RANKS_NAMED if most is None else most
    number = len(names) if number is None else number
    # One more takes no more room than to say that there is one.
    shown = names if len(names) <= most + 1 else names[:most]
    text = separator.join(map(str, shown))
    more = number - len(shown)
    return f"{text} and {more} more" if more else text


def describe_each(states: Mapping[str, str]) -> str:
    """Describe things, as in "rank 1 has ended; rank 2 is lost"."""
    return "; ".join(f"{name} {said}" for name, said in named(states).items())
