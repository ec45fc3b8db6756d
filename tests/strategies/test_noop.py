"""A strategy that runs epochs, steps and callbacks, and computes nothing."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers import compat
from keras_towers.fit.calls import noop
from tests.exactness import models as m
from tests.kit.compare import weights_of
from tests.kit.training import compiled
from tests.strategies.test_bad_input import Before

X, Y = m.FEATURES, m.LABELS


class Told(keras.callbacks.Callback):
    """Everything that a callback is told, in order."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __getattribute__(self, name):
        if not name.startswith("on_") or name.endswith(
            ("_train_begin_", "set")
        ):
            return super().__getattribute__(name)

        def note(*args, logs=None):
            self.calls.append((name, *(a for a in args if isinstance(a, int))))

        return note


def told(act, strategy=None):
    model, callback = compiled()(), Told()
    if strategy is None:
        act(model, callback)
    else:
        with strategy:
            act(model, callback)
    return callback.calls


def dataset(batches=4):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).take(batches)


class Lazy(keras.utils.PyDataset):
    """Data that says how long it is, and is asked for nothing else."""

    def on_epoch_begin(self):
        raise AssertionError("told")

    on_epoch_end = on_epoch_begin

    def __len__(self):
        return 5

    def __getitem__(self, index):
        raise AssertionError("read")


class Unread:
    """Batches that a dataset may be asked for only to find its end."""

    def __init__(self):
        self.read = 0

    def dataset(self, known):
        def count(x):
            self.read += 1
            return x

        def counted(x, y):
            read = tf.py_function(count, [x], x.dtype)
            return tf.ensure_shape(read, x.shape), y

        data = dataset().map(counted)
        return data if known else data.filter(lambda x, y: True)


CALLS = {
    "arrays": {"x": X, "y": Y, "epochs": 2},
    "uneven": {"x": X[:53], "y": Y[:53], "batch_size": 8},
    "dataset": {"x": dataset(), "epochs": 2},
    "unknown length": {"x": dataset().filter(lambda x, y: True), "epochs": 2},
    "steps": {"x": dataset().repeat(), "epochs": 3, "steps_per_epoch": 2},
    "too few": {"x": dataset(), "epochs": 2, "steps_per_epoch": 6},
    "part of it": {"x": X, "y": Y, "epochs": 3, "steps_per_epoch": 1},
    "resumed": {"x": X, "y": Y, "epochs": 4, "initial_epoch": 2},
    "validation": {
        "x": X,
        "y": Y,
        "epochs": 4,
        "validation_split": 0.3,
        "validation_freq": 2,
    },
    "validation data": {
        "x": X,
        "y": Y,
        "validation_data": dataset(),
        "validation_steps": 2,
    },
    "class weights": {"x": X, "y": Y, "class_weight": {0: 1.0, 1: 2.0, 2: 1}},
}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    ("name", "steps_per_execution"),
    [
        *((name, 1) for name in CALLS),
        *((name, 3) for name in ("uneven", "unknown length", "too few")),
    ],
)
def test_callbacks_are_told_what_keras_tells(name, steps_per_execution):
    def act(model, callback):
        model.steps_per_execution = steps_per_execution
        model.fit(verbose=0, callbacks=[callback], **CALLS[name])

    assert told(act, kt.NoOpStrategy()) == told(act)


@pytest.mark.filterwarnings("error::UserWarning")
def test_no_data():
    model, callback = compiled()(), Told()
    was = Before(model)
    with kt.NoOpStrategy():
        history = model.fit(
            epochs=3, steps_per_epoch=5, verbose=0, callbacks=[callback]
        )
    assert history.epoch == [0, 1, 2]
    assert history.history == {}
    ends = [call for call in callback.calls if call[0] == "on_train_batch_end"]
    assert len(ends) == 15
    was.assert_still()


class Ends(keras.callbacks.Callback):
    """Fails where steps go on for ever."""

    def on_train_batch_begin(self, batch, logs=None):
        assert batch < 100

    on_test_batch_begin = on_train_batch_begin


