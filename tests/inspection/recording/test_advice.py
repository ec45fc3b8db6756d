"""What is advised where a phase stands out, and what a ``fit`` prints."""

import collections
import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_towers.fit.step.graph.graph_function import GraphFunction
from keras_towers.inspection.recording import advice as timeline_lib
from keras_towers.inspection.recording.advice import advise
from tests.kit.traces import fit_with_timeline
from tests.kit.training import STEPS, linear

pytestmark = pytest.mark.alternate

PHASES = {
    "input": 1,
    "compute": 80,
    "wait": 2,
    "reduction": 8,
    "update": 6,
    "rest": 2,
    "callbacks": 1,
}
TOWERS = [f"tower {number}" for number in range(4)]
EQUAL = [0.08] * 4
WAITING = {"wait": 60}


@pytest.mark.core
@pytest.mark.parametrize(
    ("changed", "compute", "wanted"),
    [
        ({}, EQUAL, ""),
        ({"input": 100}, EQUAL, "for 50% of a step (100.00 ms): with"),
        ({"callbacks": 50}, EQUAL, "callbacks take 34% of a step"),
        ({"reduction": 100}, EQUAL, "reduction of gradients takes"),
        ({"update": 100}, EQUAL, "optimizer's update takes"),
        # The largest one.
        ({"callbacks": 50, "input": 200}, EQUAL, "waits for its input"),
        (WAITING, [0.08, 0.08, 0.16, 0.08], "tower 2 computes 2.0 times"),
        # The clock saw nothing of three towers.
        (WAITING, [0, 0, 0.08, 0], "tower 2 computes 80000.0 times"),
        (WAITING, EQUAL, "now for one, now for another"),
    ],
)
def test_advice_is_on_the_phase_that_stands_out(changed, compute, wanted):
    advice = advise(PHASES | changed, TOWERS, np.array(compute), eager="")
    assert bool(advice) == bool(wanted)
    assert wanted in advice


@pytest.mark.core
@pytest.mark.parametrize(
    ("towers", "eager", "wanted"),
    [
        ([], "", "virtual_towers"),
        # Steps that are not known may run on several.
        (TOWERS, "", ""),
        (TOWERS, "run_eagerly=True", "leave out run_eagerly=True"),
    ],
)
def test_advice_where_steps_are_not_divided(towers, eager, wanted):
    of_step = {"step": 100, "callbacks": 0}
    advice = advise(of_step, towers, np.empty(0), eager)
    assert bool(advice) == bool(wanted)
    assert wanted in advice


@pytest.fixture
def slow_tower(monkeypatch):
    """Let tower 1 sleep at the end of its functions."""
    original, calls = GraphFunction.__call__, collections.Counter()

    def called(function, inputs):
        results = original(function, inputs)
        # The two towers call it one after the other.
        calls[function] += 1
        if not results or calls[function] % 2:
            return results
        with tf.control_dependencies(results):
            sleep = tf.py_function(lambda: time.sleep(0.1), [], [])
        with tf.control_dependencies([sleep]):
            return [tf.identity(result) for result in results]

    monkeypatch.setattr(GraphFunction, "__call__", called)


def test_a_slow_tower_is_named(path, slow_tower, monkeypatch):
    # On a loaded machine callbacks, which do nothing, may take longer still.
    monkeypatch.setattr(timeline_lib, "_STANDS_OUT", {"wait": 0.0})
    _, timeline, found = fit_with_timeline(path, linear(), epochs=2)
    # Of one of two towers.
    assert timeline.phases["compute"] > 100 / 2
    assert timeline.phases["wait"] > 50 / 2
    assert "tower 1 (/device:CPU:1) computes" in timeline.advice
    waits = [e["tid"] for e in found["wait"] if e["dur"] > 50_000]
    # The row of tower 0 is behind that of the host. On a machine that is busy,
    # tower 1 may have to wait now and then, too.
    assert waits.count(1) > STEPS > waits.count(2)
    assert set(waits) <= {1, 2}


def test_what_takes_place_between_epochs_is_in_no_step(path, capsys):
    slow = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: time.sleep(0.3),
        on_epoch_end=lambda epoch, logs: time.sleep(0.3),
        on_train_batch_end=lambda batch, logs: time.sleep(0.02),
    )
    _, timeline, _ = fit_with_timeline(path, epochs=3, callbacks=[slow])
    assert 20 < timeline.phases["callbacks"] < 120
    printed = capsys.readouterr().out
    (mean,) = re.findall(r"between epochs +(\d+\.\d\d)", printed)
    assert float(mean) >= 600
    assert re.search(r"callbacks +\d+\.\d\d +\d+\.\d\d +\d+%", printed)
