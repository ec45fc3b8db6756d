"""A step is traced once for all towers, unless another's might differ."""

import random
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.capture import checks, sharing
from keras_towers.fit.context import tower as tower_lib
from tests.exactness import models as m
from tests.fit.step.acts import Acts, Both, Stepping, Twice, shown
from tests.kit.compare import assert_exact, same_history, same_model
from tests.kit.long import some_of
from tests.kit.training import X, Y, classifier, fit


def traced(act=tf.identity):
    """A layer, and a list with an entry for each trace of it by a tower."""
    traces = []

    def call(x):
        if tower_lib.current() is not None:
            traces.append(None)
        return act(x)

    return Acts(call), traces


@pytest.fixture
def reasons(logged):
    """Why steps were traced by every tower."""
    start = "because it "
    return lambda: [said.partition(start)[2] for _, said in logged(start)]


def _refused(*_):
    raise checks.CannotShare("is not to be shared")


def test_one_trace_is_the_same_as_those_of_all_towers(reasons, monkeypatch):
    def trained():
        # Initializers take a seed when they are made.
        keras.utils.set_random_seed(1)
        layer, traces = traced()
        model = classifier(
            layer,
            keras.layers.Dense(6, use_bias=False, kernel_regularizer="l2"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3, seed=3),
        )
        with kt.TowerStrategy(4):
            history = fit(model)
        return model, history, len(traces)

    one, found, traces = trained()
    assert reasons() == [] and traces == 1
    # As on accelerators, whose towers inline the trace.
    with monkeypatch.context() as patch:
        on_accelerators = mock.Mock(**{"all_on_host.return_value": False})
        patch.setattr(sharing, "devices", on_accelerators)
        inlined, history, traces = trained()
    assert reasons() == [] and traces == 1
    same_history(history, found)
    same_model(inlined, one)
    monkeypatch.setattr(checks, "check_parts", _refused)
    each, wanted, traces = trained()
    # And one that is analysed.
    assert traces == 5
    same_history(found, wanted)
    same_model(one, each)


def _placed(x):
    with tf.device("GPU:0"):
        return x + 1


def _scaled_by_id(x):
    context = tf.distribute.get_replica_context()
    index = tf.cast(context.replica_id_in_sync_group, x.dtype)
    return x * (1 + index)


@pytest.mark.parametrize(
    "act, reason",
    [
        (_scaled_by_id, "asks which tower it runs on"),
        (shown, "has effects"),
        (_placed, "puts "),
    ],
)
def test_traces_of_all_towers_where_they_may_differ(act, reason, reasons):
    layer, traces = traced(act)
    model = classifier(layer)
    with kt.TowerStrategy(2):
        fit(model, x=X[:16], y=Y[:16])
    (why,) = reasons()
    assert why.startswith(reason)
    assert len(traces) >= 2


def test_a_first_write(reasons):
    """From then on towers have components, and one trace will do."""
    counter = tf.Variable(0.0, trainable=False)

    def act(x):
        counter.assign_add(1.0)
        return x

    layer, traces = traced(act)
    model = classifier(layer)
    with kt.TowerStrategy(3):
        fit(model)
    assert reasons() == ["writes a variable that the towers had in common"]
    assert len(traces) == 5


class Iterates(Stepping):
    def update(self, grads, variables):
        super().update(grads, iter(variables))


class Keeps(Stepping):
    def update(self, grads, variables):
        super().update(grads, variables)
        self.latest = grads[0]


class Steps(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.01


def stepping(cls, rate=0.01):
    inner = m.mlp()
    model = cls(*inner.inputs, *inner.outputs)
    model.compile(keras.optimizers.SGD(rate))
    if cls is Both:
        model.optimizer.build(model.trainable_weights)
    return model


@pytest.mark.parametrize(
    "cls, rate, wanted",
    some_of(
        [
            (Iterates, 0.01, []),
            (Both, 0.01, []),
            (Twice, 0.01, ["uses variables after its update"]),
            (Keeps, 0.01, ["keeps tensors in attributes"]),
            (
                *(Stepping, Steps()),
                ["updates weights by Steps, which is not Keras's"],
            ),
        ]
    ),
)
def test_custom_steps(cls, rate, wanted, reasons):
    assert_exact(lambda: stepping(cls, rate), fit, kt.TowerStrategy(3))
    assert reasons() == wanted


@pytest.mark.parametrize(
    "inside",
    [
        lambda x, update: tf.cond(tf.size(x) > 0, update, lambda: 0.0),
        lambda x, update: tf.function(update)(),
    ],
    ids=["cond", "function"],
)
def test_an_update_in_a_nested_graph_is_refused(inside, reasons):
    class Nested(Stepping):
        def update(self, grads, variables):
            def update():
                # Behind many other operations.
                total = tf.add_n([tf.norm(grads[0]) for _ in range(40)])
                super(Nested, self).update(grads, variables)
                return total

            inside(grads[0], update)

    model = stepping(Nested)
    before = model.get_weights()
    with (
        pytest.raises(kt.TowerError, match="tf.cond.*outside"),
        kt.TowerStrategy(2),
    ):
        fit(model)
    assert reasons() == ["applies gradients in control flow or a function"]
    for found, wanted in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_trace_that_is_dropped_draws_nothing(reasons):
    drawn = []

    def act(x):
        drawn.append((random.random(), np.random.rand()))
        return shown(x)

    model = classifier(Acts(act))
    with kt.TowerStrategy(2):
        fit(model)
    assert len(reasons()) == 1
    dropped, first, second = drawn[-3:]
    # What they draw while they are traced is the same on all towers.
    assert dropped == first == second
