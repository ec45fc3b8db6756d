"""A step as a function of its own, with traces made by hand."""

import gc
import weakref

import tensorflow as tf

from keras_towers.fit.step.graph.step_function import StepFunction


def test_a_function_has_the_results_of_the_step_and_no_graph():
    """Also the second call, with another batch, of a ragged result and none."""
    graphs, weight = [], tf.Variable(tf.constant(2.0))

    def add(batch):
        graphs.append(weakref.ref(tf.compat.v1.get_default_graph()))
        x, ragged = batch["x"], batch["ragged"]
        weight.assign_add(1.0)
        results = {"y": x * weight, "ragged": ragged + 1, "none": None}
        return results, tf.cond(x[0] > 1, lambda: x, lambda: -x)

    @tf.function
    def steps(first, second):
        function = StepFunction(add, first)
        results = [function(first), function(second)]
        assert results[0][0]["y"].shape == [2]
        assert results[0][0]["none"] is None
        return tf.nest.map_structure(
            lambda leaf: () if leaf is None else leaf, results
        )

    batches = [
        {"x": tf.constant([k, 1.0]), "ragged": tf.ragged.constant([[1], []])}
        for k in (1.0, 5.0)
    ]
    for before in (2.0, 4.0):
        (one, negative), (two, same) = steps(*batches)
        assert one["y"].numpy().tolist() == [before + 1] * 2
        assert two["y"].numpy().tolist() == [5 * (before + 2), before + 2]
        assert one["ragged"].to_list() == [[2], []]
        assert negative.numpy().tolist() == [-1, -1]
        assert same.numpy().tolist() == [5, 1]
    gc.collect()
    assert len(graphs) == 1 and graphs[0]() is None


def test_draws_without_a_seed_continue_the_count_of_the_graph():
    def add(batch):
        return batch + tf.random.uniform([])

    @tf.function
    def drawn():
        first, second = StepFunction(add, zero), StepFunction(add, zero)
        assert first.draws == second.draws == 1
        return first(zero), second(zero), tf.random.uniform([])

    zero = tf.constant(0.0)
    tf.random.set_seed(3)
    found = tf.stack(drawn()).numpy().tolist()

    @tf.function
    def expected():
        return [tf.random.uniform([]) for _ in range(3)]

    tf.random.set_seed(3)
    assert found == tf.stack(expected()).numpy().tolist()
