"""Asynchronous towers: metrics and logs are those of all steps."""

import functools
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.inspection.conformance import case_models as m
from keras_towers.replicas import tower_threads
from tests.kit import compare
from tests.kit.training import STEPS, X, Y, fit, linear
from tests.strategies import async_cases as cases

pytestmark = pytest.mark.alternate


def still(*first):
    """A classifier that does not learn, so that metrics can be compared."""
    rate = functools.partial(keras.optimizers.SGD, 0.0)
    return linear(*first, optimizer=rate, metrics=["accuracy"])


def test_metrics_are_exact_sums():
    def weighted(model):
        return fit(
            model,
            epochs=2,
            class_weight={0: 1.0, 1: 3.0, 2: 2.0},
            validation_data=(X, Y),
        )

    model, reference = still(), still()
    model.steps_per_execution = 3
    reference.run_eagerly = True
    wanted = weighted(reference)
    with kt.AsyncTowerStrategy(2):
        compare.assert_same_history(weighted(model), wanted)


class Slow(keras.metrics.Metric):
    """Counts batches; what it adds comes some time after it has read."""

    def __init__(self):
        super().__init__(name="slow")
        self.number = self.add_variable((), "zeros")

    def update_state(self, *args, **kwargs):
        def one():
            time.sleep(0.01)
            return 1.0

        added = tf.ensure_shape(tf.py_function(one, [], "float32"), ())
        self.number.assign(self.number + added)

    def result(self):
        return self.number


def test_what_a_metric_assigns_is_not_lost():
    slow = Slow()
    model = linear(metrics=[slow])
    with kt.AsyncTowerStrategy(2):
        history = fit(model, epochs=3)
    assert history["slow"] == [STEPS] * 3
    assert int(slow.number) == STEPS


def test_callbacks_see_every_step_and_the_last_exactly():
    steps, begun, ahead, last = [], [], [], {}

    def slow(tower, values):
        begun.append(tower)
        # To be caught in the middle of the last steps.
        time.sleep(0.03)
        return values

    def note(batch, logs):
        steps.append(batch)
        ahead.append(len(steps) - len(begun))
        last.update(logs)

    with kt.AsyncTowerStrategy(2):
        history = fit(
            still(cases.Runs(slow)),
            2,
            np.tile(X, (4, 1)),
            np.tile(Y, 4),
            callbacks=[cases.callback(on_train_batch_end=note)],
        )
    assert steps == [*range(14)] * 2
    # One batch in each tower, and one that waits for it.
    assert max(ahead) <= 4
    compare.assert_same_history(
        last, {name: values[-1] for name, values in history.items()}
    )


class OwnLog(m.OwnStep):
    """A log of the step's own under the name of a metric without a state."""

    def __init__(self):
        super().__init__()
        self.unused = keras.metrics.Mean(name="this_batch")

    @property
    def metrics(self):
        return [self.mean_loss, self.unused]

    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "double": 2 * logs["this_batch"]}


@pytest.mark.parametrize("eagerly", [False, True])
def test_logs_that_are_no_metrics(eagerly):
    """Neither is one under the name of a metric that counts nothing."""
    model = OwnLog()
    model.compile("sgd", run_eagerly=eagerly)
    with kt.AsyncTowerStrategy(2) as strategy:
        history = fit(model, epochs=2)
    assert "eager steps as on one device" in strategy.describe()
    assert strategy.staleness.steps == (0 if eagerly else STEPS)
    assert int(model.optimizer.iterations) == 2 * STEPS
    assert history.keys() == {"loss", "this_batch", "double"}
    own = np.array(history["this_batch"])
    assert (own > 0).all()
    compare.assert_close(2 * own, history["double"])


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("source", ["dataset", "unknown length"])
def test_an_epoch_ends_with_the_logs_of_its_last_batch(
    source, size, monkeypatch
):
    """Also where another tower hands its logs over later."""

    def trained():
        keras.utils.set_random_seed(2)
        model = m.OwnStep()
        still = keras.optimizers.SGD(0.0)
        model.compile(still, steps_per_execution=size)
        make, _ = cases.SOURCES[source]
        return model.fit(**make(), verbose=0).history

    wanted = trained()
    (last,) = wanted["this_batch"]

    def late(logs):
        values = to_numpy(logs)
        if not np.isclose(values["this_batch"], last):
            time.sleep(0.1)
        return values

    to_numpy = tower_threads._to_numpy
    monkeypatch.setattr(tower_threads, "_to_numpy", late)
    with kt.AsyncTowerStrategy(2):
        found = trained()
    compare.assert_close(found["this_batch"], [last])
    if source == "dataset":
        compare.assert_close(found["loss"], wanted["loss"])
