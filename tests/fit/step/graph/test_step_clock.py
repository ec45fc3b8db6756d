"""Marks read the clock after an operation, and delay no other one."""

import time

import numpy as np
import tensorflow as tf

from keras_towers.fit.step.graph import step_clock
from keras_towers.fit.step.graph.step_clock import StepRecorder

SLEEP_S = 0.2
# A busy machine may read the clock that much too late.
LATE_S = SLEEP_S / 2


def slow(x):
    return tf.ensure_shape(tf.py_function(sleep, [x], x.dtype), x.shape)


def sleep(x):
    time.sleep(SLEEP_S)
    return x


class Step:
    """A step on two towers, of which the second computes for longer."""

    def __init__(self, devices):
        self.model, self.devices = object(), devices[:2]
        self.weight = tf.Variable(0.0)

    def __call__(self, x):
        with step_clock.marked(self.model, self.devices, [x, x]):
            computed = [x + 1, slow(x)]
            for tower, value in enumerate(computed):
                step_clock.reached(tower, "computed", [value, None])
            total = tf.add_n(computed)
            step_clock.reached(0, "reduced", [total])
            self.weight.assign_add(slow(total))
        return total


def test_times_of_steps(devices):
    step = Step(devices)
    recorder = StepRecorder(step.model, kept=100)
    with step_clock.recording(recorder):
        function = tf.function(step)
        for value in (1.0, 2.0, 3.0):
            function(tf.constant(value))
        recorder.read()
        function(tf.constant(4.0))
    times = recorder.read()
    assert times.shape == (4, 2, 4)
    assert recorder.traces == 1
    first, second = times[:, 0], times[:, 1]
    assert np.isfinite(first).all()
    assert np.isnan(second[:, 2:]).all()
    assert (second[:, 1] - second[:, 0] > LATE_S).all()
    # At least once the first tower was not held up by something else.
    assert (first[:, 1] - first[:, 0]).min() < LATE_S
    # An update ends when what it writes is written.
    assert (first[:, 3] - first[:, 2] > LATE_S).all()
    assert np.abs(times[0, 0, 0] - time.time()) < 60


def test_the_last_of_several_updates_counts(devices):
    model, weight = object(), tf.Variable(0.0)

    def step(x):
        with step_clock.marked(model, devices[:1], [x]):
            for _ in range(2):
                step_clock.reached(0, "computed", [slow(x)])
                step_clock.reached(0, "reduced", [x])
                weight.assign_add(slow(x))

    recorder = StepRecorder(model, kept=100)
    with step_clock.recording(recorder):
        tf.function(step)(tf.constant(1.0))
    begun, computed, _, updated = recorder.read()[0, 0]
    assert computed - begun > LATE_S
    assert updated - begun > SLEEP_S + LATE_S


def test_an_accelerator_is_waited_for(devices, monkeypatch):
    # As if the second tower were one: what the host copies shows its progress.
    monkeypatch.setattr(step_clock, "_host_of", lambda device: devices[0])
    step = Step(devices)
    recorder = StepRecorder(step.model, kept=100)
    with step_clock.recording(recorder):
        tf.function(step)(tf.constant(1.0))
    (times,) = recorder.read()
    assert times[1, 1] - times[1, 0] > LATE_S
