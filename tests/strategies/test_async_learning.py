"""Asynchronous towers learn, with whatever optimizer and layers."""

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.training import STEPS, classifier, fit


@pytest.mark.parametrize(
    "make",
    [
        lambda: m.momentum(clipnorm=1.0),
        lambda: keras.optimizers.AdamW(0.01),
        lambda: keras.optimizers.Adam(
            0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3
        ),
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.01)
        ),
    ],
    ids=["momentum", "adamw", "ema", "loss-scale"],
)
def test_optimizers_learn(make):
    model = classifier(optimizer=make)
    with kt.AsyncTowerStrategy(3):
        loss = fit(model, epochs=12)["loss"]
    assert loss[-1] < 0.95 * loss[0]
    assert int(model.optimizer.iterations) == 12 * STEPS


def test_several_optimizers():
    model = m.Gan()
    model.compile(m.momentum(), keras.optimizers.Adam(0.01))
    with kt.AsyncTowerStrategy(3):
        assert np.isfinite(fit(model, y=None, epochs=3)["critic_loss"]).all()
    for optimizer in (model.generator_optimizer, model.critic_optimizer):
        assert int(optimizer.iterations) == 3 * STEPS


def test_sparse_gradients_and_dropout():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(12, 5),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.1),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3),
        ]
    )
    model.compile("adam", m.cross_entropy())
    with kt.AsyncTowerStrategy(3):
        loss = fit(model, epochs=15, x=m.TOKENS, y=m.LABELS)["loss"]
    assert loss[-1] < loss[0]


def test_as_accurate_as_synchronous_towers():
    digits = load_digits()
    x, y = (digits.images / 16).astype("float32").reshape(-1, 64), digits.target

    def accuracy(strategy):
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(96, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        adam = keras.optimizers.Adam(0.003)
        model.compile(adam, m.cross_entropy(), metrics=["accuracy"])
        with strategy:
            model.fit(x[:1400], y[:1400], epochs=10, verbose=0)
        return model.evaluate(x[1400:], y[1400:], verbose=0)[1]

    wanted = accuracy(kt.TowerStrategy(4))
    assert accuracy(kt.AsyncTowerStrategy(4)) > wanted - 0.01
