"""Loops that go round once for each example, against one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.kit.long import some_of
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


def _soft(x):
    return tf.map_fn(lambda e: tf.nn.softmax(e) * tf.reduce_sum(e), x)


def _two(x, y):
    types = tf.float32, tf.float32
    return tf.map_fn(
        lambda pair: (pair[0] @ pair[1], tf.reduce_max(pair[1])),
        (x, y),
        fn_output_signature=types,
    )


def _weighted(x, w):
    return tf.map_fn(lambda e: tf.linalg.matvec(w, tf.tanh(e)), x)


def _numbered(x, w):
    def each(pair):
        e, i = pair
        return e * tf.cast(i, tf.float32) + tf.gather(w, i % 2)

    numbers = tf.range(tf.shape(x)[0])
    return tf.map_fn(each, (x, numbers), fn_output_signature=tf.float32)


def _chosen(x):
    def each(e):
        return tf.cond(
            tf.reduce_sum(e) > 0, lambda: e * 2, lambda: tf.exp(e) - 1
        )

    return tf.map_fn(each, x)


def _with_loop(x):
    def each(e):
        often = tf.cast(tf.abs(e[0]) * 4, tf.int32)
        return tf.while_loop(
            lambda i, y: i < often,
            lambda i, y: (i + 1, tf.tanh(y * tf.reduce_sum(y) + e)),
            (0, e),
        )[1]

    return tf.map_fn(each, x)


def _nested(x):
    def each(e):
        return tf.map_fn(lambda s: tf.exp(s) * tf.reduce_sum(e), e)

    return tf.map_fn(each, x)


def _nested_over_weights(x, w):
    def each(e):
        return tf.map_fn(lambda v: tf.exp(v * e), w)

    return tf.map_fn(each, x)


def _of_all(x):
    return tf.map_fn(lambda e: e * tf.reduce_sum(tf.exp(x), 0), x)


def _by_keras(x):
    def each(e):
        return {"a": e * 2, "b": keras.ops.sum(keras.ops.tanh(e))}

    return keras.ops.map(each, x)


def _integers(x):
    return tf.map_fn(lambda e: tf.argmax(e), x, fn_output_signature=tf.int64)


def _summed(x):
    """The sum of what each example gives."""
    n = tf.shape(x)[0]
    items = tf.TensorArray(tf.float32, n).unstack(x)
    return tf.while_loop(
        lambda i, s: i < n,
        lambda i, s: (i + 1, s + tf.exp(items.read(i)) * tf.cast(i, x.dtype)),
        (0, tf.ones([3])),
    )[1]


_CASES = {
    "one": (_soft, rows(-1, 3)),
    "two": (_two, rows(-1, 2, 3), rows(-1, 3, 2)),
    "weights": (_weighted, rows(-1, 3), same(2, 3)),
    "numbers": (_numbered, rows(-1, 3), same(2, 3)),
    "branches": (_chosen, rows(-1, 3)),
    "loops": (_with_loop, rows(-1, 3)),
    "nested": (_nested, rows(-1, 4)),
    "over weights": (_nested_over_weights, rows(-1, 2), same(3, 2)),
    "keras.ops.map": (_by_keras, rows(-1, 3)),
    "sum": (_summed, rows(-1, 3)),
}


@pytest.mark.parametrize("name", some_of(_CASES, 4))
def test_each_tower_goes_round_for_its_own_examples(name):
    function, *given = _CASES[name]
    program = check(function, *given)
    assert not _loops(program)
    program = check(with_gradients(function), *given, towers=FEW)
    assert not _loops(program)
    assert kinds(program)["gather"] <= 4


def _loops(program):
    """The operations that are computed once, but for reads of one example."""
    # keras.ops.map looks at the first example, whose values nobody needs.
    return set(once(program)) - {"StridedSlice"}


def test_numbers_of_examples_are_those_of_one_device():
    check_divided(_integers, rows(-1, 3))


def test_what_every_example_needs_of_all_is_gathered():
    program = check(with_gradients(_of_all), rows(-1, 3), towers=FEW)
    assert not _loops(program)


def test_sums_begin_once():
    def add(x, y):
        n = tf.shape(x)[0]
        items = tf.TensorArray(tf.float32, n).unstack(x)
        return tf.while_loop(
            lambda i, s, t: i < n,
            lambda i, s, t: (i + 1, s + items.read(i), t + 2),
            (0, y, 5),
        )[1:]

    for given in (same(3), part(3)):
        program = check_divided(add, rows(-1, 3), given)
        assert kinds(program)["sum"] == 2


# ---- what goes from one example to the next is computed once -----------------


def _read(x):
    n = tf.shape(x)[0]
    return n, tf.TensorArray(tf.float32, n).unstack(x)


def _scan(x):
    return tf.scan(lambda a, e: a * 0.5 + e, x)


def _neighbour(x):
    n, items = _read(x)
    found = tf.TensorArray(tf.float32, n)
    return tf.while_loop(
        lambda i, y: i < n,
        lambda i, y: (i + 1, y.write(i, items.read((i + 1) % n))),
        (0, found),
    )[1].stack()


def _backwards(x):
    n, items = _read(x)
    found = tf.TensorArray(tf.float32, n)
    return tf.while_loop(
        lambda i, y: i < n,
        lambda i, y: (i + 1, y.write(n - 1 - i, items.read(i))),
        (0, found),
    )[1].stack()


def _product(x):
    n, items = _read(x)
    return tf.while_loop(
        lambda i, s: i < n,
        lambda i, s: (i + 1, s * items.read(i)),
        (0, tf.ones([3])),
    )[1]


def _running_sum(x):
    n, items = _read(x)
    found = tf.TensorArray(tf.float32, n)

    def each(i, s, y):
        s = s + items.read(i)
        return i + 1, s, y.write(i, s)

    return tf.while_loop(lambda i, *_: i < n, each, (0, tf.zeros([3]), found))[
        2
    ].stack()


def _not_from_zero(x):
    n, items = _read(x)
    return tf.while_loop(
        lambda i, s: i < n,
        lambda i, s: (i + 1, s + items.read(i)),
        (tf.minimum(n, 1), tf.zeros([3])),
    )[1]


def _not_all(x):
    n, items = _read(x)
    return tf.while_loop(
        lambda i, s: (i < n) & (tf.reduce_sum(s) < 0.5),
        lambda i, s: (i + 1, s + items.read(i)),
        (0, tf.zeros([3])),
    )[1]


def _every_second(x):
    n, items = _read(x)
    return tf.while_loop(
        lambda i, s: i < n,
        lambda i, s: (i + 2, s + items.read(i)),
        (0, tf.zeros([3])),
    )[1]


def _wider_sum(x):
    n, items = _read(x)
    return tf.while_loop(
        lambda i, s: i < n,
        lambda i, s: (i + 1, s + items.read(i)),
        (0, tf.zeros([1])),
        shape_invariants=(tf.TensorShape([]), tf.TensorShape([None])),
    )[1]


def _sum_twice(x):
    n, items = _read(x)
    return tf.while_loop(
        lambda i, s: i < n,
        lambda i, s: (i + 1, s + s + items.read(i)),
        (0, tf.zeros([3])),
    )[1]


def _fewer_than_all(x):
    n, items = _read(x)
    found = tf.TensorArray(tf.float32, n, element_shape=(3,))
    return tf.while_loop(
        lambda i, y: i < n,
        lambda i, y: (i + 1, y.write(i // 2, items.read(i))),
        (0, found),
    )[1].stack()


def _read_before(x):
    # What a round writes the next one reads.
    n, items = _read(x)
    return tf.while_loop(
        lambda i, y: i < n,
        lambda i, y: (
            i + 1,
            y.write(i, items.read(i) + y.read(tf.maximum(i - 1, 0))),
        ),
        (0, items),
    )[1].stack()


def _popped(x):
    """Examples that are taken from the end, with their numbers."""
    shape = tf.constant([3])
    items = tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=shape)
    n = tf.shape(x)[0]

    def each(i, items, s):
        items, item = tf.raw_ops.TensorListPopBack(
            input_handle=items, element_shape=shape, element_dtype=tf.float32
        )
        return i + 1, items, s + item * tf.cast(i, tf.float32)

    return tf.while_loop(lambda i, *_: i < n, each, (0, items, tf.zeros([3])))[
        2
    ]


def _list(x):
    return tf.raw_ops.TensorListFromTensor(
        tensor=x, element_shape=tf.constant([3])
    )


def _how_many_so_far(x):
    """Lists that grow, and know how long they are."""
    n, items = _read(x)
    found = tf.raw_ops.EmptyTensorList(
        element_shape=tf.constant([3]),
        max_num_elements=-1,
        element_dtype=tf.float32,
    )

    def each(i, found):
        often = tf.raw_ops.TensorListLength(input_handle=found)
        often = tf.cast(often, tf.float32)
        return i + 1, tf.raw_ops.TensorListPushBack(
            input_handle=found, tensor=items.read(i) * often
        )

    found = tf.while_loop(lambda i, _: i < n, each, (0, found))[1]
    return tf.raw_ops.TensorListStack(
        input_handle=found,
        element_shape=tf.constant([3]),
        element_dtype=tf.float32,
    )


def _always_the_last(x):
    """The last example, which is taken in every round anew."""
    items = _list(x)

    def each(i, s):
        _, item = tf.raw_ops.TensorListPopBack(
            input_handle=items,
            element_shape=tf.constant([3]),
            element_dtype=tf.float32,
        )
        return i + 1, s + item

    n = tf.shape(x)[0]
    return tf.while_loop(lambda i, _: i < n, each, (0, tf.zeros([3])))[1]


def _doubled(x):
    """Lists that are added to themselves."""
    n = tf.shape(x)[0]
    found = tf.while_loop(
        lambda i, _: i < n,
        lambda i, items: (i + 1, tf.add_n([items, items])),
        (0, _list(x)),
    )[1]
    return tf.raw_ops.TensorListStack(
        input_handle=found,
        element_shape=tf.constant([3]),
        element_dtype=tf.float32,
    )


def _swapped(x):
    """Lists that change places."""
    n, items = _read(x)
    others = tf.TensorArray(tf.float32, n).unstack(x * 2)

    def each(i, a, b):
        return i + 1, b.write(i, a.read(i) + 1), a

    found = tf.while_loop(lambda i, *_: i < n, each, (0, items, others))
    return found[1].stack(), found[2].stack()


def _anew(x):
    """A list of which only the last round's is left."""
    n, items = _read(x)
    found = tf.TensorArray(tf.float32, n, element_shape=(3,))

    def each(i, _):
        new = tf.TensorArray(tf.float32, n, element_shape=(3,))
        return i + 1, new.write(i, items.read(i))

    return tf.while_loop(lambda i, _: i < n, each, (0, found))[1].stack()


