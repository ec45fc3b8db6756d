"""Towers draw the rows that one device draws."""

import pytest
import tensorflow as tf

from tests.partition.kit import check, check_divided, rows

_SEED = (3, 4)


def _shape(x, *rest):
    return tf.concat([tf.shape(x)[:1], list(rest)], 0)


_DRAWS = {
    "uniform": lambda s: tf.random.stateless_uniform(s, _SEED),
    "normal": lambda s: tf.random.stateless_normal(s, _SEED),
    "normal-double": lambda s: tf.random.stateless_normal(
        s, _SEED, dtype=tf.float64
    ),
    "uniform-half": lambda s: tf.random.stateless_uniform(
        s, _SEED, dtype=tf.float16
    ),
    "truncated": lambda s: tf.random.stateless_truncated_normal(s, _SEED),
    "truncated-double": lambda s: tf.random.stateless_truncated_normal(
        s, _SEED, dtype=tf.float64
    ),
    "integers": lambda s: tf.random.stateless_uniform(
        s, _SEED, 0, 99, tf.int32
    ),
    "integers-wide": lambda s: tf.random.stateless_uniform(
        s, _SEED, 0, 99, tf.int64
    ),
    "bits": lambda s: tf.random.stateless_uniform(
        s, _SEED, None, None, tf.int32
    ),
}


@pytest.mark.parametrize("rest", [(), (3,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", _DRAWS)
def test_each_tower_draws_its_own_rows(name, rest):
    program = check(lambda x: _DRAWS[name](_shape(x, *rest)), rows(-1, 2))
    drawn = [o for o in program.operations if o.type.startswith("Stateless")]
    assert [o.on_towers for o in drawn if "KeyCounter" not in o.type] == [True]


def test_several_rows_of_each_example():
    def function(x):
        return tf.random.stateless_normal([3 * tf.shape(x)[0], 3], _SEED)

    check_divided(function, rows(-1, 2))


def test_rows_along_another_axis_are_drawn_once():
    def function(x):
        drawn = tf.random.stateless_normal([2, tf.shape(x)[1]], _SEED)
        return drawn * x

    check(function, rows(2, -1))
