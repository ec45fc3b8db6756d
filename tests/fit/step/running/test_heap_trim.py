"""Freed memory goes back once after each trace."""

import tensorflow as tf

from keras_towers.fit.step.running.heap_trim import HeapTrim
from keras_towers.foundation import system


def test_the_first_step_after_a_trace_trims_the_heap_before_it_runs(
    monkeypatch,
):
    events, trim = [], HeapTrim()
    monkeypatch.setattr(
        system, "return_freed_memory", lambda: events.append("trimmed")
    )

    @tf.function
    def step(x):
        batch = trim.before_step({"x": x, "none": None})
        assert batch["x"].shape == x.shape and batch["none"] is None
        return tf.numpy_function(run, [batch["x"]], tf.float32)

    def run(x):
        events.append("step")
        return x

    for _ in range(2):
        step(tf.zeros(2))
    step(tf.zeros(3))
    assert events == ["trimmed", "step", "step", "trimmed", "step"]


def test_what_xla_compiles_does_not_wait():
    trim = HeapTrim()

    @tf.function(jit_compile=True)
    def step(x):
        assert trim.before_step(x) is x
        return x + 1

    assert step(tf.zeros(())) == 1