@pytest.mark.parametrize(
    "function",
    [
        _how_many_so_far,
        _always_the_last,
        _swapped,
        _anew,
        _scan,
        _neighbour,
        _backwards,
        _product,
        _running_sum,
        _not_from_zero,
        _not_all,
        _every_second,
        _wider_sum,
        _sum_twice,
        _fewer_than_all,
        _read_before,
        _popped,
    ],
)
def test_what_goes_from_one_example_to_the_next(function):
    program = check(function, rows(-1, 3))
    assert {"StatelessWhile", "While"} & set(once(program))
    if function is not _not_all:
        check(with_gradients(function), rows(-1, 3), towers=FEW)


def test_all_towers_double_their_own_as_often():
    check_divided(_doubled, rows(-1, 3))


def test_effects_are_those_of_one_device():
    calls = []

    def note(e):
        calls.append(np.asarray(e).tolist())
        return e

    def each(e):
        found = tf.numpy_function(note, [e], tf.float32)
        return tf.ensure_shape(found, (2,)) * 2

    check(lambda x: tf.map_fn(each, x), rows(-1, 2), towers=((3, 0, 2),))
    # One device, which is looked at as well, and all towers together.
    assert sorted(calls) == sorted(calls[:5] * 3)


def test_draws_with_seeds_are_those_of_one_device():
    def each(e):
        return e + tf.random.stateless_normal((3,), (3, 4))

    check_divided(lambda x: tf.map_fn(each, x), rows(-1, 3))


def test_examples_that_make_elements_of_unlike_shapes():
    def total(x):
        # Of each example as many entries as it says: they cannot be stacked.
        n, items = _read(x)
        found = tf.TensorArray(tf.float32, n, infer_shape=False)

        def each(i, y):
            item = items.read(i)
            often = tf.cast(tf.abs(item[0]) * 3, tf.int32)
            return i + 1, y.write(i, tf.tile(item, [often + 1]))

        return tf.while_loop(lambda i, y: i < n, each, (0, found))[1].concat()

    check(total, rows(-1, 2), towers=((3, 0, 2), (1, 4)))
