"""What is exchanged, what is computed once, and in which order."""

import collections

import pytest
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.partition import partition_graph
from keras_towers.partition.layouts import REPLICATED, Sharded
from tests.partition.kit import (
    check,
    check_divided,
    kinds,
    on_towers,
    once,
    rows,
    same,
)
from tests.partition.kit import traced as traced_


def _gradients(function):
    return lambda *given: tf.gradients(function(*given), list(given))


def test_statistics_of_a_batch_take_an_exchange_each_way():
    def standardized(x, w):
        y = x @ w
        apart = y - tf.reduce_mean(y, 0)
        scale = tf.math.rsqrt(tf.reduce_mean(apart**2, 0) + 0.1)
        return tf.reduce_mean(tf.square(apart * scale - 1))

    program = check_divided(_gradients(standardized), rows(-1, 4), same(4, 3))
    assert kinds(program)["gather"] == 1  # The gradient of x, as it is asked.


def test_all_pairs_gather_one_side():
    def function(x):
        scores = tf.matmul(x, x, transpose_b=True)
        return tf.reduce_sum(tf.nn.log_softmax(scores))

    program = check(function, rows(-1, 4))
    assert kinds(program) == {"gather": 1, "sum": 1}
    assert not once(program)


@pytest.mark.parametrize("interleaved", [False, True])
def test_two_views_of_each_example(interleaved):
    """As in SimCLR: rows of two tensors, in blocks or by turns."""

    def function(x):
        views = tf.stack([x, tf.sin(x)], 1 if interleaved else 0)
        views = tf.reshape(views, [-1, 4])
        scores = tf.matmul(views, views, transpose_b=True)
        first, second = tf.split(scores, 2)
        return tf.reduce_sum(scores**2), first - second, tf.gradients(scores, x)

    program = check(function, rows(-1, 4))
    assert interleaved or not once(program)


def test_operations_have_the_names_of_the_trace():
    def function(x, w):
        with tf.name_scope("layer"):
            return tf.reduce_sum(x @ w)

    program = check(function, rows(-1, 4), same(4, 3))
    names = {o.type: o.name for o in program.operations}
    assert names["MatMul"] == "layer/matmul"


@pytest.mark.parametrize("limited", [False, True])
def test_a_count_of_nothing_makes_a_weight_infinite(limited):
    """As of classes by how many examples they have, of which one has none."""

    def function(x):
        wrong = tf.reduce_sum(tf.cast(x > -9, tf.float32))
        right = tf.reduce_sum(tf.cast(x > 9, tf.float32))
        some = tf.sqrt(right)  # So that the count is there already.
        weight = wrong / right
        return some, tf.minimum(weight, 10.0) if limited else weight

    program = check(function, rows(-1, 3), towers=((2, 0, 3), (1, 1)))
    assert kinds(program) == {"sum": 2}
    assert program.levels == 2


# Half of the towers below have a partial sum of 0.
_INFINITE = {
    "product": lambda total, zeros: total * tf.math.log(zeros),
    "quotient": lambda total, zeros: total / zeros,
    "matrix product": lambda total, zeros: (
        total[None] @ tf.math.log(tf.ones((3, 2)) * zeros[0])
    ),
    "gradient": lambda total, zeros: tf.gradients(
        tf.sqrt(zeros), [zeros], [total]
    ),
}


@pytest.mark.parametrize("name", _INFINITE)
def test_a_sum_is_complete_before_it_meets_an_infinite_factor(name):
    """On a tower without rows, 0 times infinity is NaN."""

    def function(x, zeros):
        found = _INFINITE[name](tf.reduce_sum(x, 0), zeros)
        return tf.reduce_sum(found)

    zeros = same(3, low=0, high=0)
    check(function, rows(-1, 3, low=1.0), zeros, towers=((2, 0, 3), (0, 1)))


def test_a_sum_is_scaled_before_it_is_complete():
    """Sizes and constants are finite factors, which cost no exchange."""

    def function(x):
        size = tf.cast(tf.shape(x)[0], tf.float32)
        mean = 0.5 * tf.reduce_sum(x, 0) / size
        return tf.reduce_sum(tf.linalg.matvec(tf.ones((2, 3)) / 8.0, mean))

    program = check(function, rows(-1, 3))
    assert program.levels == 1
    assert [e.given.shape.rank for e in program.exchanges] == [0]


