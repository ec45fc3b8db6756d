"""Layers and variables that only a step builds or creates."""

import contextlib
import random

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import assert_exact

pytestmark = pytest.mark.alternate

X = m.FEATURES[:24]


class Headed(keras.Model):
    """Its ``call`` uses none of its heads, and its step only one.

    The step also writes a variable that is nobody's.
    """

    def __init__(self):
        super().__init__()
        self.policy = keras.layers.Dense(3)
        self.value = keras.layers.Dense(1)
        self.hidden = (lambda counter: lambda: counter)(tf.Variable(0.0))

    def call(self, inputs):
        return inputs

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.sqrt(tf.reduce_mean(tf.square(self.policy(data))))
        self.hidden().assign_add(1.0)
        weights = self.policy.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def test_exact_from_the_first_step_on():
    def make():
        keras.utils.set_random_seed(1)
        model = Headed()
        model.compile(m.momentum(), jit_compile=False)
        return model

    def act(model):
        model.fit(X, batch_size=8, shuffle=False, verbose=0)
        return model.policy.get_weights(), model.hidden().numpy()

    assert_exact(make, act, kt.TowerStrategy(2))


class Smallest(keras.metrics.Metric):
    """The smallest of 1 and what each batch is off; 0 once it was reset."""

    def __init__(self):
        super().__init__(name="smallest")
        self.least = self.add_weight(shape=(), initializer="ones")

    def update_state(self, y, y_pred, sample_weight=None):
        off = tf.reduce_max(tf.abs(y - y_pred))
        self.least.assign(tf.minimum(self.least, off))

    def result(self):
        return self.least + 0.0


class SmallestLater(Smallest):
    """Makes its state when it is first updated."""

    def __init__(self):
        keras.metrics.Metric.__init__(self, name="smallest_later")

    def update_state(self, y, y_pred, sample_weight=None):
        if not self.variables:
            self.least = self.add_weight(shape=(), initializer="ones")
        super().update_state(y, y_pred, sample_weight)


class Drawn(keras.layers.Layer):
    """Draws a seed when it is built."""

    def build(self, shape):
        normal = keras.initializers.RandomNormal()
        self.kernel = self.add_weight(shape=(shape[-1], 3), initializer=normal)

    def call(self, x):
        return x @ self.kernel


class Shuffled(keras.utils.PyDataset):
    """Draws an order when an epoch begins."""

    def __init__(self):
        super().__init__()
        self.order = list(range(len(X)))

    def __len__(self):
        return 3

    def __getitem__(self, index):
        rows = self.order[8 * index : 8 * index + 8]
        return X[rows], X[rows, :3]

    def on_epoch_begin(self):
        random.shuffle(self.order)


@pytest.mark.parametrize("method", ["fit", "evaluate", "train_on_batch"])
def test_nothing_is_built_before_one_device_builds_it(method):
    """Metrics are reset, data are shuffled and layers unfrozen before."""

    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([Drawn(), keras.layers.Dense(3)])
        model.layers[1].trainable = False
        metrics = [Smallest(), SmallestLater()]
        model.compile(m.momentum(), "mse", metrics=metrics, jit_compile=False)
        return model

    def act(model):
        def unfreeze(logs):
            model.layers[1].trainable = True

        begins = keras.callbacks.LambdaCallback(on_train_begin=unfreeze)
        if method == "fit":
            fitted = {"epochs": 2, "verbose": 0, "callbacks": [begins]}
            return model.fit(Shuffled(), **fitted).history
        if method == "evaluate":
            return [model.evaluate(X, X[:, :3], verbose=0) for _ in range(2)]
        return [model.train_on_batch(X, X[:, :3]) for _ in range(2)]

    found = assert_exact(make, act, kt.TowerStrategy(2), in_graph=True).returned
    first = found["smallest"][0] if method == "fit" else found[0][1]
    assert first > 0


def test_a_checkpoint_that_is_restored_before_the_model_is_built(
    tmp_path, caplog
):
    """TensorFlow then restores not all weights, on one device, too."""

    def make():
        keras.utils.set_random_seed(1)
        model = m.Lazy()
        model.compile(m.momentum(), "mse", jit_compile=False)
        return model

    def act(model):
        fitted = {"batch_size": 8, "shuffle": False, "verbose": 0}
        return model.fit(X, X[:, :3], **fitted).history

    trained = make()
    act(trained)
    path = tf.train.Checkpoint(model=trained).save(tmp_path / "saved")

    def restored():
        model = make()
        tf.train.Checkpoint(model=model).restore(path)
        return model

    assert_exact(restored, act, kt.TowerStrategy(2), in_graph=True)
    assert "Build the model first" in caplog.text


class Lazy(keras.Model):
    """Builds a layer, and then fails."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.compile("sgd", "mse")

    def call(self, inputs):
        raise KeyError(f"no {self.dense(inputs).shape[-1]}")


def test_the_error_of_a_model_that_cannot_be_built():
    errors = []
    for block in (contextlib.nullcontext(), kt.AsyncTowerStrategy(2)):
        with pytest.raises(KeyError, match="no 3") as error, block:
            Lazy().fit(X, X[:, :3], verbose=0)
        errors.append(str(error.value).splitlines()[-1])
    alone, towers = errors
    assert towers == alone
