"""The constants of a step, as ranks compare them."""

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.fit.step.constants import constants_of

pytestmark = pytest.mark.core
MANY = np.random.default_rng(0).normal(size=(40, 30))


def traced(constant):
    """The constants of a step, of which Python has computed one."""

    @tf.function
    def step(x):
        return tf.cond(
            x > 0,
            lambda: x + tf.reduce_sum(tf.cast(constant, tf.float32)),
            lambda: x * 0.5,
        )

    spec = tf.TensorSpec([])
    return constants_of(step.get_concrete_function(spec).graph)


@pytest.mark.parametrize(
    "one, other",
    [
        (0.3, 0.3 * (1 + 1e-7)),
        (MANY, MANY.astype("float32").astype("float64")),
        (MANY, MANY.copy()),
    ],
    ids=["number", "array", "equal"],
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
    ],
    ids=[
        *("number", "small", "sign", "zero", "infinite", "nan"),
        *("integer", "truth", "order", "shape"),
    ],
)
def test_other_numbers_differ(one, other):
    one, other = traced(one), traced(other)
    far = np.abs(np.subtract(one.approximate, other.approximate)).max() > 1
    assert one.digest != other.digest or far


def test_a_constant_is_shown_with_its_line():
    shown = traced(np.float32(0.3)).shown
    assert any(text.startswith("0.3 of test_constants.py:") for text in shown)
