"""A strategy that runs epochs, steps and callbacks, and computes nothing."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.inspection.conformance import case_models as m
from keras_towers.inspection.conformance.outcomes import assert_ordinary
from tests.kit.compare import assert_all_close, assert_close
from tests.kit.sampling import sample_of
from tests.kit.training import linear
from tests.strategies.async_cases import Pieces, callback
from tests.strategies.before import Before

pytestmark = pytest.mark.alternate

X, Y = m.FEATURES, m.LABELS
# Quicker than a trace, where anything is computed.
make = functools.partial(linear, metrics=["accuracy"], run_eagerly=True)


def fit(model, x=X, y=Y, **options):
    """``fit``; data other than arrays has its targets."""
    y = y if isinstance(x, np.ndarray) else None
    return model.fit(x, y, **{"verbose": 0, **options})


class Events(keras.callbacks.Callback):
    """Notes each event of a callback, in order."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(*args, logs=None):
            self.calls.append((name, *(a for a in args if isinstance(a, int))))
            # Fails where steps go on for ever.
            assert len(self.calls) < 1000

        return note


def dataset(batches=4):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).take(batches)


UNKNOWN = dataset().filter(lambda x, y: True)


def counted(read):
    """Batches that note in a list that they are read."""

    def count(x):
        read.append(len(x))
        return x

    def counting(x, y):
        return tf.ensure_shape(tf.py_function(count, [x], x.dtype), x.shape), y

    return dataset().map(counting)


CALLS = {
    "uneven": {"x": X[:29], "y": Y[:29], "batch_size": 8, "epochs": 2},
    "unknown length": {"x": UNKNOWN, "epochs": 2},
    "steps": {"x": dataset().repeat(), "epochs": 3, "steps_per_epoch": 2},
    "too few": {"x": dataset(), "epochs": 2, "steps_per_epoch": 6},
    "resumed": {"epochs": 3, "initial_epoch": 2},
    "split": {"epochs": 2, "validation_split": 0.3, "validation_freq": 2},
    "validated": {"validation_data": dataset(), "validation_steps": 2},
    "no batch": {"validation_data": dataset(0)},
}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("name", sample_of(CALLS))
def test_callbacks_get_the_events_of_keras(name):
    def events_of(steps_per_execution):
        model, events = make(), Events()
        model.steps_per_execution = steps_per_execution
        fit(model, callbacks=[events], **CALLS[name])
        return events.calls

    for steps in (1, 3):
        wanted = events_of(steps)
        with kt.NoOpStrategy():
            assert events_of(steps) == wanted


@pytest.mark.filterwarnings("error::UserWarning")
def test_without_data_callbacks_run_as_many_steps_as_given(capsys):
    model, events = make(), Events()
    was = Before(model)
    with kt.NoOpStrategy():
        history = model.fit(epochs=3, steps_per_epoch=5, callbacks=[events])
    assert (history.epoch, history.history) == ([0, 1, 2], {})
    ends = [call for call in events.calls if call[0] == "on_train_batch_end"]
    assert len(ends) == 15
    printed = capsys.readouterr()
    assert "Epoch 3/3" in printed.out
    assert 'give logs={"loss": 0.5}' in printed.err
    assert "give logs" not in repr(kt.NoOpStrategy(logs={"loss": 1.0}))
    was.assert_still()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"x": X[:0], "y": Y[:0]}, "the dataset is empty"),
        ({"x": dataset(0)}, "the dataset is empty"),
        ({"x": None}, "neither data nor .* steps_per_epoch"),
        ({"x": None, "steps_per_epoch": -1}, "steps_per_epoch=-1"),
        ({"batch_size": -100}, "batch_size=-100"),
    ],
)
def test_fit_without_a_step_is_refused(given, said):
    model, events = make(), Events()
    was = Before(model)
    with pytest.raises(kt.TowerError, match=said), kt.NoOpStrategy():
        fit(model, callbacks=[events], **given)
    assert not events.calls
    was.assert_still()


