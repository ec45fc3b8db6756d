"""What ``describe()`` says of the steps that ran."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.step.reports import step_costs
from keras_towers.fit.step.reports.step_reports import planned_memory
from keras_towers.foundation.byte_sizes import format_bytes
from keras_towers.partition import partition_graph
from keras_towers.partition.ir.axes import AT_ROOT, BATCH, SHARDS, TOWERS
from keras_towers.partition.ir.layouts import InShards, Sharded
from keras_towers.partition.layout.conversions import LayoutOptions
from tests.kit.meshes import on_a_mesh
from tests.partition.kit import earliest

pytestmark = pytest.mark.alternate

X = np.random.default_rng(0).normal(size=(12, 5)).astype("float32")
Y = X[:, :3]


def costs(function, *shapes, towers=2, senders=None):
    """The costs of a function of rows without updates."""
    specs = [tf.TensorSpec(shape, tf.float32) for shape in shapes]
    graph = tf.function(function).get_concrete_function(*specs).graph
    layouts = [Sharded(0) for _ in shapes]
    program = partition_graph(graph, layouts, graph.outputs)
    return step_costs.costs_of(earliest(program), towers, senders)


def steps_of(strategy):
    """The lines of ``describe()`` about steps, but for what is once."""
    lines = [line.strip() for line in strategy.describe().splitlines()]
    return [line for line in lines if " of '" in line]


def standardized(x):
    mean = tf.reduce_mean(x, 0)
    return tf.reduce_mean((x - mean) ** 2, 0), tf.reduce_sum(x)


@pytest.mark.parametrize(
    ("function", "shape", "summary"),
    [
        # Rows that are gathered.
        (lambda x: 2 * x, (None, 5), "1 exchange in 1 round, 20 bytes x N"),
        (lambda x: 2 * x, (6, 500), "1 exchange in 1 round, 12 KB"),
        # Every example has two rows, in two blocks.
        (lambda x: tf.concat([x, x], 0) * 2, (None, 5), ", 40 bytes x N"),
        # Sentences are as long as the longest one of a batch.
        (lambda x: 2 * x, (None, None, 5), ", 20 bytes x N x length"),
        (lambda x: tf.reduce_sum(x, 0), (None, None, 5), "20 bytes x length"),
        (lambda x: tf.reshape(x, (-1, 2)), (None, 6), ", 24 bytes x N"),
        (lambda x: tf.reduce_sum(x, 0), (None, 5), "in 1 round, 20 bytes"),
        # A sum needs the mean, of which there are as many.
        (standardized, (None, 5), "3 exchanges in 2 rounds, 44 bytes"),
        (lambda x: tf.ones([]), (None, 5), "0 exchanges in 0 rounds, 0 bytes"),
        # The entries of a batch decide.
        (
            lambda x: tf.boolean_mask(x, x[:, 0] > 0),
            (None, 5),
            ", bytes that depend on the data",
        ),
        (
            lambda x: (tf.boolean_mask(x, x[:, 0] > 0), tf.reduce_sum(x)),
            (None, 5),
            ", 4 bytes + bytes that depend on the data",
        ),
        # Of two towers, and of another length than the input.
        (lambda x: tf.reduce_max(x, 0), (None, None, 5), "40 bytes x length"),
        (lambda x: x[:, ::2], (None, None, 5), ", 20 bytes x N x length"),
    ],
)
def test_exchanges(function, shape, summary):
    found = costs(function, shape)
    assert found.exchange_summary.endswith(summary)


def test_ranks_send_sums_twice_and_rows_once_but_for_their_share():
    def both(x):
        return 2 * x, tf.reduce_sum(x, 0)

    found = costs(both, (None, 6), towers=6, senders=3)
    assert found.exchange_summary.endswith(", 24 bytes + 24 bytes x N")
    assert found.sent_summary == "32 bytes + 16 bytes x N"


def test_shards_within_a_process_are_gathered_there():
    """Of four ranks of two towers: their sums of its rows go over ranks."""
    weight, rows = tf.Variable(tf.ones((8, 6))), InShards(0, 8, 4)

    @tf.function(input_signature=[tf.TensorSpec((None, 8))])
    def step(x):
        y = x @ weight
        gradient = tf.matmul(x, y, transpose_a=True)
        (own,) = tf.raw_ops.IdentityN(input=[gradient], name="gradient")
        weight.assign_sub(own)
        return tf.reduce_sum(y)

    graph = step.get_concrete_function().graph
    program = partition_graph(
        graph,
        [Sharded(0), rows],
        graph.outputs,
        {"gradient": [rows]},
        options=LayoutOptions(axes=SHARDS, shard_axes=TOWERS),
    )
    sums = [e.over for e in program.exchanges if e.gradient == "gradient:0"]
    assert sums == [BATCH - AT_ROOT, AT_ROOT]
    found = {(e.kind, e.over) for e in program.exchanges}
    assert found == {
        ("gather", TOWERS),
        ("scatter", BATCH - AT_ROOT),
        ("sum", AT_ROOT),
        ("sum", BATCH),
    }
    costs = step_costs.costs_of(earliest(program), 8, senders=4)
    sent = costs.sent_summary
    assert sent == f"{2 * 3 * (8 * 6 * 4 + 4) // 4} bytes"
    # Of the weight, once gathered and twice in its gradient, and of the sum.
    assert costs.axes_summary == (
        "192 bytes over ranks, 384 bytes over towers, "
        "4 bytes over towers and ranks"
    )


def centered(x):
    x = tf.matmul(x, tf.ones((5, 3)))
    return tf.reduce_sum((x - tf.reduce_mean(x)) ** 2)


@pytest.mark.parametrize(
    ("function", "shape", "summary"),
    [
        (lambda x: tf.reduce_sum(x, 0), (None, 5), ""),
        (centered, (None, 5), "12 bytes per example"),
        (centered, (None, 7, 5), "84 bytes per example"),
        (centered, (None, None, 5), "12 bytes x length per example"),
        (
            lambda x: centered(x) + centered(x[:, 0]),
            (None, None, 5),
            "12 bytes + 12 bytes x length per example",
        ),
    ],
)
def test_what_micro_batches_hold(function, shape, summary):
    assert costs(function, shape).held_summary == summary


class Median(keras.layers.Layer):
    """Subtracts the median of each feature."""

    def call(self, x):
        return x - keras.ops.quantile(x, 0.5, axis=0, keepdims=True)


class Ranked(keras.Model):
    """Its loss depends on the order of the predictions."""

    def __init__(self):
        super().__init__(name="ranked")
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        ranked = tf.sort(y_pred[:, 0])
        return tf.reduce_mean(ranked * tf.range(0.0, 1, 1 / len(X)))


def test_describe_lists_the_exchanges_of_each_kind_of_step(logged):
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(3)], name="plain"
    )
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(5)
    with kt.TowerStrategy(2) as strategy:
        assert steps_of(strategy) == []
        model.fit(data, verbose=0)
        model.evaluate(data, verbose=0)
        model.predict(data, verbose=0)
    training, evaluation, prediction = steps_of(strategy)
    # The gradients of 18 weights, and the loss.
    assert training == ("training of 'plain': 3 exchanges in 1 round, 76 bytes")
    assert evaluation == (
        "evaluation of 'plain': 1 exchange in 1 round, 4 bytes"
    )
    assert prediction == (
        "prediction of 'plain': 1 exchange in 1 round, 12 bytes x N"
    )
    assert not logged("once")


def test_operations_computed_once_are_logged_once(logged):
    model = Ranked()
    model.compile("sgd")
    for _ in range(2):
        with kt.TowerStrategy(2) as strategy:
            model.fit(X, Y, len(X), verbose=0)
    ((level, line),) = logged("once")
    assert level == "INFO"
    start = "training of 'ranked': computed once for all towers: test_step_"
    assert line.startswith(start)
    why = "(TopKV2 needs all rows; "
    assert f"ranked = tf.sort(y_pred[:, 0]) {why}" in line
    assert line in steps_of(strategy)


@pytest.mark.parametrize("as_arrays", [True, False])
def test_few_rows_are_exchanged_instead_of_a_large_gradient(as_arrays):
    """Towers that share memory do so if it is less, as the batch size says.

    A step is divided anew for much larger batches.
    """
    x = np.zeros((256, 160), "float32")
    layer = keras.layers.Dense(160, use_bias=False)
    model = keras.Sequential([keras.Input((160,)), layer])
    model.compile("sgd", "mse")
    strategy, sums_gradients = kt.TowerStrategy(2), []
    with strategy:
        for batch in (16, 32, 256):
            data = tf.data.Dataset.from_tensor_slices((x, x)).batch(batch)
            arrays = {"x": x, "y": x, "batch_size": batch}
            model.fit(**(arrays if as_arrays else {"x": data}), verbose=0)
            sums_gradients.append("102 KB" in steps_of(strategy)[0])
    assert sums_gradients == [False, False, True]


@pytest.mark.parametrize("rows", [6, None])
def test_what_is_little_is_announced_only_where_it_grows(rows):
    def function(x):
        best = tf.math.top_k(x[:, 0], 3).values
        for _ in range(200):
            x = 2 * x
        return x, tf.reduce_sum(best)

    found = costs(function, (rows, 5))
    assert any("tf.math.top_k(x[:, 0], 3)" in line for line in found.once)
    assert sum(once.share for once in found.once.values()) < 0.02
    assert bool(found.announcement) == (rows is None)


@pytest.mark.parametrize(
    ("differentiated", "share"), [(False, 1 / 2), (True, 3 / 4)]
)
def test_a_share_counts_all_rounds_of_a_loop(differentiated, share):
    """Also of the backward pass, in which it multiplies twice."""

    def function(x, w):
        for _ in range(20):
            x = tf.sin(x @ w)
        y = tf.while_loop(
            lambda k, _: k < 20, lambda k, y: (k + 1, tf.sort(y, 0) @ w), (0, x)
        )[1]
        if not differentiated:
            return x, y
        return x, tf.gradients(tf.reduce_sum(y), [x])

    found = costs(function, (1000, 5000), (5000, 5000))
    total = sum(once.share for once in found.once.values())
    assert total == pytest.approx(share, abs=0.05)


def test_each_operation_counts_once_on_a_mesh(logged):
    """There several operations of a program stand for a traced one."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(6, name=f"dense{k}") for k in range(2)]
    model = keras.Sequential([keras.Input((5,)), Median(), *layers])
    model.compile("sgd", "mse")
    found = []
    for strategy in (kt.TowerStrategy(2), on_a_mesh(model.variables, 1)):
        with strategy:
            model.evaluate(X, X[:, :1], verbose=0)
        said = re.findall(r"([\d.]+)% of the step", strategy.describe())
        found.append(sum(map(float, said)))
    towers, mesh = found
    assert 10 < towers < 90
    assert mesh == pytest.approx(towers, rel=0.05)


