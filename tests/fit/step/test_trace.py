"""A step as one device does it, traced once, with what stands for updates."""

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.step.trace import trace, with_components
from tests.kit.training import linear

ROWS = tf.TensorSpec([None, 6])


def traced(step, batch=ROWS, kind="fit"):
    strategy = kt.TowerStrategy(2)
    with strategy:
        update = strategy._components.update
        return trace(step, batch, kind, update.make_ready)


def types_in(graph):
    return [operation.type for operation in graph.get_operations()]


def gradients(model, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x) ** 2)
    return loss, tape.gradient(loss, model.trainable_variables)


def test_updates_are_noted_and_python_runs_once():
    model, runs = linear(), []
    model.optimizer.build(model.trainable_variables)

    def step(x):
        runs.append(kt.current_tower())
        loss, grads = gradients(model, x)
        for _ in range(2):
            model.optimizer.apply(grads, model.trainable_variables)
        return {"loss": loss, "none": None}

    found = traced(step)
    (tower,) = runs
    assert (tower.index, tower.total, tower.training) == (0, 1, True)
    assert not any(t.startswith("Assign") for t in types_in(found.graph))
    calls = found.updates.values()
    assert [call.optimizer for call in calls] == 2 * [model.optimizer]
    for name, updating in found.update_infos().items():
        operation = found.graph.get_operation_by_name(name)
        assert len(operation.inputs) == 2
        # The weights: of the optimizer's own the step has read none.
        assert len(updating.uses) == len(found.captures) == 2
    (result,) = found.results
    assert result.shape == ()
    assert found.output_with([7]) == {"loss": 7, "none": None}


def test_gradients_come_back_as_they_were():
    layer = keras.layers.Embedding(5, 2)
    unused = keras.Variable(1.0)
    layer.build()
    optimizer = keras.optimizers.SGD()
    weights = [layer.embeddings, unused, keras.Variable([1.0, 2.0])]

    def step(x):
        with tf.GradientTape() as tape:
            found = tf.gather(weights[0].value, tf.cast(x[:, 0], tf.int32))
            loss = tf.reduce_sum(found * weights[2].value)
        grads = tape.gradient(loss, [w.value for w in weights])
        optimizer.apply(grads, weights)

    found = traced(step)
    ((_, updating),) = found.update_infos().items()
    assert list(updating.sparse) == [(0, 1)]
    (call,) = found.updates.values()
    rows, none, dense = with_components(call, ["values", "indices", "dense"])
    assert (rows.values, rows.indices) == ("values", "indices")
    assert rows.dense_shape.numpy().tolist() == [5, 2]
    assert none is None and dense == "dense"
    # Of what all have as a whole, a tower has no part.
    assert with_components(call, [None, None, "dense"]) == [None, None, "dense"]


def test_what_is_known_only_when_it_is_called_is_refused():
    def step(x):
        graph = tf.compat.v1.get_default_graph()
        later = graph.capture_call_time_value(
            lambda: tf.constant(1.0), tf.TensorSpec([])
        )
        return x * later

    with pytest.raises(kt.TowerError, match="part of the batch"):
        traced(step)
