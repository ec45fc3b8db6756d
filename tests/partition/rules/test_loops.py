"""Loops on towers, also with one iteration for each example."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_towers import compat
from keras_towers.partition import partition_graph
from keras_towers.partition.layouts import REPLICATED, Sharded
from keras_towers.partition.partitioner import Partitioner
from tests.kit.sampling import sample_of
from tests.partition.kit import (
    FEW,
    check_divided,
    check_on_towers,
    computed_once,
    exchange_counts,
    partial_sum,
    replicated,
    sharded,
    with_gradients,
)

pytestmark = pytest.mark.alternate

_check = functools.partial(check_divided, towers=FEW)


# ---- all iterations ----------------------------------------------------------


def _loop(times, each, start, **options):
    """Go some rounds; return what has gone round but for the number."""

    def round_(i, *state):
        after = each(i, *state)
        return i + 1, *(after if isinstance(after, tuple) else (after,))

    found = tf.while_loop(
        lambda i, *_: i < times, round_, (0, *start), **options
    )
    return found[1:]


def _powers(x, w):
    return _loop(3, lambda i, y: tf.tanh(y @ w) + x, (x,))


def test_loops_carry_rows_and_their_gradients():
    program = _check(_powers, sharded(-1, 2), replicated(2, 2))
    assert exchange_counts(program) == {"gather": 1}
    program = _check(with_gradients(_powers), sharded(-1, 2), replicated(2, 2))
    assert exchange_counts(program) == {"gather": 2, "sum": 1}
    assert program.levels == 1


def test_loops_carry_second_derivatives():
    def penalty(x, w):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(_powers(x, w))
        return tape.gradient(y, x)

    given = sharded(-1, 2), replicated(2, 2)
    check_on_towers(with_gradients(penalty), *given, towers=FEW, tolerance=1e-4)


def test_loops_carry_other_axes_and_blocks_of_rows():
    _check(with_gradients(_powers), sharded(2, -1, 2), replicated(2, 2, 2))
    _check(with_gradients(_powers), sharded(-1, 2, rows=2), replicated(2, 2))
    _check(_powers, sharded(-1, 2, blocks=2, rows=3), replicated(2, 2))


def _zeros(x):
    return tf.zeros((tf.shape(x)[0], 2))


def _divided_by_the_number(x):
    def each(i, y):
        n = tf.cast(tf.shape(y)[0], tf.float32)
        return y / n + tf.ones_like(y) * tf.cast(i, tf.float32)

    return _loop(2, each, (x,))


def _twice_as_late(x):
    """The third loop variable becomes rows in the third iteration only."""
    a = _zeros(x)
    return _loop(
        4, lambda i, a, b, c: (x + a, a + 1.0, b * 2.0), (a, a + 1.0, a + 2.0)
    )


def _wider(x):
    shapes = tf.TensorShape([]), tf.TensorShape([None, None])
    each = lambda i, y: tf.concat([y, x], 1)  # noqa: E731
    return _loop(3, each, (x,), shape_invariants=shapes)


def _noisy(x):
    def each(i, y):
        return y * tf.random.stateless_uniform((2,), tf.stack([i, 7]))

    return _loop(3, each, (x,))


def _of_loops(x, w):
    """Loops within loops, of which the tape keeps lists of lists."""

    def each(i, y):
        (z,) = _loop(2, lambda j, z: tf.tanh(z @ w), (y,))
        return tf.cond(i > 0, lambda: z * x, lambda: z + x)

    return _loop(3, each, (x,))


def _with_a_choice_of_sizes(x):
    """Its inner results are the same for all towers, not its inputs."""

    def each(i, y):
        n = tf.cond(i > 1, lambda: tf.shape(x)[0], lambda: 0)
        return y + tf.cast(n, tf.float32) * x

    return _loop(3, each, (_zeros(x),))


# Loop variables that change their layout: from replicated to sharded, ...
_DIVIDED = {
    "zeros": (
        lambda x: _loop(3, lambda i, y: y + x, (_zeros(x),)),
        sharded(-1, 2),
    ),
    "sums": (
        lambda x, y: _loop(3, lambda i, s: s + tf.reduce_sum(x, 0), (y,)),
        sharded(-1, 2),
        replicated(2),
    ),
    "factors": (
        lambda x, y: _loop(2, lambda i, z: z * tf.exp(y), (x,)),
        sharded(-1, 2),
        partial_sum(2),
    ),
    "late": (with_gradients(_twice_as_late), sharded(-1, 2)),
    "wider": (_wider, sharded(-1, 2)),
    "the number of examples": (_divided_by_the_number, sharded(-1, 2)),
    "as often as there are examples": (
        with_gradients(
            lambda x: _loop(tf.shape(x)[0], lambda i, y: y * 0.5 + x, (x,))
        ),
        sharded(-1, 2),
    ),
    "no rounds": (
        with_gradients(lambda x, n: _loop(n[0], lambda i, y: y + x, (x,))),
        sharded(-1, 2),
        replicated(1, dtype="int32", low=0, high=0),
    ),
    "draws": (_noisy, sharded(-1, 2)),
    "a choice of sizes": (_with_a_choice_of_sizes, sharded(-1, 2)),
    "loops": (with_gradients(_of_loops), sharded(-1, 2), replicated(2, 2)),
}


@pytest.mark.parametrize("name", _DIVIDED)
def test_loops_are_divided(name):
    function, *given = _DIVIDED[name]
    program = _check(function, *given, tolerance=1e-4)
    assert exchange_counts(program)["sum"] <= 1


def _by_another_axis(x):
    """The axis, which is a known number, is another one in later rounds."""

    def each(i, axis, y):
        return 1 - axis, y + tf.reduce_sum(y, axis, keepdims=True)

    return _loop(2, each, (tf.constant(1), x))[1]


def _longer(x):
    shapes = tf.TensorShape([]), tf.TensorShape([None, 2])
    each = lambda i, y: tf.concat([y, x], 0)  # noqa: E731
    return _loop(3, each, (x,), shape_invariants=shapes)


def _until_the_batch_is_small(x):
    return tf.while_loop(
        lambda y: tf.reduce_sum(tf.abs(y)) > 0.1, lambda y: (y / 2,), (x,)
    )


def _examples_mixed(x):
    return _loop(2, lambda i, y: y - tf.reduce_mean(y, 0), (x,))


@pytest.mark.parametrize(
    "function",
    [_by_another_axis, _longer, _until_the_batch_is_small, _examples_mixed],
)
def test_loops_are_computed_once(function):
    program = check_on_towers(function, sharded(-1, 2), towers=FEW)
    assert "StatelessWhile" in computed_once(program)


def _pairs(x, mask):
    return tf.reshape(tf.boolean_mask(x, mask), [-1, 2])


def _masked_in_a_loop(x):
    mask = x[:, 0] > 0
    each = lambda i, y: y + tf.reduce_sum(_pairs(x, mask))  # noqa: E731
    return _loop(3, each, (0.0,)), _pairs(x, mask)


def _masked_in_branches(x):
    mask, way = x[:, 0] > 0, tf.reduce_sum(x) > 0
    total = tf.cond(
        way,
        lambda: tf.reduce_sum(_pairs(x, mask)),
        lambda: tf.reduce_sum(_pairs(-x, mask)),
    )
    return total, _pairs(x, mask)


def _masked_by_branches(x):
    mask, way = x[:, 0] > 0, tf.reduce_sum(x) > 0
    kept = tf.cond(way, lambda: _pairs(x, mask), lambda: _pairs(-x, mask))
    return 2 * kept, _pairs(x, mask)


@pytest.mark.parametrize(
    "function", [_masked_in_a_loop, _masked_in_branches, _masked_by_branches]
)
def test_a_function_counts_the_rows_that_it_finds(function):
    check_on_towers(function, sharded(-1, 4), towers=FEW)


def _scanned(x, w):
    """States of all times, of time-major rows."""
    steps = tf.TensorArray(tf.float32, tf.shape(x)[0]).unstack(x)
    states = tf.TensorArray(tf.float32, tf.shape(x)[0])

    def each(i, state, states):
        state = tf.tanh(steps.read(i) @ w + state)
        return state, states.write(i, state)

    return _loop(tf.shape(x)[0], each, (tf.zeros_like(x[0]), states))[1].stack()


def test_loops_carry_lists_of_rows():
    program = _check(_scanned, sharded(3, -1, 2), replicated(2, 2))
    assert exchange_counts(program) == {"gather": 1}
    program = _check(
        with_gradients(_scanned), sharded(3, -1, 2), replicated(2, 2)
    )
    assert exchange_counts(program) == {"gather": 2, "sum": 1}


def test_gradients_of_a_list_that_all_have():
    def weighted(x, v):
        weights = tf.TensorArray(tf.float32, 3).unstack(v)
        return _loop(3, lambda i, y: tf.tanh(y * weights.read(i)), (x,))

    program = _check(with_gradients(weighted), sharded(-1, 2), replicated(3, 2))
    assert exchange_counts(program) == {"gather": 2, "sum": 1}


def test_a_loop_reads_between_the_writes_around_it():
    graph, variable = compat.FuncGraph("one_device"), tf.Variable([3.0, 4.0])
    with graph.as_default():
        handle = graph.capture(variable.handle)
        x = tf.compat.v1.placeholder(tf.float32, (None, 2))

        def write(value):
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)

        def read():
            found = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
            return tf.ensure_shape(found, (2,))

        write(tf.reduce_sum(x, 0))
        (y,) = _loop(2, lambda i, y: y * read(), (x,))
        write(tf.constant([1.0, 2.0]))
        again = read()
    graph.inputs = [handle, x]
    program = partition_graph(graph, [REPLICATED, Sharded(0)], [y, again])
    assert not computed_once(program)
    first, last = [
        o.inputs[1] for o in program.operations if o.type == "AssignVariableOp"
    ]
    (loop,) = [o for o in program.operations if o.type == "While"]
    assert loop.on_towers and first in loop.inputs
    assert all(tensor.handle is None for tensor in loop.inputs)
    assert program.results[1].operation.inputs[0] is last
    assert all(o.type != "ReadVariableOp" for o in program.operations)


# ---- one iteration for each example ------------------------------------------


_WHOLE = np.array([3], "int32")
_FLOAT = {"element_shape": _WHOLE, "element_dtype": tf.float32}


def _two(x, y):
    types = tf.float32, tf.float32
    return tf.map_fn(
        lambda pair: (pair[0] @ pair[1], tf.reduce_max(pair[1])),
        (x, y),
        fn_output_signature=types,
    )


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


def _by_keras(x):
    def each(e):
        return {"a": e * 2, "b": keras.ops.sum(keras.ops.tanh(e))}

    return keras.ops.map(each, x)


def _rounds(x, each, *start, **options):
    """Loop over the examples; return the final loop variables.

    Args:
        x: the examples.
        each: takes the number of a round, what reads examples, their number,
            and what goes round; returns the latter.
        *start: what goes round.
        **options: of ``tf.while_loop``.
    """
    n = tf.shape(x)[0]
    items = tf.TensorArray(tf.float32, n).unstack(x)
    found = tf.while_loop(
        lambda i, *_: i < n,
        lambda i, *state: (i + 1, *each(i, items.read, n, *state)),
        (0, *start),
        **options,
    )
    return found[1:]


def _summed(x):
    def each(i, read, n, s):
        return (s + tf.exp(read(i)) * tf.cast(i, x.dtype),)

    return _rounds(x, each, tf.ones([3]))


_CASES = {
    "one": (
        lambda x: tf.map_fn(lambda e: tf.nn.softmax(e) * tf.reduce_sum(e), x),
        sharded(-1, 3),
    ),
    "two": (_two, sharded(-1, 2, 3), sharded(-1, 3, 2)),
    "weights": (
        lambda x, w: tf.map_fn(lambda e: tf.linalg.matvec(w, tf.tanh(e)), x),
        sharded(-1, 3),
        replicated(2, 3),
    ),
    "numbers": (_numbered, sharded(-1, 3), replicated(2, 3)),
    "branches": (_chosen, sharded(-1, 3)),
    "loops": (_with_loop, sharded(-1, 3)),
    "nested": (_nested, sharded(-1, 4)),
    "keras.ops.map": (_by_keras, sharded(-1, 3)),
    "sum": (_summed, sharded(-1, 3)),
    "what all need": (
        lambda x: tf.map_fn(lambda e: e * tf.reduce_sum(tf.exp(x), 0), x),
        sharded(-1, 3),
    ),
}


@pytest.mark.parametrize("name", sample_of(_CASES, 4))
def test_each_tower_loops_over_its_own_examples(name):
    function, *given = _CASES[name]
    program = check_on_towers(with_gradients(function), *given, towers=FEW)
    # keras.ops.map looks at the first example, whose values nobody needs.
    assert set(computed_once(program)) <= {"StridedSlice"}
    assert exchange_counts(program)["gather"] <= 4


def test_numbers_of_examples_and_draws_are_those_of_one_device():
    def each(e):
        drawn = tf.random.stateless_normal((3,), (3, 4))
        return tf.argmax(e + drawn)

    check_divided(
        lambda x: tf.map_fn(each, x, fn_output_signature=tf.int64),
        sharded(-1, 3),
    )


def test_what_is_the_same_on_all_towers_is_not_laid_out(monkeypatch):
    """Otherwise the time grows exponentially with the depth of loops."""
    laid_out = []
    lay_out_node = Partitioner.lay_out_node

    def note(self, node, inputs):
        laid_out.append(node.type)
        return lay_out_node(self, node, inputs)

    monkeypatch.setattr(Partitioner, "lay_out_node", note)
    check_divided(_with_loop, sharded(-1, 2))
    assert "Abs" in laid_out
    assert "Tanh" not in laid_out


def test_the_initial_value_of_a_sum_counts_once():
    def add(x, y):
        def each(i, read, n, s, t):
            return s + read(i), t + 2

        return _rounds(x, each, y, 5)

    for given in (replicated(3), partial_sum(3)):
        program = check_divided(add, sharded(-1, 3), given)
        assert exchange_counts(program)["sum"] == 2


def test_a_list_that_is_doubled_in_each_round_is_divided():
    def doubled(x):
        items = tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=_WHOLE)
        (found,) = _rounds(x, lambda i, read, n, y: (tf.add_n([y, y]),), items)
        return tf.raw_ops.TensorListStack(input_handle=found, **_FLOAT)

    check_divided(doubled, sharded(-1, 3))


# ---- what goes from one example to the next is computed once -----------------


def _listed(x, each, **options):
    """Rounds that write into a list: what they make of a reader and a list."""
    found = tf.TensorArray(tf.float32, tf.shape(x)[0], **options)
    return _rounds(x, lambda *given: (each(*given),), found)[0].stack()


def _running_sum(x):
    def each(i, read, n, s, y):
        s = s + read(i)
        return s, y.write(i, s)

    found = tf.TensorArray(tf.float32, tf.shape(x)[0])
    return _rounds(x, each, tf.zeros([3]), found)[1].stack()


def _while(x, goes_on, next_, start):
    """Sum up some of the examples."""
    n = tf.shape(x)[0]
    items = tf.TensorArray(tf.float32, n).unstack(x)
    return tf.while_loop(
        lambda i, s: goes_on(i, n, s),
        lambda i, s: (next_(i), s + items.read(i)),
        (start(n), tf.zeros([3])),
    )[1]


def _not_all(x):
    return _while(
        x,
        lambda i, n, s: (i < n) & (tf.reduce_sum(s) < 0.5),
        lambda i: i + 1,
        lambda n: 0,
    )


def _wider_sum(x):
    shapes = tf.TensorShape([]), tf.TensorShape([None])
    each = lambda i, read, n, s: (s + read(i),)  # noqa: E731
    return _rounds(x, each, tf.zeros([1]), shape_invariants=shapes)


def _read_before(x):
    """Each iteration reads the element that the previous one wrote."""
    items = tf.TensorArray(tf.float32, tf.shape(x)[0]).unstack(x)

    def each(i, read, n, y):
        return (y.write(i, read(i) + y.read(tf.maximum(i - 1, 0))),)

    return _rounds(x, each, items)[0].stack()


def _popped(items):
    return tf.raw_ops.TensorListPopBack(input_handle=items, **_FLOAT)


def _from_the_end(x):
    """Examples that are taken from the end, with their numbers."""
    items = tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=_WHOLE)

    def each(i, read, n, items, s):
        items, item = _popped(items)
        return items, s + item * tf.cast(i, tf.float32)

    return _rounds(x, each, items, tf.zeros([3]))[1]


def _always_the_last(x):
    """Every iteration pops the last example of the same list."""
    items = tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=_WHOLE)
    each = lambda i, read, n, s: (s + _popped(items)[1],)  # noqa: E731
    return _rounds(x, each, tf.zeros([3]))


def _how_many_so_far(x):
    """Lists that grow, and know how long they are."""

    def each(i, read, n, found):
        often = tf.raw_ops.TensorListLength(input_handle=found)
        item = read(i) * tf.cast(often, tf.float32)
        return (tf.raw_ops.TensorListPushBack(input_handle=found, tensor=item),)

    found = tf.raw_ops.EmptyTensorList(max_num_elements=-1, **_FLOAT)
    (found,) = _rounds(x, each, found)
    return tf.raw_ops.TensorListStack(input_handle=found, **_FLOAT)


def _swapped(x):
    """Lists that change places."""
    n = tf.shape(x)[0]
    lists = [tf.TensorArray(tf.float32, n).unstack(x * k) for k in (1, 2)]

    def each(i, read, n, a, b):
        return b.write(i, a.read(i) + 1), a

    return [found.stack() for found in _rounds(x, each, *lists)]


def _anew(i, read, n, _):
    """A list of which only the last round's is left."""
    found = tf.TensorArray(tf.float32, n, element_shape=(3,))
    return found.write(i, read(i))


