"""Asynchronous towers: nobody waits for the slowest, and how far it is behind.

Here towers sleep rather than compute, so that what is measured does not depend
on how busy the cores are.
"""

import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.asynchronous.pace import Free
from keras_towers.fit.asynchronous.threads import TowerThreads
from tests.kit.training import STEPS, classifier, fit
from tests.strategies.async_cases import Sleeps, dataset


def test_a_slow_tower_holds_nobody():
    def seconds(*towers):
        layer = Sleeps(*towers)
        model = classifier(layer)
        begin = []

        def note(batch, logs):
            # By the end of the first step all is traced.
            begin.append(time.monotonic())

        clock = keras.callbacks.LambdaCallback(on_train_batch_end=note)
        with kt.AsyncTowerStrategy(4):
            model.fit(
                dataset().repeat(),
                steps_per_epoch=160,
                verbose=0,
                callbacks=[clock],
            )
            took = time.monotonic() - begin[0]
        assert sum(layer.steps) == int(model.optimizer.iterations) == 160
        return took, layer.steps

    alike, steps = seconds(0.02, 0.02, 0.02, 0.02)
    assert min(steps) > 20
    one_slow, steps = seconds(0.02, 0.02, 0.02, 0.2)
    assert 0 < steps[3] < 15
    # Waiting for the slow one in every step would give 0.1.
    assert alike / one_slow > 0.5


def test_staleness():
    with kt.AsyncTowerStrategy(4) as strategy:
        assert (strategy.staleness.mean, strategy.staleness.max) == (0, 0)
        model = classifier(Sleeps(0.01, 0.01, 0.01, 0.03))
        model.fit(dataset().repeat(), steps_per_epoch=40, verbose=0)
        found = strategy.staleness
        assert found.steps == sum(found.histogram.values()) == 40
        assert 1 < found.mean < found.max < 40
        values = np.repeat([*found.histogram], [*found.histogram.values()])
        assert found.mean == pytest.approx(values.mean())
        # Of the last epoch alone.
        fit(model)
        assert strategy.staleness.steps == STEPS


def test_staleness_in_tensorboard(tmp_path):
    board = keras.callbacks.TensorBoard(tmp_path)
    with kt.AsyncTowerStrategy(2):
        history = fit(classifier(), epochs=2, callbacks=[board])
    # History is that of the model, with names as on one device.
    assert history.keys() == {"loss", "accuracy"}
    tags = []
    for file in sorted(tmp_path.glob("train/*")):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            tags += [(value.tag, event.step) for value in event.summary.value]
    for name in ("epoch_staleness_mean", "epoch_staleness_max", "staleness"):
        assert [(name, 0), (name, 1)] == [t for t in tags if t[0] == name]


def test_threads_wait_only_when_all_are_busy():
    threads = TowerThreads(2, Free(None))
    free = threading.Event()
    steps = [lambda batch: free.wait(5)] * 2
    for _ in range(4):
        threads.submit(steps, None)
    late = threading.Timer(0.1, free.set)
    late.start()
    begin = time.monotonic()
    threads.submit(steps, None)
    assert time.monotonic() - begin > 0.05
    threads.drain()
    assert threads.take_staleness().steps == 5
    threads.close()
