"""Workers of a ``MultiWorkerTowerStrategy`` that die, stop, or never start."""

import json
import signal

import keras
import numpy as np
import pytest

from keras_towers.launching.tf_cluster import local_cluster
from tests.kit.tasks import Task

pytestmark = pytest.mark.slow

TIMEOUT_S = 4
TRAINS = """
import json, os, sys, time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tensorflow as tf

import keras_towers as kt

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
x = np.linspace(-1, 1, 96, dtype="float32").reshape(-1, 4)


class Slow(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        print("epoch", epoch, flush=True)
        time.sleep({pause_s} if epoch == 3 else 0)


callbacks = [keras.callbacks.BackupAndRestore("{folder}/backup"), Slow()]
try:
    with kt.MultiWorkerTowerStrategy(timeout={timeout_s}):
        model.fit(
            *(x, x[:, :2], 8, 5), shuffle=False, verbose=0, callbacks=callbacks
        )
except tf.errors.UnavailableError as error:
    print("lost:", *error.__notes__, flush=True)
    print("evaluated", model.evaluate(x, x[:, :2], verbose=0), flush=True)
else:
    weights = [weight.tolist() for weight in model.get_weights()]
    print("trained", json.dumps(weights), flush=True)
"""


def train(folder, clusters, name, pause_s):
    script = TRAINS.format(folder=folder, pause_s=pause_s, timeout_s=TIMEOUT_S)
    return [
        Task(folder, cluster, script, f"{name}-{cluster.index}")
        for cluster in clusters
    ]


def end(tasks):
    for task in tasks:
        task.kill()


@pytest.mark.parametrize(
    "number,victim,size",
    [
        (signal.SIGKILL, 0, 2),
        pytest.param(*(signal.SIGSTOP, 1, 3), marks=pytest.mark.long),
    ],
)
def test_others_get_an_error_and_all_can_be_started_again(
    tmp_path, number, victim, size
):
    with local_cluster({"worker": size}) as clusters:
        tasks = train(tmp_path, clusters, "first", pause_s=3)
        try:
            # All are in the pause, or about to be.
            for task in tasks:
                task.wait_for("epoch 3")
            tasks[victim].process.send_signal(number)
            others = [task for task in tasks if task is not tasks[victim]]
            for task in others:
                task.wait_for("evaluated", 60)
                assert f"rank {victim} (127.0.0.1:" in task.output
                assert task.end() == 0
        finally:
            end(tasks)
        if size > 2:
            return
        tasks = train(tmp_path, clusters, "second", pause_s=0)
        try:
            for task in tasks:
                task.wait_for("trained")
                assert "epoch 2" not in task.output
            results = [task.output.rpartition("trained")[2] for task in tasks]
            assert [task.end() for task in tasks] == [0] * size
        finally:
            end(tasks)
    assert len(set(results)) == 1
    wanted = uninterrupted()
    for found, weight in zip(json.loads(results[0]), wanted, strict=True):
        np.testing.assert_allclose(found, weight, rtol=1e-5)


def uninterrupted():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    x = np.linspace(-1, 1, 96, dtype="float32").reshape(-1, 4)
    model.fit(x, x[:, :2], 8, 5, shuffle=False, verbose=0)
    return model.get_weights()


STARTS = """
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras_towers as kt

try:
    kt.MultiWorkerTowerStrategy(start_timeout=6)
except kt.TowerError as error:
    print("refused:", error, flush=True)
"""


def test_a_worker_that_never_starts_is_named(tmp_path):
    with local_cluster({"worker": 2}) as clusters:
        task = Task(tmp_path, clusters[1], STARTS)
        try:
            task.wait_for("refused: ")
            assert task.end() == 0
        finally:
            task.kill()
    missing = f"rank 0 ({clusters[0].workers[0]})"
    waits, refused = task.output.split("refused: ")
    assert f"waits for {missing} to start" in waits
    assert f"{missing} did not start within 6 seconds" in refused