def test_what_has_no_rule_is_computed_once():
    def function(x):
        return tf.unique(x[:, 1])[0], tf.sort(x[:, 0])

    program = check(function, rows(-1, 3))
    assert once(program) == {"Unique": 1, "TopKV2": 1}


def _imported_loop(x):
    """Double x as long as the sum is below 100, by a loop of TensorFlow 1."""
    is_v2 = tf.compat.v1.control_flow_v2_enabled()
    tf.compat.v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default() as graph:
            start = tf.compat.v1.placeholder(x.dtype, x.shape, "start")
            tf.while_loop(
                lambda y: tf.reduce_sum(y) < 100,
                lambda y: (2 * y,),
                [start],
            )
    finally:
        if is_v2:
            tf.compat.v1.enable_control_flow_v2()
    (end,) = (o for o in graph.get_operations() if o.type == "Exit")
    (result,) = tf.graph_util.import_graph_def(
        graph.as_graph_def(), {"start:0": x}, [end.outputs[0].name]
    )
    return result


_POSITIVE = rows(-1, 3, low=0.5)


def test_a_function_with_a_loop_of_tensorflow_1_is_computed_once():
    spec = tf.TensorSpec([None, 3])
    imported = tf.compat.v1.wrap_function(_imported_loop, [spec])
    program = check(lambda x: imported(x) * 2, _POSITIVE)
    assert set(once(program)) == {"PartitionedCall"}


def test_a_loop_of_tensorflow_1_outside_of_functions_is_an_error():
    with pytest.raises(TowerError, match="wrap_function"):
        check(_imported_loop, _POSITIVE)


def test_a_batch_of_which_the_size_is_known():
    def function(x):
        y = tf.reshape(x, [5, 2, 2])
        y = y - tf.reduce_mean(y, 0)
        return tf.reduce_sum(y), tf.tile(y, [1, 2, 1]), tf.ones([5, 2])

    graph = traced_(function, same(5, 4))
    program = partition_graph(graph, [Sharded(0)], graph.outputs)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.reshape(tf.range(20.0), [5, 4])
        found = on_towers(program, [[x[:2], x[2:2], x[2:]]], (2, 0, 3))
        right = function(x)
        for one, other in zip(*session.run([found, right]), strict=True):
            assert abs(one - other).max() < 1e-5
    assert not once(program)


@pytest.mark.parametrize("of", ["moments", "variance"])
def test_a_mean_and_its_variance_take_one_exchange(of):
    def function(x):
        # Far from 0, where the mean of squares is no help.
        x = x + 1000
        if of == "moments":
            return tf.nn.moments(x, [0, 1])
        return tf.math.reduce_variance(x, [0, 1])

    program = check(function, rows(-1, 3, 2), tolerance=1e-4)
    assert program.levels == 2
    assert not once(program)


def test_channels_may_be_a_multiple_of_examples():
    def function(x):
        y = tf.reshape(x, [5, 10])
        mean = tf.reduce_mean(y, 0, keepdims=True)
        return tf.reduce_sum(tf.tile(mean, [5, 1]) * y)

    graph = traced_(function, same(5, 10))
    program = partition_graph(graph, [Sharded(0)], graph.outputs)
    sizes = [e.given.shape.num_elements() for e in program.exchanges]
    assert max(sizes) == 10


def test_what_only_a_later_level_needs_is_computed_there():
    def function(x):
        apart = tf.cos(x)
        mean = tf.reduce_mean(tf.sin(x), 0)
        return tf.reduce_sum(apart * (x - mean))

    program = check(function, rows(-1, 2))
    levels = {o.type: o.level for o in program.operations}
    assert levels["Sin"] == 0
    assert levels["Cos"] == 1


def _stateful(function, *given):
    """Run a function on towers that captures variables or has effects."""
    graph = traced_(function, *given)
    outside = {id(inside) for _, inside in graph.captures}
    inputs = [t for t in graph.inputs if id(t) not in outside]
    graph.inputs = [*inputs, *(inside for _, inside in graph.captures)]
    layouts = [g.layout for g in given]
    layouts += [REPLICATED] * len(graph.captures)
    program = partition_graph(graph, layouts, graph.outputs)

    @tf.function(autograph=False)
    def run(*parts):
        captured = [[tensor] for tensor, _ in graph.captures]
        return on_towers(program, [*parts, *captured], (2, 0, 1))

    return program, run


