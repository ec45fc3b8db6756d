"""The constants of a step, as ranks compare them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_towers.fit.step import traced_constants
from keras_towers.fit.step.trace import trace
from keras_towers.fit.step.traced_constants import constants_of
from keras_towers.fit.step.traced_operations import TracedOperations

pytestmark = pytest.mark.core
MANY = np.random.default_rng(0).normal(size=(40, 30))


def traced(constant):
    """The constants of a step, of which Python has computed one."""

    def step(x):
        return tf.cond(
            x > 0,
            lambda: x + tf.reduce_sum(tf.cast(constant, tf.float32)),
            lambda: x * 0.5,
        )

    return compared(trace_of(step))


def compared(found):
    operations = TracedOperations(found, keras.Sequential())
    return constants_of(found, operations)


def trace_of(step):
    """The trace of a step that takes a number."""

    @tf.function
    def outer():
        found.append(trace(step, tf.TensorSpec([]), "evaluate", None))

    found = []
    outer.get_concrete_function()
    return found[0]


@pytest.mark.parametrize(
    "one, other",
    [
        (0.3, 0.3 * (1 + 1e-7)),
        (MANY, MANY.astype("float32").astype("float64")),
        (MANY, MANY.copy()),
        (tf.constant(MANY), tf.constant(MANY * (1 + 1e-8))),
    ],
    ids=["number", "array", "equal", "captured"],
)
def test_rounding_is_no_difference(one, other):
    one, other = traced(one), traced(other)
    assert one.digest == other.digest
    assert np.abs(np.subtract(one.approximate, other.approximate)).max() <= 1


@pytest.mark.parametrize(
    "one, other",
    [
        (0.3, 0.301),
        (1e-6, 2e-6),
        (0.3, -0.3),
        (0.0, 1e-30),
        (np.float64(1e300), np.inf),
        (np.nan, 0.0),
        (3, 4),
        (True, False),
        (MANY, MANY[::-1].copy()),
        (MANY, MANY.T.copy()),
        (tf.constant(MANY), tf.constant(MANY[::-1])),
        (tf.range(999), tf.range(999)[::-1]),
    ],
    ids=[
        *("number", "small", "sign", "zero", "infinite", "nan"),
        *("integer", "truth", "order", "shape"),
        *("captured", "captured-integers"),
    ],
)
def test_other_numbers_differ(one, other):
    one, other = traced(one), traced(other)
    far = np.abs(np.subtract(one.approximate, other.approximate)).max() > 1
    assert one.digest != other.digest or far


@pytest.mark.parametrize("made", [float, int])
def test_constants_that_are_exchanged_differ(made):
    """The sum over all constants does not depend on their order."""

    def step(factors):
        first, last = (tf.constant(made(factor)) for factor in factors)
        return lambda x: (
            tf.sin(x * tf.cast(first, x.dtype)) * tf.cast(last, x.dtype)
        )

    one, other = (compared(trace_of(step(f))) for f in ((2, 4), (4, 2)))
    far = np.abs(np.subtract(one.approximate, other.approximate)).max() > 1
    assert one.digest != other.digest or far


def test_texts_are_captured_beside_numbers():
    """As by TextVectorization, which captures the text that it splits at."""
    text, number = tf.constant("words"), tf.constant(3.5)

    def step(x):
        return x * number + tf.cast(tf.strings.length(text), x.dtype)

    described = compared(trace_of(step)).described
    assert any(constant.text.startswith("3.5 of ") for constant in described)


def test_a_constant_is_shown_with_its_line():
    for constant, value in (np.float32(0.3), "0.3"), (tf.range(999), "[0, 1,"):
        described = traced(constant).described
        shown = [c.text for c in described if c.text.startswith(value)]
        assert all(" of test_traced_constants.py:" in text for text in shown)
        assert shown


def test_large_constants_are_told_apart_by_what_is_not_shown():
    one, other = MANY.copy(), MANY.copy()
    other[-1, -1] += 9
    one, other = (traced(value).described for value in (one, other))
    only = {c.text for c in other} - {c.text for c in one}
    assert len(only) == 1
    assert "of shape (40, 30) and norm 3" in only.pop()


NUMBER = tf.Variable(7, dtype=tf.int64)
SCALE = tf.Variable(2.0)


def scaled(x):
    return tf.math.log(x * 0.3) * SCALE


def with_summary(x):
    tf.summary.scalar("rate", 0.125, NUMBER)
    return scaled(x)


def test_a_large_constant_is_read_in_parts(monkeypatch):
    one, other = MANY.copy(), MANY.copy()
    other[-1, -1] += 0.1
    whole = traced(one)
    monkeypatch.setattr(traced_constants, "_CHUNK", 100)
    one, other = traced(one), traced(other)
    assert one.digest == whole.digest == other.digest
    far = np.abs(np.subtract(one.approximate, other.approximate))
    assert far.max() > 1


@pytest.mark.parametrize("wrapped", [lambda step: step, tf.function])
@pytest.mark.parametrize("written", [False, True])
def test_what_only_a_summary_shows_may_differ(tmp_path, wrapped, written):
    def step(x):
        if written:
            NUMBER.assign_add(1)
        return wrapped(with_summary)(x)

    without = trace_of(step)
    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        shown = trace_of(step)
    assert len(shown.captures) > len(without.captures)
    of_shown, of_without = compared(shown), compared(without)
    assert of_shown.described == of_without.described
    assert of_shown.digest == of_without.digest
    assert of_shown.approximate == of_without.approximate
    checksums = {
        TracedOperations(found, keras.Sequential()).described.checksum
        for found in (shown, without)
    }
    assert len(checksums) == 1
    used = {id(SCALE.handle), *([id(NUMBER.handle)] if written else ())}
    for found in shown, without:
        outside = found.variables_outside(keras.Sequential())
        assert {id(handle) for handle in outside} == used
