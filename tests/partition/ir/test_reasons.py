"""Why operations are computed once, and what a mistake in a rule does."""

import dataclasses
import warnings

import pytest
import tensorflow as tf

from keras_towers.partition.ir.layouts import Sharded
from keras_towers.partition.ir.registry import OPERATIONS
from keras_towers.partition.ir.values import Value
from tests.partition.kit import check_on_towers, laid_out, sharded

# What is computed once in these, and why.
_REASONS = {
    "Unique": (lambda x: tf.unique(x[:, 0])[0], "no rule for Unique"),
    "TopKV2": (lambda x: tf.sort(x[:, 0]), "TopKV2 needs all rows"),
    "Sum": (
        lambda x: tf.reduce_sum(x, tf.cast(tf.reduce_max(x) > 9, tf.int32)),
        "Sum needs numbers that are known only when the step runs",
    ),
    "StatelessWhile": (
        lambda x: tf.while_loop(
            lambda y: tf.reduce_sum(y) < 100,
            lambda y: (y + tf.cast(tf.size(tf.unique(y[:, 0])[0]), y.dtype),),
            (x,),
        )[0],
        "no rule for Unique",
    ),
}


def lay_out(function):
    """The program of a function of rows."""
    return laid_out(function, sharded(-1, 3))


@pytest.mark.parametrize("type_", _REASONS)
def test_what_is_computed_once_has_a_reason(type_):
    function, reason = _REASONS[type_]
    found = {o.type: why for o, why in lay_out(function).computed_once.items()}
    assert found[type_] == reason


def _without_rows(node, *inputs):
    return Value(Sharded(0, object())).as_rows()


def _with_mistake(node, *inputs):
    return {}["missing"]


_MISTAKES = {
    "a rule": ("Sin", {"rules": [_without_rows]}),
    "another error": ("Sin", {"rules": [_with_mistake]}),
    "a rule of a loop": ("StatelessWhile", {"rules": [_with_mistake]}),
    "labels": ("Tanh", {"labels": _with_mistake}),
    "a note": ("Tanh", {"notes": [_with_mistake]}),
    "a shape": ("Range", {"shape": _with_mistake}),
    "a fold": ("Neg", {"fold": _with_mistake}),
}


def _with_many_operations(x):
    """In a loop, too, where operations cannot be computed once."""
    y = tf.while_loop(
        lambda k, _: k < 3, lambda k, y: (k + 1, tf.sin(y)), (0, tf.tanh(x))
    )[1]
    z = y * tf.cast(tf.range(-tf.shape(x)[0], 0)[0], y.dtype)
    return tf.reduce_sum(tf.sin(z), 0), z


@pytest.mark.parametrize("name", _MISTAKES)
def test_a_mistake_fails_tests_but_no_step(name):
    """What has it is computed once, with the results of one device."""
    type_, mistake = _MISTAKES[name]
    row = dataclasses.replace(OPERATIONS[type_], **mistake)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPERATIONS, type_, row)
        with pytest.raises(RuntimeWarning, match="report this"):
            lay_out(_with_many_operations)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            check_on_towers(_with_many_operations, sharded(-1, 3))
    assert {type(each.message) for each in said} == {RuntimeWarning}
