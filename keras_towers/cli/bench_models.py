"""The models and the data of the benchmark.

Each is an ordinary Keras model, compiled as a user would. Keras is imported
inside the functions, so that naming a model costs no TensorFlow start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CLASSES = 10
SGD = {"learning_rate": 0.01, "momentum": 0.9}


@dataclass(frozen=True)
class BenchModel:
    """One model of the benchmark."""

    title: str
    input_shape: tuple[int, ...]
    make_layers: Callable[[], list[Any]]

    def build(self, optimizer: Any = None) -> Any:
        """Build and compile the model, with the same weights every time.

        Args:
            optimizer: another one than SGD with momentum.
        """
        import keras

        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input(self.input_shape), *self.make_layers()]
        )
        model.compile(
            optimizer or keras.optimizers.SGD(**SGD),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    def data(self, examples: int) -> tuple[Any, Any]:
        """Return made-up inputs and labels, the same in every process."""
        import numpy as np

        random = np.random.default_rng(0)
        x = random.random((examples, *self.input_shape), dtype=np.float32)
        return x, random.integers(CLASSES, size=examples)


def _dense_layers(width: int, hidden: int) -> list[Any]:
    from keras import layers

    body = [layers.Dense(width, activation="relu") for _ in range(hidden)]
    return [*body, layers.Dense(CLASSES)]


def _cnn_layers() -> list[Any]:
    from keras import layers

    body = [
        layers.Conv2D(
            filters, 3, strides=strides, padding="same", activation="relu"
        )
        for filters, strides in ((32, 1), (32, 2), (64, 1), (64, 2))
    ]
    return [
        *body,
        layers.Flatten(),
        layers.Dense(128, activation="relu"),
        layers.Dense(CLASSES),
    ]


MODELS = {
    "small": BenchModel(
        "4-layer perceptron, 4 thousand parameters",
        (48,),
        lambda: _dense_layers(width=32, hidden=3),
    ),
    "large": BenchModel(
        "9-layer perceptron, 8.4 million parameters",
        (1024,),
        lambda: _dense_layers(width=1024, hidden=8),
    ),
    "cnn": BenchModel(
        "6-layer convolutional net, 0.6 million parameters",
        (32, 32, 3),
        _cnn_layers,
    ),
}


def build_adoption_model() -> Any:
    """Build a model whose weights and momenta take about 100 MB."""
    import keras

    keras.utils.set_random_seed(0)
    width = 1250
    model = keras.Sequential(
        [keras.Input((width,))] + [keras.layers.Dense(width) for _ in range(8)]
    )
    model.compile(keras.optimizers.SGD(**SGD), "mse")
    model.optimizer.build(model.trainable_variables)
    return model
