"""What is slow is named, in what a ``fit`` on towers prints."""

import re
import time

import keras
import tensorflow as tf

import keras_towers as kt
from tests.kit.traces import timed
from tests.kit.training import BATCH, STEPS, X, Y, linear


class Slow(keras.layers.Layer):
    """Lets tower 1 sleep."""

    def call(self, x):
        if kt.current_tower().index != 1:
            return x
        sleep = tf.py_function(lambda: time.sleep(0.1), [], [])
        with tf.control_dependencies([sleep]):
            return tf.identity(x)


def test_a_slow_tower_is_named(path):
    _, timeline, found = timed(path, linear(Slow()), epochs=2)
    # Of one of two towers.
    assert timeline.phases["compute"] > 100 / 2
    assert timeline.phases["wait"] > 50 / 2
    (line,) = [a for a in timeline.advice if "computes" in a]
    assert "tower 1 (/device:CPU:1)" in line
    waits = [e["tid"] for e in found["wait"] if e["dur"] > 50_000]
    # The row of tower 0 is behind that of the host. On a machine that is busy,
    # tower 1 may have to wait now and then, too.
    assert waits.count(1) > STEPS > waits.count(2)
    assert set(waits) <= {1, 2}


class EveryFourth(keras.callbacks.Callback):
    """Sleeps behind each fourth batch, and at the ends of epochs."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.1 * (batch % 4 == 3))

    def on_epoch_end(self, epoch, logs=None):
        time.sleep(0.05)


def test_what_is_slow_every_so_often_is_named(path, capsys):
    _, timeline, found = timed(path, epochs=3, callbacks=[EveryFourth()])
    assert sum(e["dur"] > 99_000 for e in found["callbacks"]) >= 3
    assert timeline.phases["callbacks"] > 15
    said = "\n".join(timeline.advice)
    assert re.search(r"callbacks take .* on average, every so often", said)
    assert re.search(r"callbacks take .* at their ends", said)
    printed = capsys.readouterr().out
    steps, whole = re.search(
        r"steps: (\S+) of (\S+) s of fit", printed
    ).groups()
    assert 0.19 < float(steps) < float(whole)
    parts = dict(re.findall(r"^([a-z ]+): (\S+) s\b", printed, re.MULTILINE))
    assert float(parts["ends of epochs"]) > 0.14
    explained = float(steps) + sum(map(float, parts.values()))
    assert abs(explained - float(whole)) < 0.01 * (len(parts) + 2)
    assert re.search(r"callbacks .* every so often", printed)


def test_a_generator_that_stalls_every_so_often_is_named(path):
    def batches():
        for begin in range(0, 48, BATCH // 2):
            time.sleep(0.1 * (begin % 24 == 16))
            yield X[begin : begin + BATCH // 2], Y[begin : begin + BATCH // 2]

    timeline = kt.Timeline(path)
    with kt.TowerStrategy(2):
        linear().fit(batches(), verbose=0, callbacks=[timeline])
    assert timeline.phases["input"] > 15
    (line,) = [a for a in timeline.advice if "waits for its input" in a]
    assert "keras.utils.PyDataset with workers=4" in line
