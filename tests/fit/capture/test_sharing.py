"""A step is traced once for all towers, unless another's might differ."""

import functools
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
from tests.fit.step.acts import Acts, Both, Own, Twice, shown
from tests.kit.compare import assert_same, outcome, same_history, same_model
from tests.kit.long import some_of
from tests.kit.training import X, Y, classifier, fit

_traces: dict[str, int] = {}


class Traced(Acts):
    """Counts how often a tower traces it."""

    def __init__(self, act=tf.identity):
        super().__init__(act)
        # Attributes are put back to what they would be on one device.
        _traces[self.name] = 0

    @property
    def traces(self):
        return _traces[self.name]

    def call(self, x):
        if tower_lib.current() is not None:
            _traces[self.name] += 1
        return super().call(x)


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
        model = classifier(
            traced := Traced(),
            keras.layers.Dense(6, use_bias=False, kernel_regularizer="l2"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3, seed=3),
        )
        with kt.TowerStrategy(4):
            history = fit(model)
        return model, history, traced.traces

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
    layer = Traced(act)
    model = classifier(layer)
    with kt.TowerStrategy(2):
        fit(model, x=X[:16], y=Y[:16])
    (why,) = reasons()
    assert why.startswith(reason)
    assert layer.traces >= 2


def test_a_first_write(reasons):
    """From then on towers have components, and one trace will do."""
    counter = tf.Variable(0.0, trainable=False)

    def act(x):
        counter.assign_add(1.0)
        return x

    layer = Traced(act)
    model = classifier(layer)
    with kt.TowerStrategy(3):
        fit(model)
    assert reasons() == ["writes a variable that the towers had in common"]
    assert layer.traces == 5


class Iterates(Own):
    def way(self, grads, weights):
        super().way(grads, iter(weights))


class Keeps(Own):
    def way(self, grads, weights):
        super().way(grads, weights)
        self.latest = grads[0]


class Steps(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.01


def stepping(cls, rate=0.01):
    keras.utils.set_random_seed(1)
    inner = m.mlp()
    model = cls(inner.inputs, inner.outputs)
    model.compile(keras.optimizers.SGD(rate), m.cross_entropy())
    if cls is Both:
        model.optimizer.build(model.trainable_weights)
    return model


@functools.cache
def on_one_device(cls, rate):
    return outcome(lambda: stepping(cls, rate), fit, in_graph=False)


@pytest.mark.parametrize(
    "cls, rate, wanted",
    some_of(
        [
            (Iterates, 0.01, []),
            (Both, 0.01, []),
            (Twice, 0.01, ["uses variables after its update"]),
            (Keeps, 0.01, ["keeps tensors in attributes"]),
            (Own, Steps(), ["updates weights by Steps, which is not Keras's"]),
        ]
    ),
)
def test_custom_steps(cls, rate, wanted, reasons):
    found = outcome(lambda: stepping(cls, rate), fit, kt.TowerStrategy(3))
    # The others update as `Own` does.
    own = cls if cls in (Both, Twice) else Own
    assert_same(found, on_one_device(own, rate))
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
    class Nested(Own):
        def way(self, grads, weights):
            def update():
                # Behind many other operations.
                total = tf.add_n([tf.norm(grads[0]) for _ in range(40)])
                super(Nested, self).way(grads, weights)
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
