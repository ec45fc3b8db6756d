"""What code that runs on towers can ask."""

import dataclasses
from typing import ClassVar

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.training import compiled

X, Y = m.FEATURES[:16], m.LABELS[:16]
FIRST = "/device:CPU:0"


def asked(tower):
    return tower.index, tower.total, tower.is_main, tower.device, tower.training


def expected(towers, training):
    return {
        (index, towers, index == 0, f"/device:CPU:{index}", training)
        for index in range(towers)
    }


class Asking(keras.layers.Layer):
    """A layer, told apart from its building by Keras's own argument."""

    def __init__(self):
        super().__init__()
        # Not in an attribute, which ends as tower 0 leaves it.
        self.note = set().add

    @property
    def seen(self):
        return self.note.__self__

    def call(self, x):
        self.note(asked(kt.current_tower()))
        return x


class AskingModel(keras.Sequential):
    in_step: ClassVar[set] = set()

    def train_step(self, data):
        self.in_step.add(asked(kt.current_tower()))
        return super().train_step(data)


def asking_model():
    layer, in_loss = Asking(), set()
    AskingModel.in_step.clear()

    def loss(y, prediction):
        in_loss.add(asked(kt.current_tower()))
        return keras.losses.sparse_categorical_crossentropy(
            y, prediction, from_logits=True
        )

    model = AskingModel([keras.Input((6,)), layer, keras.layers.Dense(3)])
    model.compile("sgd", loss)
    # What asked while Keras built the model is not of interest.
    layer.seen.clear()
    return model, layer, in_loss


CALLS = {
    "fit": (lambda model: model.fit(X, Y, verbose=0), True),
    "train_on_batch": (lambda model: model.train_on_batch(X, Y), True),
    "evaluate": (lambda model: model.evaluate(X, Y, verbose=0), False),
    "test_on_batch": (lambda model: model.test_on_batch(X, Y), False),
    "predict": (lambda model: model.predict(X, verbose=0), False),
    "predict_on_batch": (lambda model: model.predict_on_batch(X), False),
}


@pytest.mark.parametrize("towers", [1, 3])
@pytest.mark.parametrize("name", CALLS)
def test_in_a_layer(name, towers):
    act, training = CALLS[name]
    model, layer, _ = asking_model()
    with kt.TowerStrategy(towers):
        act(model)
        seen = {s for s in layer.seen if s[-1] is not None}
    assert seen == expected(towers, training)


@pytest.mark.parametrize("eagerly", [False, True])
def test_in_a_loss_and_a_train_step(eagerly):
    model, _, in_loss = asking_model()
    model.run_eagerly = eagerly
    with kt.TowerStrategy(2):
        model.fit(X, Y, verbose=0)
    assert model.in_step == expected(2, True)
    assert {s for s in in_loss if s[-1] is not None} == expected(2, True)


@pytest.mark.parametrize("towers", [1, 2])
def test_validation_does_not_train(towers):
    model, layer, _ = asking_model()
    with kt.TowerStrategy(towers):
        model.fit(X, Y, verbose=0, validation_data=(X, Y))
    seen = {s for s in layer.seen if s[-1] is not None}
    assert seen == expected(towers, True) | expected(towers, False)


@pytest.mark.parametrize("eagerly", [False, True])
def test_on_asynchronous_towers(eagerly):
    model, layer, in_loss = asking_model()
    model.run_eagerly = eagerly
    with kt.AsyncTowerStrategy(2):
        model.fit(X, Y, batch_size=4, verbose=0)
        seen = {s for s in layer.seen if s[-1] is not None}
        assert seen == expected(2, True)
        assert model.in_step == expected(2, True)
        assert {s for s in in_loss if s[-1] is not None} == expected(2, True)
        layer.seen.clear()
        model.train_on_batch(X, Y)
        assert layer.seen == expected(1, True)


def test_in_a_callback_there_is_one_tower():
    seen = set()

    class Ask(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.add(asked(kt.current_tower()))

    with kt.TowerStrategy(2):
        compiled()().fit(X, Y, verbose=0, callbacks=[Ask()])
    assert seen == {(0, 1, True, FIRST, None)}


def test_outside_of_any_strategy():
    wanted = (0, 1, True, FIRST, None)
    assert asked(kt.current_tower()) == wanted
    model, layer, _ = asking_model()
    model.fit(X, Y, verbose=0)
    assert layer.seen == {wanted}
    with kt.TowerStrategy(2):
        assert asked(kt.current_tower()) == wanted
    with kt.TowerStrategy(1):
        model.fit(X, Y, verbose=0)
    assert asked(kt.current_tower()) == wanted


@pytest.mark.parametrize(
    "make", [kt.TowerStrategy, tf.distribute.MirroredStrategy]
)
def test_in_a_loop_of_ones_own(make):
    devices = ["/device:CPU:4", "/device:CPU:2"]
    strategy, seen = make(devices), []

    @tf.function
    def step():
        strategy.run(lambda: seen.append(asked(kt.current_tower())))

    step()
    assert seen == [
        (0, 2, True, devices[0], None),
        (1, 2, False, devices[1], None),
    ]


def test_what_it_says_decides_what_is_traced():
    strategy = kt.TowerStrategy(3)

    @tf.function
    def step():
        return strategy.run(lambda: tf.constant(kt.current_tower().index))

    values = strategy.experimental_local_results(step())
    assert [int(value) for value in values] == [0, 1, 2]


def test_it_is_a_view():
    with pytest.raises(dataclasses.FrozenInstanceError):
        kt.current_tower().index = 3
