"""Small data and models of the cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from keras_towers.foundation import compat
from keras_towers.foundation.object_types import Structure

_random = np.random.RandomState(0)
EXAMPLES = 64
FEATURES: np.ndarray = _random.randn(EXAMPLES, 6).astype("float32")
TOKENS: np.ndarray = _random.randint(0, 12, (EXAMPLES, 4)).astype("int32")
LABELS: np.ndarray = _random.randint(0, 3, EXAMPLES).astype("int32")
TARGETS: np.ndarray = _random.randn(EXAMPLES, 2).astype("float32")
WEIGHTS: np.ndarray = _random.rand(EXAMPLES).astype("float32")
SENTENCES: np.ndarray = TOKENS.copy()
for _row, _length in enumerate(_random.randint(1, 5, EXAMPLES)):
    SENTENCES[_row] = np.where(np.arange(4) < _length, TOKENS[_row] + 1, 0)
SENTENCE_LABELS: np.ndarray = _random.randint(0, 3, (EXAMPLES, 4)).astype(
    "int32"
)


def cross_entropy(**options: object) -> keras.losses.Loss:
    """The loss of a classifier that ends in logits."""
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, **options
    )


def momentum(**options: object) -> keras.optimizers.Optimizer:
    """Plain SGD with momentum."""
    return keras.optimizers.SGD(0.1, momentum=0.9, **options)


class Always(layers.Dropout):
    """Drops in evaluation and predictions too."""

    def call(self, x: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Drop, whether or not it trains."""
        return super().call(x, training=True)


def mlp(
    *middle: keras.Layer, regularizer: keras.Regularizer | None = None
) -> keras.Model:
    """A classifier of ``FEATURES`` with layers put in the middle."""
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(7, "tanh", kernel_regularizer=regularizer),
            *middle,
            layers.Dense(3, dtype="float32"),
        ]
    )


def compiled(
    build: Callable[[], keras.Model] = mlp,
    optimizer: Callable[[], keras.optimizers.Optimizer] = momentum,
    loss: Callable[[], object] = cross_entropy,
    metrics: Callable[[], object] = lambda: ["accuracy"],
    **options: object,
) -> Callable[[], keras.Model]:
    """Return a function that makes a compiled model, the same every time.

    Args:
        build: makes the model.
        optimizer: makes its optimizer.
        loss: makes its loss.
        metrics: makes its metrics.
        **options: more of ``compile``.
    """

    def make() -> keras.Model:
        model = build()
        model.compile(optimizer(), loss(), metrics=metrics(), **options)
        return model

    return make


def wide() -> keras.Model:
    """A classifier of ``FEATURES`` with a large matrix."""
    keras.utils.set_random_seed(8)
    return mlp(layers.Dense(160, "tanh"), layers.Dense(160, "tanh"))


def with_embedding() -> keras.Model:
    """A classifier of ``TOKENS``: its gradients include IndexedSlices."""
    keras.utils.set_random_seed(2)
    return keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            layers.Embedding(12, 5),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )


def with_mask() -> keras.Model:
    """A tagger of ``SENTENCES`` of different lengths, padded with zeros."""
    keras.utils.set_random_seed(3)
    tags = layers.Dense(3)
    # Before, Keras itself fails to give it a mask in a graph.
    if compat.KERAS >= (3, 9):
        tags = layers.TimeDistributed(tags)
    return keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            layers.Embedding(14, 5, mask_zero=True),
            tags,
        ]
    )


def two_headed() -> keras.Model:
    """Two inputs, two outputs, one shared layer."""
    keras.utils.set_random_seed(4)
    features = keras.Input((6,), name="features")
    tokens = keras.Input((4,), dtype="int32", name="tokens")
    shared = layers.Dense(5, "tanh")
    words = layers.Embedding(12, 6)(tokens)
    words = layers.GlobalAveragePooling1D()(words)
    both = layers.Concatenate()([shared(features), shared(words)])
    return keras.Model(
        [features, tokens],
        {
            "label": layers.Dense(3, name="label")(both),
            "target": layers.Dense(2, name="target")(both),
        },
    )


class Lazy(keras.Model):
    """A subclassed model that builds at its first batch, with nested models."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = layers.Dense(6, "tanh")
        self.nested = keras.Sequential(
            [layers.Dense(5, "tanh"), layers.Dense(3)]
        )

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Use one layer twice."""
        return self.nested(self.shared(self.shared(inputs)))


