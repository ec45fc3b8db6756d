"""More models to compare with, as functions that ``--models`` names."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

from keras_towers.bench.models import classifier

_WORDS, _CATEGORIES = 1000, 20_000


def wide() -> Any:
    """Build a 9-layer perceptron with 25 million parameters."""
    body = [layers.Dense(1808, activation="relu") for _ in range(8)]
    return classifier([keras.Input((1024,)), *body])


def transformer() -> Any:
    """Build a 12-layer transformer with 0.7 million parameters."""
    inputs = keras.Input((32,), dtype="int32")
    x = layers.Embedding(_WORDS, 64)(inputs)
    for _ in range(12):
        seen = layers.MultiHeadAttention(4, 16)(x, x)
        x = layers.LayerNormalization()(x + seen)
        feed = layers.Dense(256, activation="gelu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(64)(feed))
    outputs = layers.Dense(10)(layers.GlobalAveragePooling1D()(x))
    return _compiled(keras.Model(inputs, outputs), keras.optimizers.Adam(1e-3))


def recommender() -> Any:
    """Build 8 embeddings of 20 thousand ids and a perceptron.

    With SGD without momentum only the embeddings of a batch change.
    """
    inputs = keras.Input((8,), dtype="int32")
    x = layers.Concatenate()(
        [layers.Embedding(_CATEGORIES, 32)(inputs[:, i]) for i in range(8)]
    )
    for width in (128, 64):
        x = layers.Dense(width, activation="relu")(x)
    model = keras.Model(inputs, layers.Dense(2)(x))
    return _compiled(model, keras.optimizers.SGD(0.1))


def mobilenet() -> Any:
    """Build MobileNetV2 for pictures of 32x32."""
    return _application(keras.applications.MobileNetV2)


def resnet50() -> Any:
    """Build ResNet50 for pictures of 32x32."""
    return _application(keras.applications.ResNet50)


def _application(make: Any) -> Any:
    model = make(
        weights=None,
        input_shape=(32, 32, 3),
        classes=10,
        classifier_activation=None,
    )
    return _compiled(model, keras.optimizers.Adam(1e-3))


def _compiled(model: Any, optimizer: Any) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model
