"""Random layers on towers draw what they draw on one device."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import assert_exact, close
from tests.kit.long import long_but
from tests.kit.training import X, Y, classifier, compiled, fit

# Of 53 examples and batches of 16: the last batch has 5.
IMAGES = np.random.default_rng(0).random((len(X), 6, 6, 3), "float32")
SERIES = np.random.default_rng(1).normal(size=(len(X), 5, 4)).astype("float32")


@keras.saving.register_keras_serializable("tests")
class Noise(layers.Layer):
    """Adds a draw of its own."""

    def __init__(self, draw, seed=None, **kwargs):
        super().__init__(**kwargs)
        self.draw = draw
        self.seed = keras.random.SeedGenerator(3) if seed is None else seed

    def call(self, x):
        return x + keras.ops.cast(self.draw(x, self.seed), x.dtype)


def _rows(x):
    return keras.ops.shape(x)[0]


class Sampling(layers.Layer):
    """Of a variational autoencoder."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed = keras.random.SeedGenerator(7)

    def call(self, inputs):
        mean, spread = keras.ops.split(inputs, [3], 1)
        shape = keras.ops.shape(mean)
        noise = keras.random.normal(shape, seed=self.seed)
        return mean + keras.ops.exp(0.5 * spread[:, :3]) * noise


class Attention(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.MultiHeadAttention(2, 3, dropout=0.3)

    def build(self, shape):
        self.inner.build(shape, shape)

    def call(self, x, training=None):
        return self.inner(x, x, training=training)


class Always(layers.Dropout):
    """Drops in predictions too."""

    def call(self, x, training=None):
        return super().call(x, training=True)


VECTORS = {
    "dropout": lambda: [layers.Dropout(0.4)],
    "several": lambda: [
        layers.Dropout(0.4, seed=1),
        layers.Dense(5, "relu"),
        layers.GaussianNoise(0.3, seed=1),
        layers.Dropout(0.3),
    ],
    "one for all": lambda: [layers.Dropout(0.4, noise_shape=(1, 7))],
    "one for each": lambda: [layers.Dropout(0.4, noise_shape=(None, 1))],
    "gaussian": lambda: [layers.GaussianDropout(0.3)],
    "alpha": lambda: [layers.AlphaDropout(0.3)],
    "normal": lambda: [
        Noise(lambda x, s: keras.random.normal(keras.ops.shape(x), seed=s))
    ],
    "truncated": lambda: [
        Noise(lambda x, s: keras.random.truncated_normal((_rows(x), 7), seed=s))
    ],
    "uniform": lambda: [
        Noise(lambda x, s: keras.random.uniform((_rows(x), 1), seed=s))
    ],
    "integers": lambda: [
        Noise(lambda x, s: keras.random.randint((_rows(x), 7), 0, 3, seed=s))
    ],
    "categories": lambda: [
        Noise(lambda x, s: keras.random.categorical(x, 7, seed=s))
    ],
    "fixed seed": lambda: [
        Noise(lambda x, s: keras.random.normal(keras.ops.shape(x), seed=s), 5)
    ],
    "no seed": lambda: [
        Noise(lambda x, s: keras.random.normal(keras.ops.shape(x)))
    ],
    # Weights' noise, of as many rows as the towers have examples.
    "of weights": lambda: [
        Noise(lambda x, s: keras.random.normal((8, 7), seed=s)[:1])
    ],
    "sampling": lambda: [layers.Dense(6), Sampling()],
    "predictions": lambda: [Always(0.4)],
}
SEQUENCES = {
    "spatial": lambda: [layers.SpatialDropout1D(0.4)],
    "attention": lambda: [Attention()],
    "lstm": lambda: [
        layers.LSTM(
            3, dropout=0.3, recurrent_dropout=0.2, return_sequences=True
        ),
        layers.Dropout(0.3),
    ],
    "gru": lambda: (
        [layers.Bidirectional(layers.GRU(3, dropout=0.3))]
        + [layers.Dropout(0.3)]
    ),
}
PICTURES = {
    "spatial images": lambda: [
        layers.Conv2D(4, 3),
        layers.SpatialDropout2D(0.4),
    ],
    "flip": lambda: [layers.RandomFlip()],
    "rotation": lambda: [layers.RandomRotation(0.2)],
    "zoom": lambda: [layers.RandomZoom(0.2)],
    "contrast": lambda: [layers.RandomContrast(0.3)],
}
CASES = {
    **{name: (X, middle) for name, middle in VECTORS.items()},
    **{name: (SERIES, middle) for name, middle in SEQUENCES.items()},
    **{name: (IMAGES, middle) for name, middle in PICTURES.items()},
}
# Draw in evaluation and prediction, too, from each kind of seed; or must not.
NOT_ONLY_IN_TRAINING = (
    "dropout",
    "normal",
    "fixed seed",
    "no seed",
    "sampling",
    "predictions",
)


def _assert_as_one_device(name, strategy):
    x, middle = CASES[name]

    def build():
        keras.utils.set_random_seed(1)
        keras.random.normal(())  # Where draws without a seed come from.
        return keras.Sequential(
            [
                keras.Input(x.shape[1:]),
                *([layers.Dense(7)] if x is X else []),
                *middle(),
                layers.Flatten(),
                layers.Dense(3),
            ]
        )

    def act(model):
        keras.random.normal(())
        if name not in NOT_ONLY_IN_TRAINING:
            return fit(model, epochs=2, x=x)
        history = fit(model, epochs=2, x=x, validation_data=(x[:9], Y[:9]))
        scores = model.evaluate(x, Y, 16, verbose=0)
        return history, scores, model.predict(x, 10, verbose=0)

    assert_exact(compiled(build), act, strategy, tolerance=4e-6)


@pytest.mark.parametrize("name", long_but([*CASES][::4].__contains__, CASES))
def test_three_towers(name):
    _assert_as_one_device(name, kt.TowerStrategy(3, random="global"))


@pytest.mark.parametrize(
    "name, towers",
    long_but(
        lambda case: case in (("several", 8), ("no seed", 2)),
        [("several", 1), ("several", 8), ("predictions", 2), ("no seed", 2)],
    ),
)
def test_other_towers(name, towers):
    _assert_as_one_device(name, kt.TowerStrategy(towers, random="global"))


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: kt.TowerStrategy(3, updates="each", random="global"),
        lambda: kt.ParameterServerTowerStrategy(3, random="global"),
    ],
    ids=["updates each", "parameter server"],
)
def test_other_strategies(strategy):
    _assert_as_one_device("predictions", strategy())


