"""Loops that go round once for each example."""

import pytest
import tensorflow as tf

from keras_towers.splitting.values import Kind
from tests.splitting.kit import check, gradients, loop, proven, rows, same

_X = rows(-1, 3)
_W = same(3, 3)
# A list of its own, of which every round has one element.
_List, raw = tf.TensorArray, tf.raw_ops


def _mapped(one):
    return lambda x, *rest: tf.map_fn(lambda t: one(t, *rest), x)


def _branch(t):
    return tf.cond(t[0] > 0, lambda: t * 2.0, lambda: -t)


def _inner_loop(t):
    def body(k, kept):
        return kept.write(k, tf.reduce_sum(t) ** 2)

    (kept,) = loop(3, body, _List(tf.float32, 3))
    return kept.stack()


_EACH = {
    "softmax": lambda t: tf.nn.softmax(t) * 2.0,
    "sum": lambda t: tf.reduce_sum(t, keepdims=True) * tf.ones([3]),
    "branch": _branch,
    "inner loop": _inner_loop,
    "picked": lambda t: tf.gather(tf.eye(3), tf.argmax(t)),
    "norm": lambda t: tf.nn.l2_loss(t) * tf.ones([3]),
    "scattered": lambda t: tf.scatter_nd([[0], [2]], t[1:], [3]),
    "counted": lambda t: tf.math.unsorted_segment_sum(
        t, tf.cast(t > 0, tf.int32), 3
    ),
}


@pytest.mark.parametrize("one", _EACH.values(), ids=_EACH)
def test_what_is_mapped_over_the_examples(one):
    assert proven(_mapped(one), _X).rows.place == (0, 1, 1)


@pytest.mark.parametrize("name", ["softmax", "sum"])
def test_gradients_of_what_is_mapped(name):
    value = proven(gradients(_mapped(_EACH[name])), _X)
    assert value.kind is Kind.ROWS and value.degree == -1


def test_gradients_of_weights_in_a_map():
    step = gradients(_mapped(lambda t, w: tf.linalg.matvec(w, tf.tanh(t))))
    of_rows, of_weights = check(step, _X, _W)
    assert of_rows.kind is Kind.ROWS
    assert of_weights.kind is Kind.SUM and of_weights.degree == -1


def test_several_lists_at_once():
    def step(x, y):
        a, b = tf.map_fn(lambda t: (t[0] * t[1], t[1] + 1.0), (x, y))
        return a - b

    assert proven(step, _X, _X).rows.place == (0, 1, 1)


def _folded(function, first=0.0):
    return lambda x: tf.foldl(function, x, tf.fill([3], first))


def test_sums_over_the_examples_by_a_loop():
    assert proven(_folded(lambda s, t: s + t * t), _X).kind is Kind.SUM


def _list(x, **options):
    return _List(tf.float32, tf.shape(x)[0], **options).unstack(x)


def _made(x, body, *start):
    """What rounds write, of which the last argument is the list of it."""
    n = tf.shape(x)[0]
    made = _List(tf.float32, n, element_shape=[3])
    return loop(n, body, *start, made)[-1].stack()


def _numbered(one):
    """A loop whose rounds have a number, a list of examples and a new one."""

    def step(x):
        taken, n = _list(x, clear_after_read=False), tf.shape(x)[0]
        return _made(x, lambda k, made: one(k, taken, made, n))

    return step


def test_a_loop_of_rounds_by_hand():
    step = _numbered(lambda k, taken, made, n: made.write(k, taken.read(k)))
    assert proven(step, _X).rows.place == (0, 1, 1)


def _table(k, taken, made, n):
    table = tf.reshape(tf.range(27.0), [9, 3])
    return made.write(k, _list(table).read(k))


