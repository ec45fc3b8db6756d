"""``kt.Timeline``: what it writes and says of a ``fit`` on four towers."""

import itertools
import logging
from collections import Counter

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers import timeline as timeline_lib
from keras_towers.fit.context import marks
from tests.exactness import models as m
from tests.kit.traces import by_step, end, timed, written
from tests.kit.training import STEPS, X, Y, classifier, fit

PHASES = ["compute", "wait", "reduction", "update"]


@pytest.mark.core
@pytest.mark.parametrize("updates", ["once", "each"])
def test_every_step_of_every_tower_is_there(path, updates, capsys):
    strategy = kt.TowerStrategy(4, updates=updates)
    model, timeline, found = timed(path, None, strategy, epochs=2)
    steps, towers = range(2 * STEPS), range(1, 5)
    every = list(itertools.product(steps, towers))
    phases = {name: by_step(found[name]) for name in PHASES}
    assert sorted(phases["compute"]) == sorted(phases["reduction"]) == every
    updating = [1] if updates == "once" else towers
    assert sorted(phases["update"]) == list(itertools.product(steps, updating))
    for step, tower in every:
        compute = phases["compute"][step, tower]
        reduction = phases["reduction"][step, tower]
        wait = phases["wait"].get((step, tower))
        computed = end(compute) if wait is None else end(wait)
        assert reduction["ts"] == pytest.approx(computed, abs=0.2)
        if (update := phases["update"].get((step, tower))) is not None:
            assert update["ts"] == pytest.approx(end(reduction), abs=0.2)
        if (then := phases["compute"].get((step + 1, tower))) is not None:
            assert then["ts"] >= end(reduction) - 0.2
    # Each step waited for its batch, or for its trace.
    assert len(found["input"]) + len(found["tracing"]) == 2 * STEPS
    assert found["tracing"][0]["args"] == {"step": 0}
    assert list(timeline.phases) == [
        *("input", *PHASES),
        *("rest", "callbacks"),
    ]
    assert timeline.phases["compute"] > 0
    printed = capsys.readouterr().out
    assert f"{2 * STEPS} steps" in printed
    assert "tower 3 (/device:CPU:3)" in printed


def test_several_optimizers(path):
    class Two(keras.Model):
        """Trains one layer after the other."""

        def __init__(self):
            super().__init__()
            self.parts = [keras.layers.Dense(3), keras.layers.Dense(3)]
            self.second = keras.optimizers.SGD(0.1)

        def call(self, x):
            return self.parts[0](x) + self.parts[1](x)

        def train_step(self, data):
            x, y = data
            for part, optimizer in zip(
                self.parts, (self.optimizer, self.second), strict=True
            ):
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(x, y, self(x))
                weights = part.trainable_variables
                grads = tape.gradient(loss, weights)
                optimizer.apply(grads, weights)
            return {"loss": loss}

    model = Two()
    model.compile("sgd", m.cross_entropy())
    _, _, found = timed(path, model)
    updates = Counter(e["args"]["update"] for e in found["update"])
    assert updates == {0: STEPS, 1: STEPS}
    assert len(found["compute"]) == 2 * STEPS * 4


def test_weights_that_exist_once(path):
    strategy = kt.ParameterServerTowerStrategy(4)
    _, timeline, found = timed(path, None, strategy)
    assert len(found["compute"]) == 4 * STEPS
    assert len(found["update"]) == STEPS
    assert timeline.phases["update"] > 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: kt.AsyncTowerStrategy(4),
        lambda: kt.SyncReplicasStrategy(3, towers=4),
    ],
    ids=["async", "sync_replicas"],
)
def test_towers_that_have_no_step_in_common(path, make, capsys):
    _, timeline, found = timed(path, None, make(), epochs=2)
    assert len(found["step"]) == 2 * STEPS
    assert {e["tid"] for e in found["step"]} <= {1, 2, 3, 4}
    assert list(timeline.phases) == ["a tower's step"]
    assert "tower 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "make",
    [lambda: kt.TowerStrategy(1), kt.NoOpStrategy],
    ids=["one tower", "no step"],
)
def test_steps_without_towers(path, make):
    _, timeline, found = timed(path, None, make())
    assert len(found["step"]) == STEPS
    assert list(timeline.phases) == ["step", "callbacks"]
    assert "not divided into phases" in timeline.advice[-1]


def test_eager_steps_are_not_measured(path, caplog):
    model = classifier(run_eagerly=True)
    _, timeline, found = timed(path, model)
    assert "compute" not in found
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "without run_eagerly=True" in record.getMessage()
    assert not any("several towers" in line for line in timeline.advice)


def test_the_last_steps_are_written(path):
    timeline = kt.Timeline(path, steps=3)
    with kt.TowerStrategy(4):
        fit(classifier(), 2, callbacks=[timeline])
    found = written(path)
    last = set(range(2 * STEPS - 3, 2 * STEPS))
    assert {e["args"]["step"] for e in found["compute"]} == last
    assert len(found["input"]) <= 3


def test_a_long_fit_keeps_its_last_steps(path, monkeypatch, capsys):
    # Whole reads are kept: two steps at a time, of which the first goes.
    monkeypatch.setattr(timeline_lib, "_KEPT", 3)
    monkeypatch.setattr(timeline_lib, "_UNREAD", 2)
    timeline = kt.Timeline(path, steps=2)
    with kt.TowerStrategy(4):
        fit(classifier(), 3, callbacks=[timeline])
    assert f"the last 3 of {3 * STEPS} steps" in capsys.readouterr().out
    found, last = written(path), {3 * STEPS - 2, 3 * STEPS - 1}
    for name in ("compute", "reduction", "update", "input"):
        assert {e["args"]["step"] for e in found[name]} == last
    assert timeline.phases["compute"] > 0


def test_a_later_fit_has_no_marks(path, monkeypatch):
    finish, finished = marks.StepMarks.finish, []
    monkeypatch.setattr(
        marks.StepMarks, "finish", lambda of: finished.append(finish(of))
    )
    model = classifier()
    with kt.TowerStrategy(4):
        fit(model, callbacks=[kt.Timeline(path)])
        traces = len(finished)
        assert traces > 0
        fit(model)
        model.evaluate(X, Y, verbose=0)
    assert len(finished) == traces


def test_with_a_list_of_callbacks_of_keras(path):
    model, seen = classifier(), []
    mine = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(batch)
    )
    listed = keras.callbacks.CallbackList(
        [kt.Timeline(path), mine], add_history=True, model=model, epochs=1
    )
    before = list(listed.callbacks)
    with kt.TowerStrategy(4):
        fit(model, callbacks=listed)
    assert listed.callbacks == before
    assert seen == list(range(STEPS))
    assert len(written(path)["compute"]) == STEPS * 4
