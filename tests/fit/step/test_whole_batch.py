"""What Keras computes from several examples of a batch at once."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_towers as kt
from keras_towers.fit import told
from tests.kit.compare import assert_exact
from tests.kit.long import long_but

RANDOM = np.random.default_rng(0)
# The last batch has one example, fewer than there are towers.
IMAGES = RANDOM.random((17, 4, 4, 3)).astype("float32")
MASKS = (RANDOM.random((17, 4, 4, 1)) > 0.5).astype("float32")
GROUPS = RANDOM.integers(0, 3, 17)
TARGETS = RANDOM.normal(size=(17, 1)).astype("float32")
TEXTS = tf.constant(RANDOM.choice(["a", "a b", "b c a"], 17))


def segmenter(loss):
    model = keras.Sequential(
        [layers.Input((4, 4, 3)), layers.Conv2D(1, 2, padding="same")]
    )
    model.add(layers.Activation("sigmoid"))
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model, IMAGES, MASKS


def embedding():
    model = keras.Sequential(
        [layers.Input((4, 4, 3)), layers.Flatten(), layers.Dense(4)]
    )
    model.add(layers.UnitNormalization())
    model.compile(keras.optimizers.SGD(0.1), keras.losses.Circle(gamma=2))
    return model, IMAGES, GROUPS


def around(layer):
    model = keras.Sequential(
        [
            layers.Input((4, 4, 3)),
            layers.Dense(3, "sigmoid"),
            layer(value_range=(0, 1)),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model, IMAGES, TARGETS


def reader():
    vectors = layers.TextVectorization(vocabulary=["a", "b", "c"])
    model = keras.Sequential(
        [
            layers.Input((), dtype="string"),
            vectors,
            layers.Embedding(5, 3),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model, TEXTS, TARGETS


CASES = {
    "dice": functools.partial(segmenter, "dice"),
    "Tversky": lambda: segmenter(keras.losses.Tversky()),
    "all axes": lambda: segmenter(keras.losses.Dice(axis=(0, 1, 2, -1))),
    "Circle": embedding,
    "elastic": functools.partial(around, layers.RandomElasticTransform),
    "augment": functools.partial(
        around, functools.partial(layers.RandAugment, num_ops=1)
    ),
    "text": reader,
}


def fit(case, model, **kwargs):
    _, x, y = CASES[case]()
    arguments = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    return model.fit(x, y, **{**arguments, **kwargs})


def make(case):
    keras.utils.set_random_seed(4)
    return CASES[case]()[0]


# test_classes.py has one device for all others, too.
KEPT = ("dice", "Circle", "text")


@pytest.mark.parametrize("case", long_but(KEPT.__contains__, CASES))
def test_exact(case):
    with told.heard() as heard:
        assert_exact(
            functools.partial(make, case),
            functools.partial(fit, case),
            kt.TowerStrategy(3, exact=True),
            tolerance=1e-5,
        )
    assert not heard


@pytest.mark.parametrize("case", long_but(KEPT.__contains__, CASES))
def test_without_exact_it_is_told(case):
    with told.heard() as heard, kt.TowerStrategy(2):
        fit(case, make(case))
    assert {one.about for one in heard} == {"couples"}
    assert "exact=True computes it from the global batch" in heard[0].message


@pytest.mark.parametrize(
    "loss",
    [keras.losses.Dice(axis=(1, 2, 3)), keras.losses.Tversky(axis=-1), "mse"],
)
def test_other_losses_are_left_alone(loss):
    model, x, y = segmenter(loss)
    with told.heard() as heard, kt.TowerStrategy(2):
        model.fit(x, y, batch_size=8, verbose=0)
    assert not heard


@pytest.mark.parametrize(
    ("loss", "average", "why"),
    [
        ("dice", False, "average=False"),
        (keras.losses.Dice(axis=(0, 1)), True, "only without axis"),
    ],
)
def test_what_exact_cannot_change(loss, average, why):
    model, x, y = segmenter(loss)
    strategy = kt.TowerStrategy(2, average=average, exact=True)
    with told.heard() as heard, strategy:
        model.fit(x, y, batch_size=8, verbose=0)
    assert why in heard[0].message


def test_validation_and_evaluation():
    _, x, y = CASES["dice"]()

    def act(model):
        history = fit("dice", model, validation_data=(x, y)).history
        return history, model.evaluate(x, y, batch_size=8, verbose=0)

    make_dice = functools.partial(make, "dice")
    assert_exact(make_dice, act, kt.TowerStrategy(3, exact=True))


def test_batches_of_a_fixed_size():
    """Keras transforms each image where it knows how many there are."""
    _, x, y = CASES["elastic"]()
    data = tf.data.Dataset.from_tensor_slices((x, y))
    data = data.batch(8, drop_remainder=True)
    assert_exact(
        functools.partial(make, "elastic"),
        lambda model: model.fit(data, verbose=0),
        kt.TowerStrategy(2, exact=True),
        tolerance=1e-5,
    )


def test_eagerly():
    def make_eager():
        model = make("dice")
        model.run_eagerly = True
        return model

    act = functools.partial(fit, "dice")
    assert_exact(make_eager, act, kt.TowerStrategy(2, exact=True))


def test_mixing_leaves_predictions_alone():
    class Mixer(keras.Model):
        def __init__(self):
            super().__init__()
            self.mix = layers.MixUp(seed=3)
            self.head = layers.Dense(2)

        def call(self, x, training=False):
            x = self.mix(x, training=training)
            return self.head(layers.Flatten()(x))

    keras.utils.set_random_seed(4)
    model = Mixer()
    model.compile("sgd", "mse")
    wanted = model.predict(IMAGES, verbose=0)
    with kt.TowerStrategy(3, exact=True):
        found = model.predict(IMAGES, verbose=0)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


def test_verify_says_what_fit_does():
    model, x, y = CASES["dice"]()
    assert not kt.verify(model, x, y, batch_size=8).safe
    assert kt.verify(model, x, y, batch_size=8, exact=True).safe
