"""Telling the user, once, where results differ from those of one device."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Hashable, Iterator
from typing import Literal, NamedTuple, TypeAlias

import tensorflow as tf

logger = logging.getLogger("keras_towers")

About: TypeAlias = Literal[
    "couples", "random", "state", "plain-variable", "log", "rows"
]
"""What differs, in the words of ``keras_towers.verification.Kind``."""


class Told(NamedTuple):
    """One thing that differs, or may differ.

    Attributes:
        about: what it is.
        subject: its name; of a ``tf.Variable``, the variable.
        message: what the user reads.
    """

    about: About
    subject: str | tf.Variable
    message: str


_said: set[Hashable] = set()
_heard: list[Told] | None = None


def differs(
    about: About,
    subject: str | tf.Variable,
    message: str,
    once: Hashable | None = None,
) -> None:
    """Warn that something differs from one device, or may.

    Args:
        about: what.
        subject: its name; of a ``tf.Variable``, the variable.
        message: what the user reads.
        once: what is told only once in a process; None: tell it every time.
    """
    if _heard is not None:
        _heard.append(Told(about, subject, message))
    elif once is None or is_news(once):
        logger.warning("%s", message)


def is_news(key: Hashable) -> bool:
    """Whether something is to be said now, as it has not been said yet.

    Not where steps run only to hear what there is to tell.
    """
    if _heard is not None or key in _said:
        return False
    _said.add(key)
    return True


@contextlib.contextmanager
def heard() -> Iterator[list[Told]]:
    """Hear what a block has to tell, also if it was told before.

    Nothing of it is logged, and all of it will be news afterwards.
    """
    global _heard
    before, _heard = _heard, []
    try:
        yield _heard
    finally:
        _heard = before
