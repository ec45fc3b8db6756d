"""The errors that keras_towers raises."""

import difflib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING


class TowerError(ValueError):
    """Wrong use, or another rank's error: the message says what to do.

    Example:
        >>> keras_towers.TowerStrategy(towers=0)
        Traceback (most recent call last):
        ...
        keras_towers.foundation.errors.TowerError: towers=0 is not allowed: ...
    """

    if not TYPE_CHECKING:
        # AutoGraph preserves the class of an error raised in a tf.function only
        # if it has this constructor.
        __init__ = Exception.__init__


class OtherRankError(TowerError):
    """The error of a rank whose call has ended since another one's has."""


class CompatibilityError(ImportError):
    """The installed TensorFlow or Keras is missing or incompatible."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name, or ""."""
    # A shared ending, such as "Strategy", does not make names similar.
    close = difflib.get_close_matches(given, known, 1, cutoff=0.75)
    return f". Did you mean {close[0]!r}?" if close else ""


def described(value: object) -> str:
    """Describe a value by its type, without its content, such as an array's."""
    if callable(value):
        return f"{value!r:.80}"
    if isinstance(value, tuple | list):
        return f"({', '.join(type(each).__name__ for each in value)})"
    name = type(value).__name__
    return f"{value!r} ({name})" if isinstance(value, int | str) else name


_MAX_CHARACTERS = 400
# Longer messages have no stack of TensorFlow's before them.
_MAX_CHARACTERS_READ = 1_000_000
# Before the message of an error: where TensorFlow has traced the operation.
_END_OF_STACK = r"\n\n+(?!\s*\[\[)|<stack traces unavailable>\n"
# The text that TensorFlow adds about its own functions.
_OF_TENSORFLOW = r"\{\{function_node [^}]*\}\} ?| ?\[Op:\w+\]( name: \S*)?"


def shorten(error: BaseException) -> str:
    """Return the kind of an error and its message, in one line.

    It never raises, whatever the class of the error does. The errors of a group
    follow the group's own message.
    """
    pending, line = [error], ""
    while pending and len(line) < _MAX_CHARACTERS:
        first, *pending = pending
        words = type(first).__name__, " ".join(_message(first).split())
        line += f"{'; ' if line else ''}{': '.join(filter(None, words))}"
        if isinstance(first, BaseExceptionGroup):
            pending = [*first.exceptions, *pending]
    return line[:_MAX_CHARACTERS]


def _message(error: BaseException) -> str:
    """Return the message of an error without Python's stack.

    TensorFlow puts the stack of the trace before the message, or a line that
    there is none. The operations that failed follow it.
    """
    try:
        text = str(error)
    # It may raise SystemExit, and other ranks wait to hear of the error.
    except BaseException as failure:
        return f"its str() raises {type(failure).__name__}"
    if len(text) > _MAX_CHARACTERS_READ:
        return text[:_MAX_CHARACTERS_READ]
    return re.sub(_OF_TENSORFLOW, "", re.split(_END_OF_STACK, text)[-1])


# EX_TEMPFAIL of sysexits.h: when started again, the job may continue.
EXIT_AGAIN = 75


class EndOfJob(SystemExit):
    """Ends this rank, as all others end; the job then starts again."""

    def __init__(self) -> None:
        super().__init__(EXIT_AGAIN)


FAILED_ON = "because it failed on"
"""In the error of a rank whose call ends since it failed on another one."""


def failed_elsewhere(what: str, cause: str) -> OtherRankError:
    """Return the error of a rank whose call has ended.

    Args:
        what: what has ended, and where.
        cause: on which rank it has failed, and why.
    """
    return OtherRankError(f"{what}, {FAILED_ON} {cause}")


EXCHANGE_WITH = "the exchange with rank"
"""In the error of a rank whose connection to another one has ended."""
