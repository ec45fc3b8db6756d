"""The models and the data of the benchmark.

Each is an ordinary Keras model, compiled as a user would do it. Keras is
imported inside the functions, so that listing the models does not start
TensorFlow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CLASSES = 10
SGD = {"learning_rate": 0.01, "momentum": 0.9}


@dataclass(frozen=True)
class BenchModel:
    """One model of the benchmark.

    Attributes:
        title: a description for the reader of a table.
        input_shape: the shape of one example, channels last.
        widths: units of each hidden dense layer.
        convolutions: filters and strides of each convolution before those.
    """

    title: str
    input_shape: tuple[int, ...]
    widths: tuple[int, ...]
    convolutions: tuple[tuple[int, int], ...] = ()

    def build(self, optimizer: Any = None) -> Any:
        """Build and compile the model, with the same initial weights.

        Args:
            optimizer: None for SGD with momentum.
        """
        import keras
        from keras import layers

        keras.utils.set_random_seed(0)
        body: list[Any] = [
            layers.Conv2D(
                filters, 3, strides=strides, padding="same", activation="relu"
            )
            for filters, strides in self.convolutions
        ]
        if body:
            body.append(layers.Flatten())
        body += [
            layers.Dense(width, activation="relu") for width in self.widths
        ]
        model = keras.Sequential(
            [keras.Input(self.input_shape), *body, layers.Dense(CLASSES)]
        )
        model.compile(
            optimizer or keras.optimizers.SGD(**SGD),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    def data(self, examples: int) -> tuple[Any, Any]:
        """Return random inputs and labels, the same in every process."""
        import numpy as np

        random = np.random.default_rng(0)
        x = random.random((examples, *self.input_shape), dtype=np.float32)
        return x, random.integers(CLASSES, size=examples)


MODELS = {
    "small": BenchModel(
        "4-layer perceptron, 4 thousand parameters", (48,), (32,) * 3
    ),
    "large": BenchModel(
        "9-layer perceptron, 8.4 million parameters", (1024,), (1024,) * 8
    ),
    "cnn": BenchModel(
        "6-layer convolutional net, 0.6 million parameters",
        (32, 32, 3),
        widths=(128,),
        convolutions=((32, 1), (32, 2), (64, 1), (64, 2)),
    ),
    "wide": BenchModel(
        "9-layer perceptron, 25 million parameters", (1024,), (1808,) * 8
    ),
}
# Its weights and momenta take about 100 MB.
ADOPTED = BenchModel("9-layer perceptron", (1250,), (1250,) * 8)
