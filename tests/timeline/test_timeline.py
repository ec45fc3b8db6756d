"""``kt.Timeline``: what it writes and says of a ``fit`` on four towers."""

import itertools
import json
import logging
import time
from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.context import marks
from tests.exactness import models as m
from tests.kit.training import STEPS, X, Y, classifier, fit

PHASES = ["compute", "wait", "reduction", "update"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.json"


def timed(path, model=None, strategy=None, epochs=1, **options):
    """A trained model, its ``Timeline``, and what that has written."""
    keras.utils.set_random_seed(1)
    model = model or classifier()
    callbacks = options.pop("callbacks", [])
    timeline = kt.Timeline(path)
    with strategy or kt.TowerStrategy(4):
        fit(model, epochs, callbacks=[timeline, *callbacks], **options)
    return model, timeline, written(path)


def written(path):
    """The events of a trace by name, after a check of all that viewers need."""
    events = json.loads(path.read_text())["traceEvents"]
    for event in events:
        assert {"name", "ph", "pid", "tid", "args"} <= event.keys()
        assert event["ph"] in "MX"
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events} <= named
    found = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault(event["name"], []).append(event)
    return found


def end(event):
    return event["ts"] + event["dur"]


def by_step(events):
    return {(e["args"]["step"], e["tid"]): e for e in events}


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


MODELS = {
    "momentum": (classifier, {}),
    "several steps at once": (
        lambda: classifier(steps_per_execution=3),
        {},
    ),
    "layers that draw": (
        lambda: classifier(keras.layers.Dropout(0.3)),
        {},
    ),
    "each tower traces": (
        lambda: classifier(keras.layers.Lambda(draws)),
        {},
    ),
    "validation": (classifier, {"validation_data": (X[:20], Y[:20])}),
}


def draws(x):
    """Draws by TensorFlow, whose seed is the number of operations before."""
    return x + tf.random.normal(tf.shape(x))


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_the_same_without(path, name):
    make, options = MODELS[name]

    def trained(*callbacks):
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        model = make()
        with kt.TowerStrategy(4):
            history = fit(model, 2, callbacks=callbacks, **options)
            weights = model.get_weights()
            if name != "each tower traces":
                # What is traced anew draws by TensorFlow from the beginning.
                fit(model, 1)
        return [*weights, *model.get_weights()], history

    weights, history = trained(kt.Timeline(path))
    wanted, expected = trained()
    assert history == expected
    for found, weight in zip(weights, wanted, strict=True):
        np.testing.assert_array_equal(found, weight)
    assert len(written(path)["compute"]) == 2 * STEPS * 4


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
    assert set(waits) == {1, 2, 4}


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

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16).map(slow)
    timeline = kt.Timeline(path)
    with kt.TowerStrategy(4):
        classifier().fit(data, verbose=0, callbacks=[timeline])
    assert timeline.phases["input"] > 15
    assert "prefetch" in timeline.advice[0]


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
    _, _, found = timed(path, model)
    assert "compute" not in found
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "without run_eagerly=True" in record.getMessage()


class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            raise KeyboardInterrupt


def test_an_interrupted_fit_writes_what_there_is(path):
    model, timeline = classifier(), kt.Timeline(path)
    with kt.TowerStrategy(4):
        with pytest.raises(KeyboardInterrupt):
            fit(model, callbacks=[timeline, Fails()])
        assert len(written(path)["compute"]) == 3 * 4
        # And it can be used again.
        fit(model, callbacks=[timeline])
    assert len(written(path)["compute"]) == STEPS * 4


def test_the_last_steps_are_written(path):
    timeline = kt.Timeline(path, steps=3)
    with kt.TowerStrategy(4):
        fit(classifier(), 2, callbacks=[timeline])
    found = written(path)
    last = set(range(2 * STEPS - 3, 2 * STEPS))
    assert {e["args"]["step"] for e in found["compute"]} == last
    assert len(found["input"]) <= 3


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


REFUSED = {
    "no step": (lambda p: kt.Timeline(p, steps=0), "steps=0"),
    "a folder": (lambda p: fitted(kt.Timeline(p.parent)), "cannot write"),
    "two": (lambda p: fitted(kt.Timeline(p), kt.Timeline(p)), "give one"),
    "wrapped": (
        lambda p: fitted(kt.ChiefOnly(kt.Timeline(p))),
        "without Chief",
    ),
    "evaluate": (
        lambda p: called("evaluate", X, Y, callbacks=[kt.Timeline(p)]),
        "not evaluate",
    ),
    "predict": (
        lambda p: called("predict", X, callbacks=[kt.Timeline(p)]),
        "not predict",
    ),
    "no strategy": (
        lambda p: fit(classifier(), callbacks=[kt.Timeline(p)]),
        "inside a strategy's block",
    ),
}


def fitted(*callbacks):
    with kt.TowerStrategy(4):
        fit(classifier(), callbacks=callbacks)


def called(method, *args, **kwargs):
    with kt.TowerStrategy(4):
        getattr(classifier(), method)(*args, verbose=0, **kwargs)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(path, name):
    act, message = REFUSED[name]
    with pytest.raises(kt.TowerError, match=message.replace("(", r"\(")):
        act(path)
    assert not path.exists()


def test_determinism_forbids_the_clock(path, monkeypatch):
    from keras_towers import compat

    monkeypatch.setattr(compat, "is_op_determinism_enabled", lambda: True)
    with pytest.raises(kt.TowerError, match="enable_op_determinism"):
        fitted(kt.Timeline(path))
