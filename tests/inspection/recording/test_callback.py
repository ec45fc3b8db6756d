"""``kt.Timeline``: what it writes, fits that fail, and what is refused."""

import itertools
import logging
import shutil

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.step.graph import step_clock
from keras_towers.foundation import compat
from keras_towers.inspection.recording import callback as timeline_lib
from tests.kit.compare import assert_all_close
from tests.kit.sampling import sample_of
from tests.kit.traces import by_step, end, fit_with_timeline, read_trace
from tests.kit.training import STEPS, X, Y, fit, linear

pytestmark = pytest.mark.alternate

PHASES = ["compute", "wait", "reduction", "update"]


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "options", "updating"),
    [("tower", {"updates": "each"}, [1, 2]), ("parameter-server", {}, [1])],
)
def test_every_step_of_every_tower_is_there(path, name, options, updating):
    strategy = kt.strategy(name, towers=2, **options)
    # With an update that takes longer than a clock is late.
    model = linear(keras.layers.Dense(512), keras.layers.Dense(512))
    _, timeline, found = fit_with_timeline(path, model, strategy, epochs=2)
    steps, towers = range(2 * STEPS), (1, 2)
    every = list(itertools.product(steps, towers))
    phases = {name: by_step(found.get(name, [])) for name in PHASES}
    assert sorted(phases["compute"]) == sorted(phases["reduction"]) == every
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
    names = ["input", *PHASES, "rest", "callbacks"]
    assert list(timeline.phases) == names
    assert timeline.phases["compute"] > 0
    assert timeline.phases["update"] > 0


IN_COMMON, ALONE = ["step", "callbacks"], ["a tower's step"]


@pytest.mark.parametrize(
    "make, phases",
    [
        (lambda: kt.AsyncTowerStrategy(2), ALONE),
        (
            lambda: kt.SyncReplicasStrategy(replicas_to_aggregate=1, towers=2),
            ALONE,
        ),
        (lambda: kt.TowerStrategy(1), IN_COMMON),
        (kt.NoOpStrategy, IN_COMMON),
    ],
)
def test_steps_that_are_not_divided(path, make, phases):
    """Of towers that have no step in common, of one tower, and of none."""
    _, timeline, found = fit_with_timeline(path, strategy=make(), epochs=2)
    assert len(found["step"]) == 2 * STEPS
    assert list(timeline.phases) == phases
    # The rows of towers are behind that of the host.
    rows = {1, 2} if phases is ALONE else {0}
    assert {e["tid"] for e in found["step"]} <= rows
    if phases is IN_COMMON:
        # Of steps that take no time at all, callbacks may take longer.
        advice = timeline.advice
        assert "not divided into phases" in advice or "callbacks" in advice


def test_eager_steps_are_not_measured(path):
    _, timeline, found = fit_with_timeline(path, linear(run_eagerly=True))
    assert "compute" not in found
    assert "leave out run_eagerly=True" in timeline.advice


def test_a_long_fit_keeps_its_last_steps(path, monkeypatch):
    # Whole reads are kept: two steps at a time, of which the first goes.
    monkeypatch.setattr(timeline_lib, "_KEPT", 3)
    monkeypatch.setattr(timeline_lib, "_READ_EVERY", 2)
    timeline = kt.Timeline(path, steps=2)
    with kt.TowerStrategy(2):
        fit(linear(), 3, callbacks=[timeline])
    found, last = read_trace(path), {3 * STEPS - 2, 3 * STEPS - 1}
    for name in ("compute", "reduction", "update", "input"):
        assert {e["args"]["step"] for e in found[name]} == last
    assert timeline.phases["compute"] > 0


def test_with_a_list_of_callbacks_of_keras(path):
    model, seen = linear(), []
    mine = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(batch)
    )
    listed = keras.callbacks.CallbackList(
        [kt.Timeline(path), mine], add_history=True, model=model, epochs=1
    )
    before = list(listed.callbacks)
    with kt.TowerStrategy(2):
        fit(model, callbacks=listed)
    assert listed.callbacks == before
    assert seen == list(range(STEPS))
    assert len(read_trace(path)["compute"]) == STEPS * 2


def draws(x):
    """Draws by TensorFlow, whose seed is the number of operations before."""
    return x + tf.random.normal(tf.shape(x))