class Empty(keras.utils.PyDataset):
    """Data of no batch."""

    def __len__(self):
        return 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"x": X[:0], "y": Y[:0]}, "the dataset is empty"),
        ({"x": dataset(0)}, "the dataset is empty"),
        ({"x": dataset(0), "steps_per_epoch": 3}, "the dataset is empty"),
        ({"x": Empty()}, "the dataset is empty"),
        ({"steps_per_epoch": -1}, "steps_per_epoch=-1"),
        ({"x": X, "y": Y, "steps_per_epoch": -2}, "steps_per_epoch=-2"),
        ({"x": dataset().repeat(), "steps_per_epoch": -1}, "whole number, 1"),
        ({"x": X, "y": Y, "batch_size": -100}, "batch_size=-100"),
    ],
)
def test_no_step(given, said):
    model, callback = compiled()(), Told()
    was = Before(model)
    with pytest.raises(kt.TowerError, match=said), kt.NoOpStrategy():
        model.fit(verbose=0, callbacks=[callback, Ends()], **given)
    assert not callback.calls
    was.assert_still()


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    "given",
    [
        {"validation_data": (X[:0], Y[:0])},
        {"validation_data": dataset(0)},
        {
            "validation_data": dataset().filter(lambda x, y: True),
            "validation_steps": -1,
        },
    ],
)
def test_validation_of_no_step(given):
    def act(model, callback):
        model.fit(X, Y, verbose=0, callbacks=[callback, Ends()], **given)

    assert told(act, kt.NoOpStrategy()) == told(act)


def test_neither_data_nor_steps():
    model = compiled()()
    was = Before(model)
    with (
        pytest.raises(kt.TowerError, match="steps_per_epoch"),
        kt.NoOpStrategy(),
    ):
        model.fit(epochs=3)
    was.assert_still()


@pytest.mark.parametrize(
    "optimizer",
    [
        m.momentum,
        lambda: keras.optimizers.AdamW(
            0.1, use_ema=True, ema_overwrite_frequency=2
        ),
        lambda: keras.optimizers.LossScaleOptimizer(m.momentum()),
    ],
)
def test_nothing_changes(optimizer):
    model = compiled(optimizer=optimizer)()
    for _ in range(3):
        # Not fit, whose end puts averages in place of the weights.
        model.train_on_batch(X, Y)
    before = weights_of(model)
    state = [v.numpy() for v in model.optimizer.variables]
    with kt.NoOpStrategy():
        model.fit(X, Y, epochs=3, verbose=0, validation_data=(X, Y))
        assert model.train_on_batch(X, Y) == []
        assert model.train_on_batch(X, Y, return_dict=True) == {}
    for name, value in weights_of(model).items():
        np.testing.assert_array_equal(value, before[name])
    for value, was in zip(model.optimizer.variables, state, strict=True):
        np.testing.assert_array_equal(value.numpy(), was)


def test_it_trains_as_ever_afterwards():
    model, other = compiled()(), compiled()()
    with kt.NoOpStrategy():
        model.fit(X, Y, epochs=2, verbose=0, validation_data=(X, Y))
    histories = []
    for one in (model, other):
        keras.utils.set_random_seed(3)
        history = one.fit(X, Y, verbose=0, validation_data=(X, Y))
        histories.append(history.history)
    assert histories[0] == histories[1]
    with kt.TowerStrategy(2):
        model.fit(X, Y, verbose=0)


def test_data_is_not_read():
    unread = Unread()
    model = compiled()()
    with kt.NoOpStrategy():
        model.fit(unread.dataset(known=True), epochs=3, verbose=0)
        model.fit(Lazy(workers=2), epochs=3, verbose=0, validation_data=Lazy())
        assert unread.read == 0
        model.fit(unread.dataset(known=False), verbose=0)
    assert unread.read == 4