def test_data_is_not_read():
    read, model = [], make()
    with kt.NoOpStrategy():
        fit(model, counted(read), epochs=3, validation_data=counted(read))
        assert not read
        fit(model, counted(read).filter(lambda x, y: True))
    assert len(read) == 4


def _averaged():
    inner = m.momentum(use_ema=True, ema_overwrite_frequency=2)
    return keras.optimizers.LossScaleOptimizer(inner)


def test_weights_and_optimizer_stay_as_they_are():
    model = linear(optimizer=_averaged, run_eagerly=True)
    for _ in range(3):
        # Not fit, whose end puts averages in place of the weights.
        model.train_on_batch(X, Y)
    was = Before(model)
    state = [v.numpy() for v in model.optimizer.variables]
    with kt.NoOpStrategy():
        fit(model, epochs=3, validation_data=(X, Y))
        assert model.train_on_batch(X, Y) == []
        assert model.train_on_batch(X, Y, return_dict=True) == {}
    was.assert_still()
    assert_all_close(model.optimizer.variables, state, 0)


@pytest.mark.parametrize("data", sample_of(["dataset", Pieces()]))
def test_a_model_that_is_not_built_gets_its_weights(tmp_path, data):
    read, at_start = [], []
    data = counted(read) if isinstance(data, str) else data
    path = str(tmp_path / "kept.weights.h5")
    keep = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
    begin = callback(
        on_train_begin=lambda logs: at_start.extend(model.get_weights())
    )
    model = keras.Sequential([keras.layers.Dense(3)])
    model.compile(m.momentum(), m.cross_entropy(), run_eagerly=True)
    with kt.NoOpStrategy():
        fit(model, None, steps_per_epoch=2)
        assert not model.built
        fit(model, data, callbacks=[keep, begin])
    assert not read
    assert model.optimizer.built
    model.load_weights(path)
    assert_all_close(model.get_weights(), at_start, 0)
    assert_ordinary(model)
    fit(model)


def test_logs_for_callbacks_that_need_a_number(tmp_path):
    given = {"loss": 0.5, "accuracy": 0.25}
    model, seen = make(), []
    callbacks = [
        callback(on_train_batch_end=lambda batch, logs: seen.append(logs)),
        keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}-{val_loss}.keras"),
        keras.callbacks.EarlyStopping("val_loss", patience=2),
    ]
    with kt.strategy("noop", logs=given):
        history = fit(
            model, epochs=9, validation_data=(X, Y), callbacks=callbacks
        )
        assert model.train_on_batch(X, Y) == [0.5, 0.25]
    both = {**given, **{f"val_{name}": given[name] for name in given}}
    assert history.history == {name: [both[name]] * 3 for name in both}
    assert seen[0] == given
    assert (tmp_path / "3-0.5.keras").exists()


def test_callbacks_may_compute_and_leave():
    """Behind the block the model trains as ever, also after an error."""
    with kt.NoOpStrategy():
        # What is built inside is no strategy's afterwards.
        model = make()
    other = make()
    for one in (model, other):
        one.train_on_batch(X, Y)
    wanted = model.evaluate(X, Y, verbose=0)
    was, function = Before(model), model.train_function

    def compute(batch, logs):
        assert_close(model.evaluate(X, Y, verbose=0), wanted)
        assert model.train_on_batch(X, Y) == []
        raise KeyboardInterrupt

    callbacks = [callback(on_train_batch_end=compute)]
    with pytest.raises(KeyboardInterrupt), kt.NoOpStrategy():
        fit(model, validation_data=(X, Y), callbacks=callbacks)
    was.assert_still()
    assert model.train_function is function
    mine, others = (
        fit(one, shuffle=False, validation_data=(X, Y)).history
        for one in (model, other)
    )
    assert mine == others