_MEET = {
    "scan": lambda x: tf.scan(lambda a, e: a * 0.5 + e, x),
    "neighbour": lambda x: _listed(
        x, lambda i, read, n, y: y.write(i, read((i + 1) % n))
    ),
    "backwards": lambda x: _listed(
        x, lambda i, read, n, y: y.write(n - 1 - i, read(i))
    ),
    "fewer than all": lambda x: _listed(
        x, lambda i, read, n, y: y.write(i // 2, read(i)), element_shape=(3,)
    ),
    "anew": lambda x: _listed(x, _anew, element_shape=(3,)),
    "product": lambda x: _rounds(
        x, lambda i, read, n, s: (s * read(i),), tf.ones([3])
    ),
    "sum twice": lambda x: _rounds(
        x, lambda i, read, n, s: (s + s + read(i),), tf.zeros([3])
    ),
    "not from zero": lambda x: _while(
        x, lambda i, n, s: i < n, lambda i: i + 1, lambda n: tf.minimum(n, 1)
    ),
    "every second": lambda x: _while(
        x, lambda i, n, s: i < n, lambda i: i + 2, lambda n: 0
    ),
    "not all": _not_all,
    "running sum": _running_sum,
    "wider sum": _wider_sum,
    "read before": _read_before,
    "from the end": _from_the_end,
    "always the last": _always_the_last,
    "how many so far": _how_many_so_far,
    "swapped": _swapped,
}


@pytest.mark.parametrize("name", _MEET)
def test_loops_that_carry_values_between_examples_are_computed_once(name):
    program = check_on_towers(_MEET[name], sharded(-1, 3))
    assert {"StatelessWhile", "While"} & set(computed_once(program))
    if name != "not all":
        check_on_towers(with_gradients(_MEET[name]), sharded(-1, 3), towers=FEW)


def test_effects_are_those_of_one_device():
    calls = []

    def note(e):
        calls.append(np.asarray(e).tolist())
        return e

    def each(e):
        found = tf.numpy_function(note, [e], tf.float32)
        return tf.ensure_shape(found, (2,)) * 2

    check_on_towers(
        lambda x: tf.map_fn(each, x), sharded(-1, 2), towers=((3, 0, 2),)
    )
    # One device, which is looked at as well, and all towers together.
    assert sorted(calls) == sorted(calls[:5] * 3)


def test_examples_that_make_elements_of_unlike_shapes():
    def total(x):
        # Of each example as many entries as it says: they cannot be stacked.
        def each(i, read, n, y):
            often = tf.cast(tf.abs(read(i)[0]) * 3, tf.int32)
            return (y.write(i, tf.tile(read(i), [often + 1])),)

        found = tf.TensorArray(tf.float32, tf.shape(x)[0], infer_shape=False)
        return _rounds(x, each, found)[0].concat()

    check_on_towers(total, sharded(-1, 2), towers=((3, 0, 2), (1, 4)))