def test_without_a_line_of_the_user_the_function_of_keras_is_named():
    class Sorted(keras.layers.Layer):
        def call(self, x):
            return x + tf.cumsum(tf.sort(x, 0), 0)

    model = keras.Sequential([keras.layers.Dense(4), Sorted()])
    model.compile("sgd", keras.losses.CTC(), jit_compile=False)
    x, y = np.ones((8, 5, 3), "float32"), np.ones((8, 2), "int32")
    with kt.TowerStrategy(2) as strategy:
        model.fit(x, y, verbose=0)
    said = strategy.describe()
    assert "ctc_loss_dense, in ctc() of Keras's losses.py (" in said
    assert "once for all towers: test_step_costs.py:" in said


def test_what_follows_is_put_down_to_its_cause():
    def loss(x):
        order = tf.argsort(x[:, 0])[::2]
        found = tf.boolean_mask(tf.gather(x, order), order >= 0)
        return tf.reduce_mean(tf.nn.relu(found) ** 2)

    found = costs(loss, (None, 3))
    (line,) = found.once
    assert line.endswith("order = tf.argsort(x[:, 0])[::2]")
    # Who mends the first is to know of the others.
    (said,) = found.once_summary
    assert said.endswith("return tf.reduce_mean(tf.nn.relu(found) ** 2))")
    mask = "found = tf.boolean_mask(tf.gather(x, order), order >= 0)"
    assert re.search(rf"step, with what follows: \S+ {re.escape(mask)}; ", said)


def test_many_lines_that_follow_are_counted():
    def function(x):
        for number in range(2):
            x = tf.sort(x, axis=0)[::2]
            x = tf.cumsum(x, axis=0)
            x = x * 2
            x = x + number
            x = x / 3
            x = x - 4
            x = x * 5
        return x

    (said,) = costs(function, (None, 3)).once_summary
    assert said.endswith("x = x / 3 and 2 more)")


def test_planned_memory_is_that_of_all_towers_on_a_host():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4000)])
    model.compile("adam", "mse")
    strategy = kt.TowerStrategy(2)
    with strategy:
        assert "planned memory" not in strategy.describe()
        y = np.zeros((12, 4000), "float32")
        model.fit(X, y, batch_size=12, verbose=0)
        variables = [*model.variables, *model.optimizer.variables]
        planned = planned_memory(strategy)
        held = sum(
            int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size for v in variables
        )
        assert planned["variables"] == held
        # The labels and outputs of all examples, and much less besides.
        rows = 12 * 4000 * 4
        assert 2 * rows <= planned["a step"] < 4 * rows
        total = format_bytes(sum(planned.values()))
        said = f"planned memory of this process: {total} ("
        assert said in strategy.describe()