class OwnStep(keras.Model):
    """A ``train_step`` written for one device: a plain mean, no scaling."""

    def __init__(self) -> None:
        super().__init__()
        self.body = keras.Sequential([layers.Dense(5, "tanh"), layers.Dense(3)])
        self.mean_loss = keras.metrics.Mean(name="loss")
        # It has no gradient.
        self.unused = self.add_weight(shape=(2,), name="unused")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """The mean loss only."""
        return [self.mean_loss]

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Return logits."""
        return self.body(inputs)

    def train_step(self, data: Structure) -> dict[str, tf.Tensor]:
        """Train on the mean loss of a batch."""
        x, y = data
        with tf.GradientTape() as tape:
            losses = cross_entropy(reduction=None)(y, self(x, training=True))
            loss = tf.reduce_mean(losses)
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.mean_loss.update_state(loss, sample_weight=tf.shape(x)[0])
        return {"loss": self.mean_loss.result(), "this_batch": loss}


class ScaledStep(keras.Model):
    """A ``train_step`` that scales its loss, with a layer that is never built.

    ``scale_loss`` asks whether the optimizer is built.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = keras.Sequential([layers.Dense(5, "tanh"), layers.Dense(3)])
        self.unused = layers.Dense(2)

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """None."""
        return []

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Return logits."""
        return self.body(inputs)

    def train_step(self, data: Structure) -> dict[str, tf.Tensor]:
        """Train on a scaled loss."""
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, weights), weights)
        return {"loss": loss}


class Counting(keras.Model):
    """A model whose Python counts its calls, and makes things in the first."""

    def __init__(self) -> None:
        super().__init__()
        # It draws by TensorFlow's global seed.
        draws = tf.random_normal_initializer(0, 0.5)
        self.first = layers.Dense(5, "tanh", kernel_initializer=draws)
        self.last = layers.Dense(3)
        self.calls = {"model": 0, "step": 0}
        self.begun = False
        self.steps: tf.Variable | None = None

    def build(self, shape: tuple[int | None, ...]) -> None:
        """Make a weight that begins with the first batch."""
        self.shift = self.add_weight(shape=(5,), trainable=False, name="shift")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Return logits, which depend on how often this was called."""
        self.calls["model"] += 1
        hidden = self.first(inputs)
        if not self.begun:
            self.begun = True
            self.shift.assign(-tf.reduce_mean(hidden, 0))
        logits = self.last(hidden + self.shift)
        return logits * (1 + 0.1 * self.calls["model"])

    def train_step(self, data: Structure) -> dict[str, tf.Tensor]:
        """Train, and count steps in a variable that the first step makes."""
        self.calls["step"] += 1
        if self.steps is None:
            self.steps = tf.Variable(tf.constant(self.calls["step"]))
        self.steps.assign_add(1)
        logs = super().train_step(data)
        steps = tf.cast(self.steps, "float32")
        return {
            **logs,
            "steps": steps,
            "calls": tf.constant(self.calls["step"]),
        }


class Gan(keras.Model):
    """Two networks, two optimizers, one ``train_step``."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = (
            keras.Sequential([layers.Dense(5, "tanh"), layers.Dense(units)])
            for units in (6, 1)
        )
        self.critic_loss = keras.metrics.Mean(name="critic_loss")

    def compile(
        self,
        generator_optimizer: keras.Optimizer,
        critic_optimizer: keras.Optimizer,
    ) -> None:
        """Take an optimizer for each network."""
        super().compile()
        self.generator_optimizer = generator_optimizer
        self.critic_optimizer = critic_optimizer

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """The loss of the critic only."""
        return [self.critic_loss]

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Return what the critic says of what the generator makes."""
        return self.critic(self.generator(inputs))

    def train_step(self, data: Structure) -> dict[str, tf.Tensor]:
        """Train both networks."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape(persistent=True) as tape:
            fake = self.critic(self.generator(x, training=True))
            real = self.critic(x, training=True)
            critic_loss = tf.reduce_mean((real - 1.0) ** 2 + fake**2)
            generator_loss = tf.reduce_mean((fake - 1.0) ** 2)
        for loss, part, optimizer in (
            (critic_loss, self.critic, self.critic_optimizer),
            (generator_loss, self.generator, self.generator_optimizer),
        ):
            weights = part.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        self.critic_loss.update_state(critic_loss, sample_weight=tf.shape(x)[0])
        return {"critic_loss": self.critic_loss.result()}


def gan(cls: type[Gan] = Gan) -> keras.Model:
    """A compiled ``Gan``."""
    keras.utils.set_random_seed(5)
    model = cls()
    model.compile(keras.optimizers.Adam(0.01), momentum())
    return model


class ByHand(keras.Model):
    """A model of some parts, with a step that is written by hand.

    Args:
        function: takes the model, features and targets, and returns a loss of
            what is trained, or logs if it trains by itself.
        **parts: attributes of the model, of which ``net`` predicts.
    """

    def __init__(self, function: Callable[..., Any], /, **parts: object):
        super().__init__()
        self._function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """Predict."""
        return self.net(x)

    def train_step(self, data: Structure) -> dict[str, tf.Tensor]:
        """Call the function, and train on the loss that it returns."""
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self._function(self, x, y)
            if isinstance(loss, dict):
                return loss
        return apply(self, tape, loss)


def apply(
    model: keras.Model, tape: tf.GradientTape, loss: tf.Tensor
) -> dict[str, tf.Tensor]:
    """Apply the gradients of a loss; return it as the log."""
    weights = model.trainable_variables
    model.optimizer.apply(tape.gradient(loss, weights), weights)
    return {"loss": loss}


def _of_two_views(model: keras.Model, x: tf.Tensor) -> tf.Tensor:
    """The loss of two views, each of which finds the other among all."""
    z = model.net(x)
    z -= tf.reduce_mean(z, 0)
    views = tf.math.l2_normalize(tf.concat([z, z + 0.2], 0), 1)
    count = tf.shape(views)[0]
    near = tf.matmul(views, views, transpose_b=True) / 0.3
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(
            tf.roll(tf.range(count), count // 2, 0), near - 1e9 * tf.eye(count)
        )
    )


def _contrasted(
    model: keras.Model, x: tf.Tensor, y: tf.Tensor
) -> dict[str, tf.Tensor]:
    """A step whose updates are not linear in its gradients."""
    variables = model.trainable_variables
    with tf.GradientTape() as tape:
        loss = _of_two_views(model, x)
    gradients = tape.gradient(loss, variables)
    model.optimizer.apply([tf.tanh(3.0 * g) for g in gradients], variables)
    return {"loss": loss}


def contrastive() -> keras.Model:
    """A built and compiled model that learns to tell examples apart."""
    keras.utils.set_random_seed(1)
    dense = layers.Dense(7, "tanh"), layers.Dense(4)
    net = keras.Sequential([keras.Input((6,)), *dense])
    model = ByHand(_contrasted, net=net)
    model.build((None, 6))
    model.compile(momentum())
    model.optimizer.build(model.trainable_variables)
    return model
