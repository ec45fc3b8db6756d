"""Programs of processes that exchange nothing within a step."""

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.partition import partition_graph
from keras_towers.partition.ir.layouts import MIRRORED, REPLICATED, Sharded
from keras_towers.partition.timeline.local_step import to_local_step
from tests.partition.kit import (
    earliest,
    on_towers,
    replicated,
    sharded,
    trace,
)
from tests.partition.order import check_order

COUNTS = 3, 2, 0
X = np.random.default_rng(0).normal(size=(sum(COUNTS), 3)).astype("float32")
W = np.random.default_rng(1).normal(size=(3, 2)).astype("float32")


def _squares(x, w):
    return tf.reduce_sum((x @ w - 1) ** 2, 1)


def _mean(x, w):
    return tf.reduce_mean(_squares(x, w))


def _sum(x, w):
    return tf.reduce_sum(_squares(x, w))


def _dropped_and_regularized(x, w):
    kept = tf.random.stateless_uniform(tf.shape(x), [1, 2]) < 0.5
    x = tf.where(kept, x, 0.0)
    return _mean(x, w) + tf.reduce_sum(w**2)


def _of_statistics(x, w):
    y = x @ w
    return tf.reduce_mean((y - tf.reduce_mean(y, 0)) ** 2)


def _gradient(loss, x):
    w = tf.Variable(W)
    with tf.GradientTape() as tape:
        found = loss(tf.constant(x), w)
    return found, tape.gradient(found, w)


def _on_processes(loss, variable=None, mirrored=False, by_update=False):
    """The loss, the gradient and a variable, after a step of each process.

    Args:
        loss: a function of rows and weights.
        variable: a variable that the step writes.
        mirrored: whether each tower has a copy of it.
        by_update: whether an optimizer's update writes it.
    """

    def step(x, w):
        found = loss(x, w)
        gradients = tf.gradients(found, w)
        mean, largest = tf.reduce_mean(x), tf.reduce_max(x)
        gradients += [mean, largest]
        gradient, *numbers = tf.raw_ops.IdentityN(
            input=gradients, name="handed"
        )
        if by_update:
            # Towers have what is handed over to an update.
            mean, largest = numbers
        if variable is not None:
            with tf.name_scope("writes"):
                variable.assign(0.0 * variable + mean)
                variable.assign_add(0.0 * variable + largest)
        return found, gradient

    graph = trace(step, sharded(-1, 3), replicated(3, 2))
    captured = [outside for outside, _ in graph.captures]
    of_captures = MIRRORED if mirrored else REPLICATED
    layouts = [Sharded(0), REPLICATED, *[of_captures] * len(captured)]
    names = [operation.name for operation in graph.get_operations()]
    writes = [name for name in names if name.startswith("writes/")]
    program = partition_graph(
        graph,
        layouts,
        graph.outputs,
        {"handed": [REPLICATED] * 3},
        dict.fromkeys(writes if by_update else [], ""),
    )
    mine = to_local_step(program, {"handed": program.results[1:]})
    check_order(earliest(mine.program))

    @tf.function(autograph=False)
    def run(start, count, first):
        more = [
            (mine.joint_inputs.start, start),
            (mine.joint_inputs.total, len(X)),
            (mine.joint_inputs.is_first, first),
            (mine.program.inputs.has_rows, count > 0),
        ]
        parts = [[X[start : start + count]], [W], *([c] for c in captured)]
        program = mine.program
        copies = {index: [captured[0]] for index in program.inputs.copies}
        options = {"more": more, "copies": copies}
        return tuple(on_towers(program, parts, (count,), **options))

    starts = np.cumsum([0, *COUNTS[:-1]]).tolist()
    found = []
    for start, count in zip(starts, COUNTS, strict=True):
        results = run(start, count, start == 0)
        found.append((*results, variable and variable.numpy()))
    return mine.parts == {"handed"}, found


@pytest.mark.parametrize("loss", [_mean, _sum, _dropped_and_regularized])
def test_gradients_of_all_processes_add_up_to_those_of_the_batch(loss):
    are_parts, found = _on_processes(loss)
    assert are_parts
    _, wanted = _gradient(loss, X)
    np.testing.assert_allclose(
        np.sum([part for _, part, _ in found], 0), wanted, rtol=1e-5
    )


@pytest.mark.parametrize("loss", [_mean, _sum, _of_statistics])
def test_losses_are_those_of_a_process_s_rows(loss):
    _, ((first, *_), (second, *_), _) = _on_processes(loss)
    for value, own in ((first, X[:3]), (second, X[3:])):
        np.testing.assert_allclose(value, _gradient(loss, own)[0], rtol=1e-5)


def test_batch_statistics_are_those_of_a_process_s_rows():
    are_parts, found = _on_processes(_of_statistics)
    assert not are_parts
    np.testing.assert_allclose(
        found[0][1], _gradient(_of_statistics, X[:3])[1], rtol=1e-5
    )


@pytest.mark.parametrize(
    ("mirrored", "by_update"), [(False, False), (True, False), (True, True)]
)
def test_a_process_without_rows_writes_nothing(mirrored, by_update):
    variable = tf.Variable(7.0)
    _, found = _on_processes(_mean, variable, mirrored, by_update)
    own = [float(X[a:b].mean() + X[a:b].max()) for a, b in ((0, 3), (3, 5))]
    written = [float(value) for _, _, value in found]
    np.testing.assert_allclose(written, [*own, own[1]], rtol=1e-5)
