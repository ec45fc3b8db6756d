"""``batch_norm="global"``: the statistics are those of one device."""

import keras
import numpy as np
import pytest

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import assert_exact
from tests.kit.long import long_but

COUNT, BATCH = 26, 8  # the last batch has 2: none for a third tower
X, Y = m.FEATURES[:COUNT], m.LABELS[:COUNT]
IMAGES = np.random.RandomState(0).randn(COUNT, 8, 8, 3).astype("float32")
SENTENCES, WORDS = m.SENTENCES[:COUNT], m.SENTENCE_LABELS[:COUNT]


def fitting(x=X, y=Y, epochs=2, evaluates=False):
    def act(model):
        history = model.fit(
            x,
            y,
            batch_size=BATCH,
            epochs=epochs,
            shuffle=False,
            verbose=0,
        ).history
        if not evaluates:
            return history
        return history, model.evaluate(x, y, batch_size=COUNT, verbose=0)

    return act


def sequential(*make_layers, **options):
    """A function that makes a compiled model, the same every time."""

    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([make() for make in make_layers])
        model.compile(
            m.momentum(), m.cross_entropy(), metrics=["accuracy"], **options
        )
        return model

    return make


def two_norms(**options):
    dense = keras.layers.Dense

    def norm():
        return keras.layers.BatchNormalization(momentum=0.8, **options)

    return sequential(
        lambda: keras.Input((6,)),
        lambda: dense(7, "tanh"),
        norm,
        lambda: dense(5, "relu"),
        norm,
        lambda: dense(3),
    )


def towers(number, **options):
    return kt.TowerStrategy(number, batch_norm="global", **options)


@pytest.mark.parametrize("number", long_but((3).__eq__, [2, 3, 8]))
def test_uneven_batches(number):
    assert_exact(two_norms(), fitting(evaluates=True), towers(number))


@pytest.mark.core
def test_moving_statistics_of_a_tower_without_examples():
    make = sequential(
        lambda: keras.Input((6,)),
        lambda: keras.layers.BatchNormalization(name="norm"),
        lambda: keras.layers.Dense(3),
    )

    def act(model):
        model.train_on_batch(X[:2], Y[:2])
        values = [v._value for v in model.get_layer("norm").variables]
        for value in values:
            first, *others = getattr(value, "values", [value])
            for other in others:
                np.testing.assert_array_equal(other, first)

    assert_exact(make, act, towers(4))


def test_far_from_zero():
    """Where mean(x^2) - mean(x)^2 would cancel."""
    make = sequential(
        lambda: keras.Input((6,)),
        lambda: keras.layers.BatchNormalization(momentum=0.8),
        lambda: keras.layers.Dense(3),
    )
    act = fitting(np.float32(1000) + X)
    # The examples themselves are rounded to 6e-5.
    assert_exact(make, act, towers(3), tolerance=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"renorm": True},
        {"center": False, "scale": False},
        {"synchronized": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_of_the_layer(options):
    assert_exact(two_norms(**options), fitting(), towers(3))


def test_layer_that_is_not_trained():
    def make():
        model = two_norms()()
        model.layers[1].trainable = False
        model.compile(m.momentum(), m.cross_entropy())
        return model

    assert_exact(make, fitting(), towers(3))


def tagger(synchronized=False):
    return sequential(
        lambda: keras.Input((4,), dtype="int32"),
        lambda: keras.layers.Embedding(14, 5, mask_zero=True),
        lambda: keras.layers.BatchNormalization(synchronized=synchronized),
        lambda: keras.layers.Dense(3),
    )


@pytest.mark.parametrize(
    "hidden", long_but(slice(0).__ne__, [slice(0), slice(0, 3), slice(8, 16)])
)
def test_masks(hidden):
    # Of one tower's part, or of a whole batch, nothing may be left.
    sentences = SENTENCES.copy()
    sentences[hidden] = 0
    act = fitting(sentences, WORDS)
    assert_exact(tagger(), act, towers(3), tolerance=1e-5)


def test_masks_of_a_synchronized_layer():
    act = fitting(SENTENCES, WORDS)
    assert_exact(tagger(True), act, kt.TowerStrategy(3), tolerance=1e-5)


def convolutional(axis=-1, policy=None, strides=(2, 1)):
    """Blocks like MobileNetV2's, the last with a residual connection."""

    def make():
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy or before)
        keras.utils.set_random_seed(1)
        try:
            layers = keras.layers
            inputs = x = keras.Input((8, 8, 3))
            for stride in strides:
                shortcut = x
                for layer in (
                    layers.Conv2D(6, 1, use_bias=False),
                    layers.DepthwiseConv2D(
                        3, stride, padding="same", use_bias=False
                    ),
                    layers.Conv2D(4, 1, use_bias=False),
                ):
                    x = layers.BatchNormalization(axis=axis)(layer(x))
                    x = layers.ReLU(6.0)(x)
                if stride == 1:
                    x = layers.Add()([x, shortcut])
            x = layers.GlobalAveragePooling2D()(x)
            outputs = layers.Dense(3, dtype="float32")(x)
        finally:
            keras.config.set_dtype_policy(before)
        model = keras.Model(inputs, outputs)
        model.compile(m.momentum(), m.cross_entropy(), metrics=["accuracy"])
        return model

    return make


