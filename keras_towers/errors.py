"""The errors that keras_towers raises."""

import difflib
import re
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


_MAX_CHARACTERS = 400
# Before the message of an error: where TensorFlow has traced the operation.
_END_OF_STACK = r"\n\n+(?!\s*\[\[)|<stack traces unavailable>\n"


def shorten(error: BaseException) -> str:
    """Return the kind of an error and its message, in one line.

    TensorFlow first prints the Python stack of the trace, or a line that says
    that it has none, and last the operations that failed.
    """
    message = re.split(_END_OF_STACK, str(error))[-1]
    words = message.split()
    return f"{type(error).__name__}: {' '.join(words)[:_MAX_CHARACTERS]}"


# EX_TEMPFAIL of sysexits.h: when started again, the job may continue.
EXIT_AGAIN = 75
FAILED_ON = "because it failed on"
"""In the error of a rank whose call ends since it failed on another one."""
