"""Replicas in one process: what counts, what is dropped, what is refused."""

import gc
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.foundation.errors import TowerError
from keras_towers.inspection.conformance import case_models as m
from keras_towers.inspection.conformance.outcomes import (
    Originals,
    assert_ordinary,
)
from tests.fit.step.acts import Twice
from tests.kit import compare
from tests.kit.leaving import Boom
from tests.kit.sampling import sample_of
from tests.kit.training import STEPS, X, Y, fit, linear
from tests.strategies import async_cases as cases

pytestmark = pytest.mark.alternate


def test_every_batch_is_averaged_once():
    model, aggregate = linear(steps_per_execution=2), 5
    total = 0
    with kt.SyncReplicasStrategy(
        replicas_to_aggregate=aggregate, total_num_replicas=2
    ) as strategy:

        def look(epochs, batches):
            counts = strategy.counts
            updates = -(-batches // aggregate)
            assert counts.updates == epochs * updates, source
            assert sum(counts.used) == epochs * batches, source
            assert counts.dropped == (0, 0), source

        for source in cases.SOURCES:
            batches = cases.fits(model, source, look) // 3
            total += 3 * -(-batches // aggregate)
            assert int(model.optimizer.iterations) == total, source


def test_a_late_gradient_is_dropped_and_told_of(tmp_path, caplog):
    """Nobody waits for it, and it reaches no weight."""
    caplog.set_level("INFO", "keras_towers")
    board = keras.callbacks.TensorBoard(tmp_path)
    layer = cases.Late(20, factor=float("nan"))
    model = linear(layer)
    with kt.SyncReplicasStrategy(
        replicas_to_aggregate=2, total_num_replicas=3
    ) as strategy:
        history = cases.endless(model, 40, epochs=2, callbacks=[board])
        counts = strategy.counts
    assert layer.held_nobody
    compare.assert_finite(model)
    used, dropped = np.array(counts.used), np.array(counts.dropped)
    assert dropped[layer.late] > 0
    np.testing.assert_array_equal(used + dropped, np.bincount(layer.begun))
    assert sum(used + dropped) == 80
    assert counts.updates == int(model.optimizer.iterations)
    assert f"SyncReplicasStrategy: {counts.updates} updates" in caplog.text
    told = history["dropped_gradients"]
    assert sum(told) == sum(dropped)
    board = cases.written(tmp_path)
    for epoch in (0, 1):
        assert board["epoch_dropped_gradients", epoch] == told[epoch]
        of_each = [
            board[f"dropped_gradients/replica_{replica}", epoch]
            for replica in range(3)
        ]
        assert sum(of_each) == told[epoch]


def test_a_step_does_not_change_within_a_fit():
    model, reference = linear(), linear()

    def change(epoch, logs):
        # Another model that contains it does not change it.
        keras.Sequential([model, keras.layers.Dense(2)]).predict(X, verbose=0)
        with pytest.raises(TowerError, match="one step for a whole fit"):
            model.make_train_function(force=True)

    watch = cases.callback(on_epoch_end=change)
    with kt.SyncReplicasStrategy(towers=2):
        fit(reference, epochs=3)
        fit(model, epochs=2, callbacks=[watch])
        model.make_train_function(force=True)
        fit(model)
    compare.assert_same_model(model, reference)


def test_shared_tokens():
    """Any replica may compute any gradient: a slow one computes less."""
    # More than half of an update's gradients are those of the other one.
    layer = cases.Late(8)
    model = linear(layer)
    with kt.SyncReplicasStrategy(
        replicas_to_aggregate=12, total_num_replicas=2, tokens="shared"
    ) as strategy:
        cases.endless(model, 36)
        counts = strategy.counts
    assert layer.held_nobody
    assert sum(counts.used) + sum(counts.dropped) == 36
    assert int(model.optimizer.iterations) == counts.updates


def test_a_replica_that_hangs_is_an_error():
    free = threading.Event()

    def hang(tower, values):
        if tower == 1:
            free.wait(60)
        return values

    model = linear(cases.Runs(hang))

    error = pytest.raises(TowerError, match=r"for 3 s: replicas \[1\] of 2")
    strategy = kt.SyncReplicasStrategy(towers=2, stall_timeout_s=3)
    try:
        with strategy, error:
            fit(model)
    finally:
        free.set()
        for thread in threading.enumerate():
            if thread.name.startswith("keras-towers-async"):
                thread.join(60)
    assert_ordinary(model)


# One replica has no others to wait for, but averages like several.
@pytest.mark.parametrize("towers", sample_of([1, 2]))
def test_moving_averages(towers):
    model = linear()
    wanted = [w.numpy() for w in model.trainable_variables]

    def update(*_):
        for index, new in enumerate(model.trainable_variables):
            wanted[index] = 0.9 * wanted[index] + 0.1 * new.numpy()

    def check():
        for weight, value in zip(model.weights, wanted, strict=True):
            compare.assert_close(strategy.average_of(weight), value)

    averages = tf.train.ExponentialMovingAverage(0.9)
    strategy = kt.SyncReplicasStrategy(
        towers=towers, variable_averages=averages
    )
    with pytest.raises(TowerError, match="no moving average of"):
        strategy.average_of(model.trainable_variables[0])
    with strategy:
        # One update an epoch.
        whole = {"x": X, "y": Y, "batch_size": -(-len(X) // towers)}
        watch = cases.callback(on_epoch_end=update)
        model.fit(**whole, epochs=2, verbose=0, callbacks=[watch])
        check()
        model.train_on_batch(X, Y)
        update()
        check()
    check()
    assert_ordinary(model)


def test_fits_of_several_models():
    """Gradients that were not averaged do not mix with those of later fits."""

    def leave(batch, logs):
        raise Boom

    first, second = linear(), linear()
    reference = linear(run_eagerly=True)
    originals = Originals(first)
    wanted = fit(reference, epochs=2)
    weights = first.get_weights()
    small = {"x": X, "y": Y, "batch_size": 8, "shuffle": False, "verbose": 0}
    with kt.SyncReplicasStrategy(towers=2) as strategy:
        with pytest.raises(Boom):
            fit(first, callbacks=[cases.callback(on_train_batch_end=leave)])
        # One of two gradients has come.
        assert int(first.optimizer.iterations) == 0
        compare.assert_all_close(first.get_weights(), weights, 0)
        first.fit(**small)
        compare.assert_same_history(
            second.fit(**small, epochs=2).history, wanted
        )
        assert strategy.counts.updates == 2 * STEPS
        first.fit(**small)
        assert strategy.counts.updates == STEPS
        for model in (first, second):
            compare.assert_same_model(model, reference)
    assert strategy.counts.updates == STEPS
    originals.assert_back()


def test_callbacks_that_evaluate_and_train():
    """Nothing is averaged before it is complete."""
    model, other, reference = linear(), linear(), linear(run_eagerly=True)
    x, y = X[:32], Y[:32]
    counted, refused = [], []

    def look(batch, logs):
        model.evaluate(x, y, batch_size=32, verbose=0)
        counted.append(int(model.optimizer.iterations))

    def once_more(epoch, logs):
        with pytest.raises(TowerError, match="inside its own fit"):
            fit(model)
        refused.append(epoch)
        model.train_on_batch(X[:8], Y[:8])
        if epoch == 0:
            fit(other)

    watch = cases.callback(on_train_batch_end=look, on_epoch_end=once_more)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    with kt.SyncReplicasStrategy(towers=2):
        model.fit(data, epochs=2, verbose=0, callbacks=[watch])
    assert counted == [0, 1, 1, 2, 3, 4, 4, 5]
    assert refused == [0, 1]
    assert int(other.optimizer.iterations) == STEPS // 2
    for _ in range(2):
        fit(reference, x=x, y=y)
        reference.train_on_batch(X[:8], Y[:8])
    compare.assert_all_close(model.weights, reference.weights)


def test_blocks_leave_nothing_behind(monkeypatch):
    """Neither graphs nor queues on the devices."""
    destroyed = []
    original = tf.raw_ops.DestroyResourceOp

    def destroy(resource, **given):
        destroyed.append(resource)
        original(resource=resource, **given)

    monkeypatch.setattr(tf.raw_ops, "DestroyResourceOp", destroy)
    model = linear()

    # The last one is kept, as users do to read its counts.
    kept = []

    def graphs_after_a_block():
        with kt.SyncReplicasStrategy(towers=2) as strategy:
            fit(model)
        kept[:] = [strategy]
        return min(count_graphs() for _ in range(10))

    def count_graphs():
        # The last thread of a replica may still be ending.
        time.sleep(0.05)
        gc.collect()
        return sum(issubclass(type(g), tf.Graph) for g in gc.get_objects())

    graphs = graphs_after_a_block()
    # The step, queues of two replicas and of events, arrivals, and three
    # numbers of each replica; and two gradients.
    assert len(destroyed) == 11 + 2
    with pytest.raises(tf.errors.OpError):
        tf.raw_ops.QueueSizeV2(handle=destroyed[1])
    assert graphs_after_a_block() <= graphs


def test_steps_that_are_refused():
    class Idle(keras.Sequential):
        def train_step(self, data):
            return {"loss": keras.ops.mean(self(data[0]))}

    idle = Idle([keras.Input((6,)), keras.layers.Dense(3)])
    model = linear(run_eagerly=True)
    twice = Twice(model.inputs, model.outputs)
    for refused in (idle, twice):
        refused.compile("sgd", m.cross_entropy())
    with kt.SyncReplicasStrategy(towers=2):
        with pytest.raises(TowerError, match="updates nothing"):
            fit(idle)
        with pytest.raises(TowerError, match="model's optimizers twice"):
            fit(twice)
        for train in (fit, lambda model: model.train_on_batch(X, Y)):
            with pytest.raises(TowerError, match="needs compiled steps"):
                train(model)
        model.evaluate(X, Y, verbose=0)
    assert int(model.optimizer.iterations) == 0


def test_more_gradients_than_replicas_are_described():
    said = kt.SyncReplicasStrategy(replicas_to_aggregate=9, towers=4).describe()
    assert "averages 9 gradients (each of 4 replicas computes up to 3" in said
