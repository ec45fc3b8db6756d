"""The models and the data of the benchmark.

Each is an ordinary Keras model, compiled as a user would do it. Keras is
imported inside the functions, so that listing the models does not start
TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

CLASSES = 10
SGD = {"learning_rate": 0.01, "momentum": 0.9}
# Of the transformer and of each feature of the recommender.
_WORDS = 1000
_CATEGORIES = 20_000

# From the optimizer that a model is compiled with to the one that trains it.
Wrap = Callable[[Any], Any]


class Trained(Protocol):
    """What a row of the benchmark trains."""

    @property
    def title(self) -> str:
        """A description for the reader of a table."""
        ...

    def build(self, wrap: Wrap | None = None) -> Any:
        """Build and compile the model, with the same initial weights.

        Args:
            wrap: returns the optimizer that trains, given the model's own.
        """
        ...

    def data(self, examples: int) -> tuple[Any, Any]:
        """Return inputs and labels, the same in every process."""
        ...


@dataclass(frozen=True)
class BenchModel:
    """A perceptron or a convolutional net, which PyTorch can build too.

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

    def build(self, wrap: Wrap | None = None) -> Any:
        """Build it, to be trained by SGD with momentum."""
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
        return _classifier(model, keras.optimizers.SGD(**SGD), wrap)

    def data(self, examples: int) -> tuple[Any, Any]:
        """Return random inputs and classes."""
        import numpy as np

        random = np.random.default_rng(0)
        x = random.random((examples, *self.input_shape), dtype=np.float32)
        return x, random.integers(CLASSES, size=examples)


@dataclass(frozen=True)
class NamedModel:
    """A model of a well-known kind.

    Attributes:
        title: a description for the reader of a table.
        make: builds it without compiling it.
        input_shape: the shape of one example.
        ids: the number of ids that inputs are chosen from; None: inputs are
            real numbers.
        classes: the number of outputs, as logits.
        adam: whether Adam trains it; otherwise SGD without momentum, by which
            only the embeddings of a batch change.
    """

    title: str
    make: Callable[[], Any]
    input_shape: tuple[int, ...]
    ids: int | None = None
    classes: int = CLASSES
    adam: bool = True

    def build(self, wrap: Wrap | None = None) -> Any:
        """Build it, to be trained by its optimizer."""
        import keras

        keras.utils.set_random_seed(0)
        model = self.make()
        make = keras.optimizers.Adam if self.adam else keras.optimizers.SGD
        return _classifier(model, make(1e-3 if self.adam else 0.1), wrap)

    def data(self, examples: int) -> tuple[Any, Any]:
        """Return random inputs and classes."""
        import numpy as np

        random = np.random.default_rng(0)
        shape = (examples, *self.input_shape)
        x: Any = random.random(shape, dtype=np.float32)
        if self.ids is not None:
            x = random.integers(self.ids, size=shape, dtype=np.int32)
        return x, random.integers(self.classes, size=examples)


def _classifier(model: Any, optimizer: Any, wrap: Wrap | None) -> Any:
    import keras

    model.compile(
        wrap(optimizer) if wrap else optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def _transformer() -> Any:
    """Twelve layers of width 64 with four heads, without dropout."""
    import keras
    from keras import layers

    inputs = keras.Input((32,), dtype="int32")
    x = layers.Embedding(_WORDS, 64)(inputs)
    for _ in range(12):
        seen = layers.MultiHeadAttention(4, 16)(x, x)
        x = layers.LayerNormalization()(x + seen)
        wide = layers.Dense(256, activation="gelu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(64)(wide))
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(x))


def _application(name: str) -> Any:
    """Build one of Keras's own models for small pictures."""
    import keras

    return getattr(keras.applications, name)(
        weights=None,
        input_shape=(32, 32, 3),
        classes=CLASSES,
        classifier_activation=None,
    )


def _recommender() -> Any:
    """Embed eight categorical features, and classify by a perceptron."""
    import keras
    from keras import layers

    inputs = keras.Input((8,), dtype="int32")
    x = layers.Concatenate()(
        [
            layers.Embedding(_CATEGORIES, 32)(inputs[:, feature])
            for feature in range(8)
        ]
    )
    for width in (128, 64):
        x = layers.Dense(width, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(2)(x))


MODELS: dict[str, BenchModel | NamedModel] = {
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
    "transformer": NamedModel(
        "12-layer transformer, 0.7 million parameters, Adam",
        _transformer,
        (32,),
        ids=_WORDS,
    ),
    "recommender": NamedModel(
        "8 embeddings of 20 thousand ids and a perceptron, 5.2 million "
        "parameters, SGD without momentum",
        _recommender,
        (8,),
        ids=_CATEGORIES,
        classes=2,
        adam=False,
    ),
    "mobilenet": NamedModel(
        "MobileNetV2 at 32x32, 2.3 million parameters, Adam",
        partial(_application, "MobileNetV2"),
        (32, 32, 3),
    ),
    "resnet50": NamedModel(
        "ResNet50 at 32x32, 24 million parameters, Adam",
        partial(_application, "ResNet50"),
        (32, 32, 3),
    ),
}
# Its weights and momenta take about 100 MB.
ADOPTED = BenchModel("9-layer perceptron", (1250,), (1250,) * 8)