@pytest.mark.core
def test_exact_includes_it():
    assert_exact(
        lambda: classifier(layers.Dropout(0.4, seed=2)),
        fit,
        kt.TowerStrategy(2, exact=True),
    )


@pytest.mark.parametrize(
    "options", [{"steps_per_execution": 3}, {"run_eagerly": True}], ids=str
)
def test_other_loops(options):
    assert_exact(
        lambda: classifier(layers.Dropout(0.4, seed=2), **options),
        lambda model: fit(model, epochs=2),
        kt.TowerStrategy(3, random="global"),
    )


@pytest.mark.parametrize("count", long_but((2).__eq__, [1, 2, 5]))
def test_batches_smaller_than_the_towers(count):
    """Seeds go on in step, also on towers without an example."""

    def act(model):
        for _ in range(3):
            model.train_on_batch(X[:count], Y[:count])
        model.train_on_batch(X[:16], Y[:16])
        return model.predict_on_batch(X[:count])

    assert_exact(
        lambda: classifier(Always(0.4, seed=2)),
        act,
        kt.TowerStrategy(8, random="global"),
    )


def test_each_tower_its_batch():
    """The global batch is made of the batches of the towers, in order."""
    assert_exact(
        lambda: classifier(layers.Dropout(0.4, seed=2)),
        lambda model: model.fit(
            X[:48], Y[:48], batch_size=8, shuffle=False, verbose=0
        ),
        kt.TowerStrategy(3, batches="each", random="global"),
        lambda model: model.fit(
            X[:48], Y[:48], batch_size=24, shuffle=False, verbose=0
        ),
    )


def test_own_train_step_of_a_gan():
    """Latent vectors by the number of examples; two batches in one."""

    class Gan(keras.Model):
        def __init__(self):
            super().__init__()
            self.makes = keras.Sequential(
                [keras.Input((4,)), layers.Dense(6), layers.Dropout(0.3)]
            )
            self.judges = keras.Sequential(
                [keras.Input((6,)), layers.Dropout(0.3), layers.Dense(1)]
            )
            self.seed = keras.random.SeedGenerator(3)
            self.built = True

        def train_step(self, data):
            data = data[0] if isinstance(data, tuple) else data
            rows = tf.shape(data)[0]
            latent = keras.random.normal((rows, 4), seed=self.seed)
            both = tf.concat([self.makes(latent, training=True), data], 0)
            with tf.GradientTape() as tape:
                judged = self.judges(both, training=True)
                loss = tf.reduce_mean(judged**2)
            weights = self.judges.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    def build():
        keras.utils.set_random_seed(1)
        model = Gan()
        model.compile(m.momentum())
        return model

    assert_exact(
        build,
        lambda model: model.fit(X, batch_size=16, shuffle=False, verbose=0),
        kt.TowerStrategy(3, random="global"),
        tolerance=4e-6,
    )


class DrawsLate(keras.Sequential):
    """Draws without a seed for the first time in its step."""

    def train_step(self, data):
        x, y, *_ = data
        noise = keras.random.normal(tf.shape(x))
        return super().train_step((x + 0.1 * noise, y))


@pytest.mark.parametrize("eager", [False, True])
def test_a_first_draw_without_a_seed_in_the_step(eager):
    def make():
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        model = DrawsLate([keras.Input((6,)), layers.Dense(3)])
        model.compile(m.momentum(), "mse", run_eagerly=eager)
        return model

    def trained(strategy):
        model = make()
        with strategy:
            history = model.fit(
                X,
                keras.ops.one_hot(Y, 3),
                batch_size=12,
                epochs=2,
                shuffle=False,
                verbose=0,
            ).history["loss"]
        return history, model.get_weights()

    found = trained(kt.TowerStrategy(3, random="global"))
    wanted = trained(contextlib.nullcontext())
    keras.tree.map_structure(lambda a, b: close(a, b, 4e-6), found, wanted)