def test_after_an_error_everything_is_as_it_was():
    class Fail(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    model = compiled()()
    model.fit(X, Y, verbose=0)
    was, function = Before(model), model.train_function
    with pytest.raises(KeyboardInterrupt), kt.NoOpStrategy():
        model.fit(X, Y, verbose=0, validation_data=(X, Y), callbacks=[Fail()])
    was.assert_still()
    assert model.train_function is function
    names = {"make_train_function", "make_test_function"}
    assert not names & set(vars(model))
    assert "finalize_variable_values" not in vars(model.optimizer)


def test_a_model_built_inside():
    with kt.NoOpStrategy():
        model = compiled()()
        was = weights_of(model)
        model.fit(X, Y, verbose=0)
        for name, value in weights_of(model).items():
            np.testing.assert_array_equal(value, was[name])
    assert model._distribute_strategy is None
    for variable in model.variables:
        assert not isinstance(variable._value, compat.DistributedVariable)
    assert model.fit(X, Y, verbose=0).history["loss"]


def not_built():
    model = keras.Sequential([keras.layers.Dense(3)])
    model.compile(m.momentum(), m.cross_entropy())
    return model


class Batches(keras.utils.PyDataset):
    """Data whose shapes are those of its batches."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[:4], Y[:4]


@pytest.mark.parametrize("kind", ["arrays", "dataset", "sequence"])
def test_a_model_that_is_not_built_gets_its_weights(tmp_path, kind):
    unread = Unread()
    given = {
        "arrays": (X, Y),
        "dataset": (unread.dataset(known=True),),
        "sequence": (Batches(),),
    }[kind]
    path = str(tmp_path / "kept.weights.h5")
    keep = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
    at_start = []
    begin = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: at_start.extend(model.get_weights())
    )
    model = not_built()
    with kt.NoOpStrategy():
        model.fit(*given, verbose=0, callbacks=[keep, begin])
    assert unread.read == 0
    assert model.optimizer.built
    model.load_weights(path)
    for value, was in zip(model.get_weights(), at_start, strict=True):
        np.testing.assert_array_equal(value, was)
    for variable in model.variables:
        assert not isinstance(variable._value, compat.DistributedVariable)
    model.fit(X, Y, verbose=0)


def test_a_batch_builds_a_model():
    model = not_built()
    with kt.NoOpStrategy():
        model.train_on_batch(X, Y)
    assert len(model.get_weights()) == 2


def test_a_model_that_is_not_built_stays_so_without_data():
    model = not_built()
    with kt.NoOpStrategy():
        model.fit(steps_per_epoch=2, verbose=0)
    assert not model.built
    model.fit(X, Y, verbose=0)


def test_a_model_of_another_strategy():
    with kt.TowerStrategy(2).scope():
        model = compiled()()
    with (
        pytest.raises(kt.TowerError, match="lives on another"),
        kt.NoOpStrategy() as strategy,
    ):
        strategy._components.calls.run(
            "fit", keras.Model.fit, model, (X, Y), {}
        )


def test_progress_bar(capsys):
    with kt.NoOpStrategy():
        compiled()().fit(epochs=2, steps_per_epoch=7)
    assert "Epoch 2/2" in capsys.readouterr().out


def test_a_real_strategy_by_name():
    strategy = kt.strategy("noop")
    assert isinstance(strategy, kt.NoOpStrategy)
    assert isinstance(strategy, tf.distribute.Strategy)
    assert strategy.num_replicas_in_sync == 1
    assert "nothing is computed" in strategy.describe()
    assert kt.strategy("noop", logs={"loss": 1.0}).logs == {"loss": 1.0}
    with strategy.scope():
        variable = tf.Variable(1.0)
        strategy.run(lambda: variable.assign_add(1.0))
    assert float(variable.numpy()) == 2.0


def test_steps_alone():
    steps = noop.Steps(X, batch_size=10)
    assert [begin for begin, _, _ in iter(steps._enumerate_iterator())] == list(
        range(7)
    )
