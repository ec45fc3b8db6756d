"""Asynchronous towers: logs, metrics and staleness are those of all steps."""

import functools
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import assert_close, assert_same_history
from tests.kit.training import STEPS, X, Y, fit, linear
from tests.strategies import async_cases as cases


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
        assert_same_history(weighted(model), wanted)


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
    assert_same_history(
        last, {name: values[-1] for name, values in history.items()}
    )


@pytest.mark.parametrize("eagerly", [False, True])
def test_logs_that_are_no_metrics(eagerly):
    """Neither is one under the name of a metric that counts nothing."""
    model = m.OwnLog()
    model.compile("sgd", run_eagerly=eagerly)
    with kt.AsyncTowerStrategy(2) as strategy:
        history = fit(model, epochs=2)
    assert "eager steps as on one device" in strategy.describe()
    assert strategy.staleness.steps == (0 if eagerly else STEPS)
    assert int(model.optimizer.iterations) == 2 * STEPS
    assert history.keys() == {"loss", "this_batch", "double"}
    own = np.array(history["this_batch"])
    assert (own > 0).all()
    assert_close(2 * own, history["double"])


def test_a_slow_tower_holds_nobody_and_is_stale(tmp_path):
    seen = []
    layer = cases.Late(20)
    model = linear(layer, metrics=["accuracy"])
    with kt.AsyncTowerStrategy(3) as strategy:
        assert (strategy.staleness.mean, strategy.staleness.max) == (0, 0)
        look = cases.callback(
            on_epoch_end=lambda *_: seen.append(strategy.staleness)
        )
        board = keras.callbacks.TensorBoard(tmp_path)
        history = cases.endless(model, 40, epochs=2, callbacks=[look, board])
    assert layer.held_nobody
    assert len(layer.begun) == int(model.optimizer.iterations) == 80
    for found in seen:
        assert found.steps == sum(found.histogram.values()) == 40
        values = np.repeat([*found.histogram], [*found.histogram.values()])
        assert found.mean == pytest.approx(values.mean())
        assert str(found) == (
            f"mean {values.mean():.2f}, max {values.max()} over 40 steps"
        )
    # Two of those that had begun may not have ended.
    assert 18 <= seen[0].max < 40
    # History is that of the model, with names as on one device.
    assert history.keys() == {"loss", "accuracy"}
    there = cases.written(tmp_path)
    for epoch in (0, 1):
        for name in ("mean", "max"):
            value = there[f"epoch_staleness_{name}", epoch]
            assert_close(value, getattr(seen[epoch], name))
        assert ("staleness", epoch) in there
