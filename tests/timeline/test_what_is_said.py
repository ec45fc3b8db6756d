"""What is slow is named, in what a ``fit`` on four towers prints."""

import re
import time
from collections import Counter

import keras
import tensorflow as tf

import keras_towers as kt
from tests.kit.traces import timed
from tests.kit.training import BATCH, STEPS, X, Y, classifier


class Slow(keras.layers.Layer):
    """Lets tower 2 sleep."""

    def call(self, x):
        if kt.current_tower().index != 2:
            return x
        sleep = tf.py_function(lambda: time.sleep(0.03), [], [])
        with tf.control_dependencies([sleep]):
            return tf.identity(x)


def test_a_slow_tower_is_named(path):
    _, timeline, found = timed(path, classifier(Slow()), epochs=2)
    assert timeline.phases["compute"] > 0.25 * 30
    assert timeline.phases["wait"] > 0.5 * 30
    (line,) = [a for a in timeline.advice if "computes" in a]
    assert "tower 2 (/device:CPU:2)" in line
    waits = Counter(e["tid"] for e in found["wait"] if e["dur"] > 20_000)
    # The row of tower 2 is the third behind that of the host.
    assert {row for row, steps in waits.items() if steps > STEPS} == {1, 2, 4}


def test_slow_callbacks_and_a_slow_dataset_are_named(path):
    class Sleeps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.03)

    _, timeline, found = timed(path, callbacks=[Sleeps()])
    assert timeline.phases["callbacks"] > 25
    assert "callbacks take" in timeline.advice[0]
    assert sum(e["dur"] > 25_000 for e in found["callbacks"]) >= STEPS - 1

    def slow(x, y):
        wait = tf.py_function(lambda: time.sleep(0.03), [], [])
        with tf.control_dependencies([wait]):
            return tf.identity(x), y

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).map(slow)
    timeline = kt.Timeline(path)
    with kt.TowerStrategy(4):
        classifier().fit(data, verbose=0, callbacks=[timeline])
    assert timeline.phases["input"] > 15
    assert "prefetch" in timeline.advice[0]


class EveryFourth(keras.callbacks.Callback):
    """Sleeps behind each fourth batch, and at the ends of epochs."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.1 * (batch % 4 == 3))

    def on_epoch_end(self, epoch, logs=None):
        time.sleep(0.05)


def test_what_is_slow_every_so_often_is_named(path, capsys):
    _, timeline, _ = timed(path, epochs=3, callbacks=[EveryFourth()])
    assert timeline.phases["callbacks"] > 20
    said = "\n".join(timeline.advice)
    assert re.search(r"callbacks take .* on average, every so often", said)
    assert re.search(r"callbacks take .* at their ends", said)
    printed = capsys.readouterr().out
    steps, whole = re.search(
        r"steps: (\S+) of (\S+) s of fit", printed
    ).groups()
    assert 0.2 < float(steps) < float(whole)
    assert float(re.search(r"ends of epochs: (\S+) s", printed)[1]) > 0.15
    assert re.search(r"callbacks .* every so often", printed)


def test_a_generator_that_stalls_every_so_often_is_named(path):
    def batches():
        for begin in range(0, 48, BATCH // 2):
            time.sleep(0.1 * (begin % 24 == 16))
            yield X[begin : begin + BATCH // 2], Y[begin : begin + BATCH // 2]

    timeline = kt.Timeline(path)
    with kt.TowerStrategy(4):
        classifier().fit(batches(), verbose=0, callbacks=[timeline])
    (line,) = [a for a in timeline.advice if "waits for its input" in a]
    assert "keras.utils.PyDataset with workers=4" in line
    assert timeline.advice[0] == line
