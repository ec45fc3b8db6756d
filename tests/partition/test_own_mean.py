"""Means over the rows of a tower, against numpy."""

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.partition import partition_graph
from keras_towers.partition.layouts import REPLICATED, Sharded
from keras_towers.partition.rules.means import own_mean
from tests.partition.kit import kinds, on_towers, once, rows, same, traced

COUNTS = (3, 0, 2)
X = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)


def of_towers(x, counts=COUNTS):
    """What numpy makes of the rows of each tower."""
    ends = np.cumsum(counts)[:-1]
    return np.concatenate(
        [
            np.broadcast_to(part.mean(0, keepdims=True), part.shape)
            for part in np.split(x, ends)
            if len(part)
        ]
    )


def run(function, *given):
    """Run a function of rows and weights over towers; return its results."""
    graph = traced(function, *given)
    layouts = [
        REPLICATED if g.layout == REPLICATED else Sharded(0) for g in given
    ]
    if not any(isinstance(layout, Sharded) for layout in layouts):
        layouts[0] = Sharded(0)
    program = partition_graph(graph, layouts, graph.outputs)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        parts = [np.split(X, np.cumsum(COUNTS)[:-1]), [W]][: len(given)]
        return program, session.run(on_towers(program, parts, COUNTS))


@pytest.mark.parametrize("given", [rows(-1, 4), same(5, 4)])
def test_a_tower_has_the_mean_of_its_own_rows(given):
    """The trace may know the number of rows, too."""
    program, (found,) = run(own_mean, given)
    np.testing.assert_allclose(found, of_towers(X), atol=1e-6)
    assert kinds(program) == {"gather": 1}
    assert not once(program)


def test_its_gradient_is_the_mean_of_the_gradients():
    def function(x, w):
        y = tf.square(own_mean(x @ w))
        apart = tf.square(x @ w - own_mean(x @ w))
        loss = tf.reduce_sum(y * tf.tanh(x[:, :3])) + tf.reduce_sum(apart)
        return loss, tf.gradients(loss, [x, w])

    program, (_, of_x, of_w) = run(function, rows(-1, 4), same(4, 3))
    y, gate = X @ W, np.tanh(X[:, :3])
    mean = of_towers(y)
    of_y = of_towers(2 * mean * gate) + 2 * (y - mean)
    own = of_y @ W.T
    own[:, :3] += mean**2 * (1 - gate**2)
    np.testing.assert_allclose(of_x, own, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(of_w, X.T @ of_y, rtol=1e-4, atol=1e-5)
    assert not once(program)
    assert kinds(program) == {"gather": 1, "sum": 2}


def test_what_is_no_tower_s_row_is_computed_as_on_one_device():
    def function(x, w):
        return own_mean(tf.transpose(x)), own_mean(w), own_mean(x[::-1])

    _, (turned, weights, back) = run(function, rows(-1, 4), same(4, 3))
    for found, right in ((turned, X.T), (weights, W), (back, X[::-1])):
        np.testing.assert_allclose(
            found, of_towers(right, [len(right)]), atol=1e-6
        )


def test_one_device_has_the_mean_of_all():
    found = own_mean(tf.constant(X))
    np.testing.assert_allclose(found, of_towers(X, [5]), atol=1e-6)
