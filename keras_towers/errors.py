"""The errors that keras_towers raises."""

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING


class TowerError(ValueError):
    """Invalid use: says what was given, what is allowed and what to do."""

    if not TYPE_CHECKING:
        # AutoGraph preserves the class of an error raised in a tf.function only
        # if it has this constructor.
        __init__ = Exception.__init__


class CompatibilityError(ImportError):
    """The installed TensorFlow or Keras is missing or incompatible."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name; may be empty."""
    # A shared ending, such as "Strategy", does not make names similar.
    close = difflib.get_close_matches(given, known, 1, cutoff=0.75)
    return f". Did you mean {close[0]!r}?" if close else ""


# EX_TEMPFAIL of sysexits.h: when started again, the job may continue.
EXIT_AGAIN = 75
FAILED_ON = "because it failed on"
"""In the error of a rank whose call ends since it failed on another one."""