def _parts(x):
    return [x[:2], x[2:2], x[2:]]


def test_variables_are_read_after_what_was_written_before():
    variable = tf.Variable(1.0)

    def function(x):
        before = variable.read_value()
        variable.assign_add(tf.reduce_sum(x))
        between = x * variable
        variable.assign(tf.reduce_sum(between))
        return before, variable.read_value()

    _, run = _stateful(function, rows(-1))
    before, after = run(_parts(tf.constant([1.0, 2.0, 3.0])))
    assert before.numpy() == 1
    assert after.numpy() == variable.numpy() == 42


def test_effects_happen_once_with_the_whole_batch():
    seen = []

    def note(x):
        seen.append(x.tolist())
        return x

    def function(x):
        return tf.reduce_sum(tf.numpy_function(note, [x], tf.float32))

    program, run = _stateful(function, rows(-1))
    (total,) = run(_parts(tf.constant([1.0, 2.0, 3.0])))
    assert total.numpy() == 6
    assert seen == [[1.0, 2.0, 3.0]]
    assert once(program) == {"PyFunc": 1}


def test_a_table_is_read_once_and_its_rows_are_picked_by_towers():
    table = tf.Variable(tf.reshape(tf.range(12.0), [6, 2]))

    def function(x):
        return tf.reduce_sum(tf.nn.embedding_lookup(table, x) ** 2)

    given = rows(-1, dtype="int32")
    program, run = _stateful(function, given)
    (total,) = run(_parts(tf.constant([1, 0, 5])))
    assert total.numpy() == 4 + 9 + 1 + 100 + 121
    types = collections.Counter(o.type for o in program.operations)
    assert types["ReadVariableOp"] == 1
    assert not once(program)


def test_the_gradient_of_a_bias_of_images_is_a_sum():
    """With that of the kernel oneDNN fuses another, which needs an image."""

    def function(x):
        return tf.raw_ops.BiasAddGrad(out_backprop=x)

    program = check_divided(function, rows(-1, 2, 2, 3))
    assert "BiasAddGrad" not in {o.type for o in program.operations}


@pytest.mark.parametrize("ratio", [None, 100])
def test_what_is_less_is_exchanged_rows_or_the_sums_over_them(ratio):
    """Two gradients, of a large and a small matrix; the large one is scaled."""

    def function(x, w, v):
        large, small = tf.gradients(tf.tanh(x @ w) @ v, [w, v])
        return large / 3, small

    given = rows(-1, 600), same(600, 700), same(700, 1)
    program = check(function, *given, gather_ratio=ratio)
    assert kinds(program)["gather"] == (2 if ratio else 0)
    assert kinds(program)["sum"] == (1 if ratio else 2)
    assert not once(program)


def test_rounding_happens_after_the_sum():
    def function(x):
        return tf.cast(tf.reduce_sum(x), tf.float16)

    program = check(function, rows(-1, low=0, high=0.01))
    (exchange,) = program.exchanges
    assert exchange.given.dtype == tf.float32


def test_a_mean_of_halves_may_have_a_large_sum():
    def function(x):
        return tf.reduce_mean(x)

    given = rows(-1, 4000, dtype="float16", low=20, high=30)
    check(function, given, tolerance=2e-3)


@pytest.mark.parametrize("times", [(1, 4), (4, 1), (4, 4)])
def test_a_size_that_is_one_in_some_batches_is_repeated(times):
    """Sizes that are not known while it is traced, such as of padded texts."""

    def function(x, y):
        both = x + y
        flat = tf.reshape(both, [tf.shape(both)[0] * tf.shape(both)[1], 3])
        loss = tf.reduce_sum(flat**2 * tf.cast(tf.shape(both)[1], tf.float32))
        return loss, tf.gradients(loss, [x, y])

    given = [rows(-1, time, 3, hidden=(1,)) for time in times]
    check(function, *given)