# Those of the last axis are below, too, in half precision.
@pytest.mark.parametrize(
    "axis, number", long_but((1, 2).__eq__, [(-1, 3), (1, 2)])
)
def test_convolutions(axis, number):
    act = fitting(IMAGES)
    assert_exact(convolutional(axis), act, towers(number), tolerance=1e-5)


@pytest.mark.parametrize(
    "policy, tolerance",
    long_but(
        lambda case: case[0] == "mixed_float16",
        [("mixed_float16", 5e-3), ("mixed_bfloat16", 5e-2)],
    ),
)
def test_mixed_precision(policy, tolerance):
    make = convolutional(policy=policy, strides=(2,))
    act = fitting(IMAGES, epochs=1)
    assert_exact(make, act, towers(3), tolerance=tolerance)


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: towers(3, updates="each"),
        lambda: kt.ParameterServerTowerStrategy(3, batch_norm="global"),
        lambda: kt.TowerStrategy(3, exact=True),
    ],
    ids=["each", "parameter-server", "exact"],
)
def test_strategies(strategy):
    assert_exact(two_norms(), fitting(), strategy())


def test_eagerly():
    make = sequential(
        lambda: keras.Input((6,)),
        keras.layers.BatchNormalization,
        lambda: keras.layers.Dense(3),
        run_eagerly=True,
    )
    assert_exact(make, fitting(), towers(3))


def test_without_it_each_tower_has_its_own_statistics():
    with pytest.raises(AssertionError):
        assert_exact(two_norms(), fitting(), kt.TowerStrategy(2))


def test_the_layer_stays_as_it_is():
    model = two_norms()()
    norm = model.layers[1]
    with towers(2):
        fitting()(model)
        assert type(norm) is keras.layers.BatchNormalization
        assert norm.synchronized is False
    assert norm.get_config()["synchronized"] is False


def test_losses_that_layers_add_before_and_after():
    """Towers take turns at the statistics, on the same layer objects."""
    penalty = keras.layers.ActivityRegularization
    make = sequential(
        lambda: keras.Input((6,)),
        lambda: keras.layers.Dense(7),
        lambda: penalty(l2=0.5),
        keras.layers.BatchNormalization,
        lambda: keras.layers.Dense(5, activity_regularizer="l2"),
        keras.layers.BatchNormalization,
        lambda: penalty(l2=0.1),
        lambda: keras.layers.Dense(3),
    )
    assert_exact(make, fitting(), towers(3))
