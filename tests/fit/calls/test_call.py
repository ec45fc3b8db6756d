"""A call of Keras inside another one, and what a call leaves behind."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.compare import same_model
from tests.kit.ordinary import assert_ordinary
from tests.kit.training import X, Y, classifier, fit

pytestmark = pytest.mark.core


class OwnLogs(keras.Sequential):
    """Steps that report something of their own."""

    def train_step(self, data):
        return {**super().train_step(data), "mine": tf.constant(1.0)}

    def test_step(self, data):
        return {**super().test_step(data), "mine": tf.constant(2.0)}


@pytest.mark.parametrize("strategy", [kt.TowerStrategy, kt.AsyncTowerStrategy])
def test_validation_ends_its_own_steps_alone(strategy):
    model = OwnLogs([keras.Input((X.shape[1],)), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy())
    with strategy(2) as running:
        history = fit(model, validation_data=(X, Y))
    assert history["mine"] == [1.0]
    assert history["val_mine"] == [2.0]
    if strategy is kt.AsyncTowerStrategy:
        assert running.staleness.steps == 4


class Signs(keras.optimizers.SGD):
    """What no sum over towers gives: the signs of the sums."""

    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients(
            [(tf.sign(grad), variable) for grad, variable in grads_and_vars]
        )


def with_held(optimizer):
    """A model whose step calls an optimizer that it does not hold."""

    class Model(keras.Sequential):
        def train_step(self, data):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            weights = self.trainable_weights
            grads = tape.gradient(loss, weights)
            optimizer.apply_gradients(zip(grads, weights, strict=True))
            return {"loss": loss}

    keras.utils.set_random_seed(5)
    model = Model(
        [keras.Input((X.shape[1],)), keras.layers.Dense(3, "softmax")]
    )
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy())
    return model


@pytest.mark.parametrize(
    "optimizer", [Signs, lambda rate: keras.optimizers.SGD(rate, 0.9)]
)
def test_an_optimizer_that_no_model_holds(optimizer):
    reference = with_held(optimizer(0.01))
    model = with_held(optimizer(0.01))
    fit(reference, epochs=2)
    with kt.TowerStrategy(3):
        fit(model, epochs=2)
    same_model(model, reference)


def test_an_optimizer_that_no_model_holds_on_asynchronous_towers():
    optimizer = keras.optimizers.SGD(0.01)
    model = with_held(optimizer)
    with kt.AsyncTowerStrategy(2):
        fit(model, epochs=3)
    assert int(optimizer.iterations) == 12


def test_code_of_ones_own_in_the_middle_of_fit():
    """It is not a step of Keras: its data is not split."""
    found = []
    x = np.arange(6.0)

    class Runs(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            strategy = self.model.distribute_strategy
            sums = strategy.run(tf.reduce_sum, args=(tf.constant(x),))
            found.extend(strategy.experimental_local_results(sums))

    with kt.TowerStrategy(3):
        fit(classifier(), x=X[:16], y=Y[:16], callbacks=[Runs()])
    assert [float(value) for value in found] == [15.0] * 3


def test_a_function_that_was_made_between_calls():
    """It was made for XLA, which cannot compile a step of many devices."""
    reference, model = classifier(), classifier(jit_compile=True)
    fit(reference, epochs=2)
    with kt.TowerStrategy(2):
        fit(model)
        model.make_train_function(force=True)
        fit(model)
    same_model(model, reference)
    assert_ordinary(model)


@pytest.mark.parametrize("make", [None, kt.NoOpStrategy, kt.TowerStrategy])
def test_marked_callbacks_run_where_there_is_one_process(make):
    seen = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(epoch)
    )
    callbacks = [kt.ChiefOnly(note), kt.EveryRank(note)]
    model = classifier()
    if make is None:
        fit(model, epochs=2, callbacks=callbacks)
    else:
        with make():
            fit(model, epochs=2, callbacks=callbacks)
    assert seen == [0, 0, 1, 1]


class OwnLoop(keras.Sequential):
    """A model that makes its train function, and takes no argument for it."""

    def make_train_function(self):
        def train(iterator):
            batch = next(iter(iterator))
            strategy = self.distribute_strategy
            return strategy.run(self.train_step, args=(batch,))

        self.train_function = train


def test_a_train_function_of_ones_own():
    def make():
        keras.utils.set_random_seed(5)
        model = OwnLoop(
            [keras.Input((X.shape[1],)), keras.layers.Dense(3, "softmax")]
        )
        loss = keras.losses.SparseCategoricalCrossentropy()
        model.compile("sgd", loss, run_eagerly=True)
        return model

    reference, model = make(), make()
    fit(reference, epochs=2)
    with kt.TowerStrategy(3):
        fit(model, epochs=2)
    same_model(model, reference)


def test_a_function_that_a_callback_runs_on_the_towers():
    model = classifier()
    seen = []
    with kt.TowerStrategy(3) as strategy:
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)

        @tf.function
        def add(value):
            total.assign_add(value)
            return total.read_value()

        def run(epoch, logs):
            results = strategy.run(add, args=(tf.constant(1.0),))
            seen.extend(strategy.experimental_local_results(results))

        callback = keras.callbacks.LambdaCallback(on_epoch_end=run)
        for eager in (False, True):
            model.run_eagerly = eager
            fit(model, epochs=1, callbacks=[callback])
        run(0, {})
    assert [float(value) for value in seen] == [1.0] * 3 + [2.0] * 3 + [3.0] * 3


class _Slotted:
    """A callable to which there are no weak references."""

    __slots__ = ("step",)

    def __init__(self, step):
        self.step = step

    def __call__(self, iterator):
        return self.step(iterator)


class SlottedLoop(OwnLoop):
    def make_train_function(self):
        super().make_train_function()
        self.train_function = _Slotted(self.train_function)


def test_a_train_function_of_any_type():
    model = SlottedLoop([keras.Input((X.shape[1],)), keras.layers.Dense(3)])
    model.compile("sgd", "mse", run_eagerly=True)
    with kt.TowerStrategy(2):
        for _ in range(2):
            history = model.fit(X, X[:, :3], batch_size=16, verbose=0).history
    assert np.isfinite(history["loss"]).all()
