"""Marks read the clock behind what they mark, and nothing waits for them."""

import time

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.fit.context import marks
from keras_towers.fit.context.marks import Recorder

pytestmark = pytest.mark.core
SLEEP_S = 0.03


def slow(x):
    return tf.ensure_shape(tf.py_function(sleep, [x], x.dtype), x.shape)


def sleep(x):
    time.sleep(SLEEP_S)
    return x


class Step:
    """A step on two towers; that of the second one computes for longer."""

    def __init__(self, devices):
        self.model, self.devices = object(), devices[:2]
        self.weight = tf.Variable(0.0)

    def __call__(self, x):
        with marks.marked(self.model, self.devices, [x, x]):
            computed = [x + 1, slow(x)]
            for tower, value in enumerate(computed):
                marks.reached(tower, "computed", [value, None])
            total = tf.add_n(computed)
            marks.reached(0, "reduced", [total])
            with marks.until(0, "updated"):
                self.weight.assign_add(slow(total))
        return total


def test_times_of_steps(devices):
    step = Step(devices)
    recorder = Recorder(step.model, kept=100)
    with marks.recording(recorder):
        function = tf.function(step)
        for value in (1.0, 2.0, 3.0):
            function(tf.constant(value))
        recorder.read()
        function(tf.constant(4.0))
    times = recorder.steps()
    assert times.shape == (4, 2, 1, 4)
    assert recorder.traces == 1
    first, second = times[:, 0, 0], times[:, 1, 0]
    # Marks of what is ready at once may be read in any order.
    assert (np.diff(first) > -SLEEP_S / 10).all()
    assert np.isnan(second[:, 2:]).all()
    assert (second[:, 1] - second[:, 0] > SLEEP_S).all()
    assert (first[:, 1] - first[:, 0] < SLEEP_S).all()
    # An update ends when what it writes is written.
    assert (first[:, 3] - first[:, 2] > SLEEP_S).all()
    assert np.abs(times[0, 0, 0, 0] - time.time()) < 60


def test_steps_in_a_loop_of_a_graph(devices):
    step = Step(devices)
    recorder = Recorder(step.model, kept=100)
    one = tf.function(step)

    @tf.function
    def several(x):
        for _ in tf.range(3):
            one(x)

    with marks.recording(recorder):
        several(tf.constant(1.0))
    assert len(recorder.steps()) == 3


def test_an_accelerator_is_waited_for(devices, monkeypatch):
    # As if the second tower were one: what the host copies shows its progress.
    monkeypatch.setattr(marks, "_host_of", lambda device: devices[0])
    step = Step(devices)
    recorder = Recorder(step.model, kept=100)
    with marks.recording(recorder):
        tf.function(step)(tf.constant(1.0))
    (times,) = recorder.steps()
    assert times[1, 0, 1] - times[1, 0, 0] > SLEEP_S


@pytest.mark.parametrize("recorded", ["nothing", "another model", "eager"])
def test_without_a_recorder_the_graph_is_as_it_was(devices, recorded):
    step = Step(devices)
    recorder = Recorder(
        step.model if recorded == "eager" else object(), kept=100
    )
    if recorded == "nothing":
        graph = tf.function(step).get_concrete_function(tf.constant(1.0)).graph
    else:
        with marks.recording(recorder):
            if recorded == "eager":
                step(tf.constant(1.0))
                graph = None
            else:
                function = tf.function(step)
                graph = function.get_concrete_function(tf.constant(1.0)).graph
    kinds = {op.type for op in graph.get_operations()} if graph else set()
    assert not kinds & {"Timestamp", "QueueEnqueueV2"}
    assert recorder.steps().size == 0


def test_marks_change_no_seed_of_an_operation(devices):
    step = Step(devices)
    tf.random.set_seed(1)

    def draws(x):
        with marks.marked(step.model, step.devices, [x, x]):
            value = tf.random.normal([2])
            marks.reached(0, "computed", [value])
            more = tf.random.normal([2])
        return value, more

    plain = tf.function(draws)(tf.constant(1.0))
    tf.random.set_seed(1)
    with marks.recording(Recorder(step.model, kept=100)):
        marked = tf.function(draws)(tf.constant(1.0))
    np.testing.assert_array_equal(plain, marked)
