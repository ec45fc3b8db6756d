"""GPUs give the weights and the ``History`` that one GPU gives."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.exactness.cases import CASES, HARDEST
from tests.gpu.towers import (
    HARD,
    TOLERANCE,
    assert_contract,
    in_mode,
    strategy,
)
from tests.kit.compare import assert_exact
from tests.kit.training import X, classifier, compiled, fit

pytestmark = pytest.mark.gpu

MODES = ("nccl", "collective", "hierarchical", "gpu", "cpu")
IMAGES = np.random.default_rng(0).random((len(X), 8, 8, 3), "float32")


@pytest.mark.parametrize("name", CASES)
def test_case_by_default(name):
    assert_contract(name, strategy())


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode(mode, name):
    assert_contract(name, in_mode(mode))


@pytest.mark.parametrize("name", [*HARDEST, "loss-scale-overflow"])
def test_one_tower_updates_for_all(name):
    assert_contract(name, strategy(updates="once"))


@pytest.mark.parametrize("mode", MODES)
def test_packing_changes_no_weight(mode):
    packer = kt.reduction.GradientPacker(num_split=2, min_elements=2)
    assert_contract("adam", in_mode(mode, packer=packer))
    assert_contract("adam", in_mode(mode, packer=False))


@pytest.mark.parametrize("ps_device", ["cpu", "gpu"])
@pytest.mark.parametrize(
    "name", [*HARDEST, "ema-overwrite", "loss-scale-overflow", "uneven"]
)
def test_shared_weights(name, ps_device):
    on = strategy(kt.ParameterServerTowerStrategy, ps_device=ps_device)
    assert_contract(name, on)


def test_one_tower():
    assert_contract("uneven", strategy(number=1))


def conv_net():
    """Convolutions, which cuDNN computes, and what couples examples."""
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(6, 3, padding="same"),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
            keras.layers.SpatialDropout2D(0.3, seed=5),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3, seed=6),
            keras.layers.Dense(3),
        ]
    )


def test_batch_norm_and_dropout_of_the_global_batch():
    assert_exact(
        compiled(conv_net),
        lambda model: fit(model, 2, IMAGES),
        strategy(exact=True),
        tolerance=TOLERANCE,
    )


def test_recurrent_layers():
    def build():
        keras.utils.set_random_seed(4)
        layers = [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(14, 5, mask_zero=True),
            keras.layers.LSTM(6, return_sequences=True),
            keras.layers.GRU(4),
            keras.layers.Dense(3),
        ]
        return keras.Sequential(layers)

    assert_exact(
        compiled(build),
        lambda model: fit(model, 1, m.SENTENCES[: len(X)]),
        strategy(),
        tolerance=TOLERANCE,
    )


@pytest.mark.parametrize("xla", [True, False])
def test_with_and_without_xla(xla):
    assert_exact(
        lambda: classifier(jit_compile=xla),
        lambda model: fit(model, 2),
        strategy(),
        tolerance=TOLERANCE,
    )


def test_single_batches_evaluate_and_predict():
    def act(model):
        logs = [
            model.train_on_batch(X[start : start + 9], Y, return_dict=True)
            for start, Y in ((0, m.LABELS[:9]), (9, m.LABELS[9:18]))
        ]
        tested = model.evaluate(X, m.LABELS[: len(X)], batch_size=7, verbose=0)
        return logs, tested, model.predict(X, batch_size=7, verbose=0)

    assert_exact(classifier, act, strategy(), tolerance=TOLERANCE)


def test_custom_loop():
    def build():
        return m.mlp(), m.momentum()

    def loss_of(model, x, y):
        losses = keras.losses.sparse_categorical_crossentropy(
            y, model(x, training=True), from_logits=True
        )
        return tf.reduce_sum(losses) / 16.0

    def step_of(model, optimizer):
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(model, x, y)
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
            return loss

        return step

    data = tf.data.Dataset.from_tensor_slices((m.FEATURES, m.LABELS)).batch(16)
    on = strategy()
    with on.scope():
        model, optimizer = build()
    step = step_of(model, optimizer)

    @tf.function
    def distributed(batch):
        return on.reduce("SUM", on.run(step, args=batch), axis=None)

    losses = [
        float(distributed(batch))
        for batch in on.experimental_distribute_dataset(data)
    ]
    alone, optimizer = build()
    step = tf.function(step_of(alone, optimizer))
    wanted = [float(step(*batch)) for batch in data]
    np.testing.assert_allclose(losses, wanted, rtol=TOLERANCE)
    for one, other in zip(
        model.get_weights(), alone.get_weights(), strict=True
    ):
        np.testing.assert_allclose(one, other, TOLERANCE, TOLERANCE)


@pytest.mark.parametrize("mode", MODES)
def test_two_runs_are_equal_to_the_bit(mode):
    """Where TensorFlow's ops are deterministic, nothing else differs."""
    from tensorflow.python.framework.config import disable_op_determinism

    def trained():
        model = classifier()
        with in_mode(mode):
            fit(model, 2)
        return model.get_weights()

    tf.config.experimental.enable_op_determinism()
    try:
        for one, other in zip(trained(), trained(), strict=True):
            np.testing.assert_array_equal(one, other)
    finally:
        disable_op_determinism()