# Marks must not change what TensorFlow's graph optimizer fuses.
@pytest.mark.optimized
@pytest.mark.parametrize("each_tower_traces", sample_of([True, False]))
def test_weights_are_the_same_without(path, each_tower_traces):
    def trained(*callbacks):
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        if each_tower_traces:
            model, options = linear(keras.layers.Lambda(draws)), {}
        else:
            drops = keras.layers.Dropout(0.3)
            model = linear(drops, steps_per_execution=3)
            options = {"validation_data": (X[:20], Y[:20])}
        with kt.TowerStrategy(2):
            history = fit(model, 2, callbacks=callbacks, **options)
            weights = model.get_weights()
            if not each_tower_traces:
                # What is traced anew draws by TensorFlow from the beginning.
                fit(model)
        return [*weights, *model.get_weights()], history

    weights, history = trained(kt.Timeline(path))
    wanted, expected = trained()
    assert history == expected
    assert_all_close(weights, wanted, 0)
    assert len(read_trace(path)["compute"]) == 2 * STEPS * 2


class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            raise KeyboardInterrupt


def test_fits_after_one_that_was_interrupted(path, monkeypatch):
    finish, marked = step_clock.StepMarks.finish, []
    monkeypatch.setattr(
        step_clock.StepMarks, "finish", lambda of: marked.append(finish(of))
    )
    model, timeline = linear(), kt.Timeline(path)
    with kt.TowerStrategy(2):
        with pytest.raises(KeyboardInterrupt):
            fit(model, callbacks=[timeline, Fails()])
        # What there is has been written.
        assert len(read_trace(path)["compute"]) == 3 * 2
        traces = len(marked)
        assert traces > 0
        fit(model)
        model.evaluate(X, Y, verbose=0)
        assert len(marked) == traces, "a fit without Timeline has marks"
        fit(model, callbacks=[timeline])
    assert len(marked) > traces
    assert len(read_trace(path)["compute"]) == STEPS * 2


def test_a_folder_that_is_gone_loses_no_history(tmp_path, caplog, capsys):
    path = tmp_path / "folder" / "trace.json"
    timeline = kt.Timeline(path)
    removes = keras.callbacks.LambdaCallback(
        on_train_end=lambda logs: shutil.rmtree(path.parent)
    )
    with kt.TowerStrategy(2):
        history = fit(linear(), callbacks=[timeline, removes])
    assert len(history["loss"]) == 1
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert str(path) in record.getMessage()
    assert "No such file" in record.getMessage()
    assert timeline.phases["compute"] > 0
    assert "compute" in capsys.readouterr().out


def fitted(*callbacks):
    with kt.TowerStrategy(2):
        fit(linear(), callbacks=callbacks)


def called(method, path):
    with kt.TowerStrategy(2):
        getattr(linear(), method)(X, verbose=0, callbacks=[kt.Timeline(path)])


REFUSED = {
    "no path": (lambda p: kt.Timeline(None), "give a text or"),
    "no step": (lambda p: kt.Timeline(p, steps=0), "steps=0"),
    "a folder": (lambda p: fitted(kt.Timeline(p.parent)), "cannot write"),
    "no name": (lambda p: fitted(kt.Timeline("a\0b")), "cannot write"),
    "two": (lambda p: fitted(kt.Timeline(p), kt.Timeline(p)), "give one"),
    "wrapped": (lambda p: fitted(kt.ChiefOnly(kt.Timeline(p))), "without Chi"),
    "evaluate": (lambda p: called("evaluate", p), "not evaluate or predict:"),
    "predict": (lambda p: called("predict", p), "not evaluate or predict"),
    "no strategy": (
        lambda p: fit(linear(), callbacks=[kt.Timeline(p)]),
        "this fit has none: call it inside a block",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_uses_are_refused_and_write_nothing(path, name):
    act, message = REFUSED[name]
    with pytest.raises(kt.TowerError, match=message):
        act(path)
    assert not path.exists()


def test_determinism_forbids_the_clock(path, monkeypatch):
    monkeypatch.setattr(compat, "is_op_determinism_enabled", lambda: True)
    with pytest.raises(kt.TowerError, match="enable_op_determinism"):
        fitted(kt.Timeline(path))
