"""Branches on towers, against one device."""

import functools

import pytest
import tensorflow as tf

from tests.partition.kit import (
    FEW,
    check,
    check_divided,
    kinds,
    once,
    part,
    rows,
    same,
    with_gradients,
)

_check = functools.partial(check_divided, towers=FEW)


def _chosen(way, x, w):
    return tf.cond(
        way[0], lambda: tf.tanh(x @ w), lambda: tf.exp(x) @ tf.ones((3, 2))
    )


@pytest.mark.parametrize("seed", range(3))
def test_each_branch_is_divided(seed):
    given = same(1, dtype="bool"), rows(-1, 3), same(3, 2)
    program = _check(_chosen, *given, seed=seed)
    assert kinds(program) == {"gather": 1}


@pytest.mark.parametrize("seed", range(3))
def test_gradients_of_branches_are_divided(seed):
    given = same(1, dtype="bool"), rows(-1, 3), same(3, 2)
    program = _check(with_gradients(_chosen), *given, seed=seed)
    assert kinds(program) == {"gather": 2, "sum": 1}


@pytest.mark.parametrize("seed", range(4))
def test_case_chooses_one_of_several(seed):
    def choose(at, x, y):
        return tf.switch_case(
            at[0],
            [lambda: x * 2.0, lambda: tf.nn.softmax(x), lambda: x + y],
        )

    given = same(1, dtype="int32", low=-1, high=3), rows(-1, 3), rows(-1, 3)
    _check(with_gradients(choose), *given, seed=seed)


@pytest.mark.parametrize("seed", range(2))
def test_a_choice_by_the_batch_is_the_same_for_all_towers(seed):
    def choose(x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2, lambda: x - 1)

    program = check(choose, rows(-1, 3), towers=FEW, seed=seed)
    assert set(once(program)) <= {"Greater"}
    assert kinds(program) == {"sum": 1, "gather": 1}


@pytest.mark.parametrize("seed", range(2))
def test_rows_and_what_all_have_become_rows(seed):
    def choose(way, x):
        zeros = tf.zeros((tf.shape(x)[0], 3))
        return tf.cond(way[0], lambda: x, lambda: zeros + 1)

    _check(choose, same(1, dtype="bool"), rows(-1, 3), seed=seed)


@pytest.mark.parametrize("seed", range(2))
def test_parts_of_sums_and_what_all_have_become_parts(seed):
    def choose(way, x, y):
        return tf.cond(way[0], lambda: tf.reduce_sum(x, 0), lambda: y)

    given = same(1, dtype="bool"), rows(-1, 3), same(3)
    program = _check(choose, *given, seed=seed)
    assert kinds(program) == {"sum": 1}


@pytest.mark.parametrize("seed", range(2))
def test_a_part_of_a_sum_is_summed_for_what_needs_the_whole(seed):
    def choose(way, x, y):
        return tf.cond(way[0], lambda: x * tf.exp(y), lambda: x)

    given = same(1, dtype="bool"), rows(-1, 3), part(3)
    program = _check(choose, *given, seed=seed)
    assert kinds(program) == {"sum": 1, "gather": 1}


@pytest.mark.parametrize("seed", range(2))
def test_rows_and_parts_of_sums_are_computed_once(seed):
    def choose(way, x, y):
        return tf.cond(way[0], lambda: tf.exp(x), lambda: y)

    given = same(1, dtype="bool"), rows(-1, 3), part(1, 3)
    program = check(choose, *given, towers=((2, 0, 0),), seed=seed)
    assert "StatelessIf" in once(program)


def test_a_branch_that_is_known_takes_the_place_of_the_choice():
    def choose(x):
        return tf.cond(
            tf.constant(True) & (tf.rank(x) > 1), lambda: x, lambda: -x
        )

    program = _check(choose, rows(-1, 3))
    assert not any("If" in o.type for o in program.operations)


def test_a_branch_within_a_branch_and_a_function():
    @tf.function
    def inner(x, way):
        return tf.cond(way, lambda: tf.exp(x), lambda: x * 3)

    def choose(way, x):
        first, second = tf.unstack(way)
        return tf.cond(
            first, lambda: inner(x, second) @ x[0][:, None], lambda: x[:, :1]
        )

    given = same(2, dtype="bool"), rows(-1, 3)
    for seed in range(3):
        # One example's row is what all need: it is fetched.
        check(choose, *given, towers=((3, 0, 2),), seed=seed)

    def simple(way, x):
        first, second = tf.unstack(way)
        return tf.cond(first, lambda: inner(x, second), lambda: x)

    for seed in range(4):
        _check(with_gradients(simple), *given, seed=seed)


def test_a_custom_gradient_within_a_branch():
    @tf.custom_gradient
    def clipped(x):
        return tf.exp(x), lambda dy: tf.clip_by_value(dy, -0.5, 0.5)

    def choose(way, x):
        return tf.cond(way[0], lambda: clipped(x), lambda: x)

    for seed in range(2):
        given = same(1, dtype="bool"), rows(-1, 3)
        _check(with_gradients(choose), *given, seed=seed)


def test_what_has_an_effect_is_done_once():
    calls = []

    def note(x):
        calls.append(x.shape)
        return x

    def choose(way, x):
        def noted():
            y = tf.numpy_function(note, [x], tf.float32)
            return tf.ensure_shape(y, (None, 3)) * 2

        return tf.cond(way[0] | True, noted, lambda: x)

    def either(way, x):
        def noted():
            y = tf.numpy_function(note, [x], tf.float32)
            return tf.ensure_shape(y, (None, 3)) * 2

        return tf.cond(way[0], noted, noted)

    for function in (choose, either):
        calls.clear()
        given = same(1, dtype="bool"), rows(-1, 3)
        check(function, *given, towers=((3, 0, 2),))
        # One device, which is looked at as well, and all towers together.
        assert calls == [(5, 3)] * 3