_HOSTILE = {
    "number": lambda k, taken, made, n: made.write(
        k, taken.read(k) * tf.cast(k, tf.float32)
    ),
    "first": lambda k, taken, made, n: made.write(k, taken.read(0)),
    "before": lambda k, taken, made, n: made.write(
        k, taken.read(tf.maximum(k - 1, 0))
    ),
    "backwards": lambda k, taken, made, n: made.write(n - 1 - k, taken.read(k)),
    "always the first": lambda k, taken, made, n: made.write(0, taken.read(k)),
    "of its own": lambda k, taken, made, n: made.write(
        k, made.read(tf.maximum(k - 1, 0)) + taken.read(k)
    ),
    "table": _table,
    "random": lambda k, taken, made, n: made.write(
        k, taken.read(k) * tf.random.uniform([])
    ),
}


@pytest.mark.parametrize("one", _HOSTILE.values(), ids=_HOSTILE)
def test_what_numbers_the_examples(one):
    (value,) = check(_numbered(one), _X)
    assert value.kind is Kind.OTHER or value.degree is None


def _running_sum(x):
    taken = _list(x)

    def body(k, s, made):
        s = s + taken.read(k)
        return s, made.write(k, s)

    return _made(x, body, tf.zeros([3]))


_ELEMENTS = {"element_shape": [3], "element_dtype": tf.float32}


def _pushed(x, times=1):
    taken = _list(x)

    def body(k, made):
        t = taken.read(k)
        for _ in range(times):
            made = raw.TensorListPushBack(input_handle=made, tensor=t)
        return made

    made = raw.EmptyTensorList(max_num_elements=99, **_ELEMENTS)
    (made,) = loop(tf.shape(x)[0], body, made)
    return raw.TensorListStack(input_handle=made, **_ELEMENTS)


def _popped(elements):
    return raw.TensorListPopBack(input_handle=elements, **_ELEMENTS)


def _popped_and_read(x):
    """Every example meets the one that stands as far from the end."""
    first = _list(x)

    def body(k, left, made):
        left, t = _popped(left)
        return left, made.write(k, t * first.read(k))

    return _made(x, body, _list(x).flow)


def _second_order(x):
    y = tf.map_fn(lambda t: tf.tanh(t) * tf.reduce_sum(t), x)
    (first,) = tf.gradients(tf.reduce_sum(y), [x])
    return tf.gradients(tf.reduce_mean(first**2), [x])


def _one_round_fewer(x):
    end = tf.shape(x)[0] - 1
    taken = _List(tf.float32, end + 1).unstack(x)
    return loop(end, lambda k, s: s + taken.read(k), tf.zeros([3]))


_CARRYING = {
    "one round fewer": _one_round_fewer,
    "scan": lambda x: tf.scan(lambda a, b: 0.5 * a + b, x, tf.zeros([3])),
    "decaying sum": _folded(lambda a, b: 0.5 * a + b),
    "product": _folded(lambda a, b: a * b, 1.0),
    "last one": _folded(lambda a, b: b),
    "largest": _folded(tf.maximum),
    "running sum": _running_sum,
    "pushed twice": lambda x: _pushed(x, 2),
    "last element": lambda x: tf.nn.l2_loss(_popped(_list(x).flow)[1]),
    "both ends": _popped_and_read,
}


@pytest.mark.parametrize("step", _CARRYING.values(), ids=_CARRYING)
def test_what_goes_from_example_to_example(step):
    (value,) = check(step, _X)
    assert value.kind is Kind.OTHER, value


def test_what_is_said_of_others_is_true():
    check(_second_order, _X)
    check(_pushed, _X)
    check(gradients(_mapped(_branch)), _X)
    check(gradients(_mapped(_inner_loop)), _X)
    check(_mapped(_EACH["softmax"]), _X, towers=[(1, 1)])


def test_examples_that_meet_all_examples():
    def step(x):
        return tf.map_fn(lambda t: t - tf.reduce_mean(x, 0), x)

    (value,) = check(step, _X)
    assert "sum or mean" in value.reason.text


def test_gradients_of_a_bias_in_a_map():
    step = gradients(_mapped(lambda t, b: tf.nn.bias_add(t[None], b)[0] ** 2))
    _, of_bias = check(step, _X, same(3))
    assert of_bias.kind is Kind.SUM
