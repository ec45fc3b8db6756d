"""What other ranks are told of an error, in one line."""

import pytest
import tensorflow as tf

from keras_towers.foundation.errors import shorten
from tests.kit.leaving import Unprintable

pytestmark = pytest.mark.core


class Ends(Exception):
    def __str__(self):
        raise SystemExit("in str")


def group(*errors):
    return BaseExceptionGroup("many", errors)


@pytest.mark.parametrize(
    "error, line",
    [
        (ValueError("two\n  lines"), "ValueError: two lines"),
        (StopIteration(), "StopIteration"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyError("k"), "KeyError: 'k'"),
        (Unprintable(), "Unprintable: its str() raises Unprintable"),
        (Ends(), "Ends: its str() raises SystemExit"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "odd"), None),
        (
            group(ValueError("a"), group(Unprintable()), KeyboardInterrupt()),
            "BaseExceptionGroup: many (3 sub-exceptions); ValueError: a; "
            "ExceptionGroup: many (1 sub-exception); Unprintable: its str() "
            "raises Unprintable; KeyboardInterrupt",
        ),
        (
            tf.errors.InternalError(
                None, None, "stack\n\nmy bug\n\n\t [[{{node a}}]]\n\n [[b]]"
            ),
            "InternalError: my bug [[{{node a}}]] [[b]]",
        ),
    ],
)
def test_the_kind_and_the_message_of_an_error(error, line):
    assert shorten(error) == (line or f"{type(error).__name__}: {error}")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a\n\n" * 10**7),
        ValueError("\n" * 10**6 + "[["),
        group(*(ValueError(f"number {n}") for n in range(10**5))),
    ],
)
def test_an_enormous_message_is_cut(error):
    line = shorten(error)
    assert line.startswith(type(error).__name__) and len(line) <= 400


def test_groups_within_one_another_are_not_followed_without_end():
    error = ValueError("inside")
    for _ in range(10**5):
        error = group(error)
    assert shorten(error).startswith("ExceptionGroup: many (1 sub-exception)")
