"""What code that runs on towers can ask."""

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m

X, Y = m.FEATURES[:16], m.LABELS[:16]
ALONE = (0, 1, True, "/device:CPU:0", None)

# Which of a model's calls trains.
CALLS = {
    "fit": (lambda model: model.fit(X, Y, verbose=0), True),
    "train_on_batch": (lambda model: model.train_on_batch(X, Y), True),
    "evaluate": (lambda model: model.evaluate(X, Y, verbose=0), False),
    "test_on_batch": (lambda model: model.test_on_batch(X, Y), False),
    "predict": (lambda model: model.predict(X, verbose=0), False),
    "predict_on_batch": (lambda model: model.predict_on_batch(X), False),
}


def answer():
    tower = kt.current_tower()
    return tower.index, tower.total, tower.is_main, tower.device, tower.training


def on_towers(number, training):
    return {
        (index, number, index == 0, f"/device:CPU:{index}", training)
        for index in range(number)
    }


class Asking:
    """A model that asks in a layer, in its loss and in its step."""

    def __init__(self, eagerly=False):
        in_layer, in_loss, in_step = self.seen = [set(), set(), set()]

        class Layer(keras.layers.Layer):
            def call(self, x):
                in_layer.add(answer())
                return x

        class Model(keras.Sequential):
            def train_step(self, data):
                in_step.add(answer())
                return super().train_step(data)

        def loss(y, prediction):
            in_loss.add(answer())
            return m.cross_entropy()(y, prediction)

        self.model = Model([keras.Input((6,)), Layer(), keras.layers.Dense(3)])
        self.model.compile("sgd", loss, run_eagerly=eagerly)

    def answers(self, act):
        """What is said in the layer, the loss and the step of a call."""
        for seen in self.seen:
            seen.clear()
        act(self.model)
        # Keras's own runs of a layer, for its shapes, are on no tower.
        return [
            {one for one in seen if one[-1] is not None} for seen in self.seen
        ]


@pytest.mark.parametrize("towers", [1, 3])
def test_eager_calls_are_those_of_one_device(towers):
    asking = Asking(eagerly=True)
    with kt.TowerStrategy(towers):
        for name, (act, training) in CALLS.items():
            # Steps that run eagerly run as on one device.
            wanted = {(*ALONE[:-1], training)}
            in_layer, in_loss, in_step = asking.answers(act)
            assert in_layer == wanted, name
            assert in_loss == (set() if "predict" in name else wanted), name
            assert in_step == (wanted if training else set()), name


@pytest.mark.parametrize("towers", [1, 2])
def test_traced_steps_are_those_of_one_device(towers):
    in_callback = set()
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: in_callback.add(answer())
    )
    asking = Asking()
    with kt.TowerStrategy(towers):
        in_layer, in_loss, in_step = asking.answers(
            lambda model: model.fit(
                X, Y, 32, 1, 0, [note], validation_data=(X, Y)
            )
        )
    # It is the step of one device that is traced.
    assert in_step == {(*ALONE[:-1], True)}
    assert in_layer == in_loss == in_step | {(*ALONE[:-1], False)}
    # A callback is on no tower; the only one is known to train all the same.
    assert in_callback == {(*ALONE[:-1], True if towers == 1 else None)}


@pytest.mark.parametrize(
    ("eagerly", "expected"),
    # Eager steps are those of one device.
    [(False, on_towers(2, True)), (True, {(*ALONE[:-1], True)})],
    ids=["traced", "eager"],
)
def test_asynchronous_towers_know_their_index(eagerly, expected):
    asking = Asking(eagerly)
    with kt.AsyncTowerStrategy(2):
        answers = asking.answers(lambda model: model.fit(X, Y, 4, 1, 0))
    assert answers == [expected] * 3


def test_outside_of_a_strategy_there_is_one_tower():
    asking = Asking(eagerly=True)
    asking.model.fit(X, Y, verbose=0)
    assert set.union(*asking.seen) == {ALONE}
    with kt.TowerStrategy(2):
        assert answer() == ALONE


@pytest.mark.parametrize(
    "make", [kt.TowerStrategy, tf.distribute.MirroredStrategy]
)
def test_replicas_of_a_custom_loop_know_their_index(make):
    devices = ["/device:CPU:4", "/device:CPU:2"]
    strategy, seen = make(devices), []

    def ask():
        seen.append(answer())
        return tf.constant(kt.current_tower().index)

    values = tf.function(lambda: strategy.run(ask))()
    assert seen == [
        (0, 2, True, devices[0], None),
        (1, 2, False, devices[1], None),
    ]
    # What it says decides what is traced.
    indices = strategy.experimental_local_results(values)
    assert [int(index) for index in indices] == [0, 1]
