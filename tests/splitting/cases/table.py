"""Small training steps, and whether the towers' results add up to one's."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

EXAMPLES, BATCH, WIDTH = 42, 16, 6

PROVEN = "proven"
DIFFERS = "differs"
# It does not differ, or not by the numbers here, or not once fit has found out;
# and is not proven either.
UNPROVEN = "unproven"
# It differs as fit says when it begins: by random numbers, or by statistics.
BY_DESIGN = "by design"


@dataclasses.dataclass(frozen=True)
class Case:
    """A step: what it trains, on what, and what is to be said of it.

    The line that is to be named ends with ``# here``.

    Attributes:
        build: makes the model.
        truth: whether its step splits over towers.
        data: makes what it trains on.
        options: makes arguments of ``fit``, for each fit.
        says: what is said of it, where no line is named.
    """

    build: Callable[[], keras.Model]
    truth: str
    data: Callable[[], Any]
    options: Callable[[], dict[str, Any]]
    says: str | None

    @property
    def marked(self) -> bool:
        """Whether there is a line that is to be named."""
        return "# here" in inspect.getsource(self.build)


def registering(
    cases: dict[str, Case], truth: str, usual: Callable[[], Any]
) -> Callable[..., Callable[[Any], Any]]:
    """Make a decorator that notes a case; ``usual``: what most train on."""

    def decorator(
        data: Any = None, options: Any = dict, says: str | None = None
    ) -> Callable[[Any], Any]:
        def register(build: Callable[[], keras.Model]) -> Any:
            assert build.__name__ not in cases
            case = Case(build, truth, data or usual, options, says)
            cases[build.__name__] = case
            return build

        return register

    return decorator


def generator() -> np.random.Generator:
    return np.random.default_rng(3)


def numbers() -> tuple[Any, Any]:
    """Features, and one number for each."""
    make = generator()
    x = make.normal(size=(EXAMPLES, WIDTH)).astype("float32")
    return x, make.normal(size=(EXAMPLES, 1)).astype("float32")


CASES: dict[str, Case] = {}
proven = registering(CASES, PROVEN, numbers)
differs = registering(CASES, DIFFERS, numbers)
by_design = registering(CASES, BY_DESIGN, numbers)
unproven = registering(CASES, UNPROVEN, numbers)


def classes() -> tuple[Any, Any]:
    """Features, and one of three classes for each."""
    make = generator()
    x = make.normal(size=(EXAMPLES, WIDTH)).astype("float32")
    return x, make.integers(0, 3, EXAMPLES).astype("int32")


def binary() -> tuple[Any, Any]:
    """Features, and three labels that are 0 or 1."""
    make = generator()
    x = make.normal(size=(EXAMPLES, WIDTH)).astype("float32")
    return x, make.integers(0, 2, (EXAMPLES, 3)).astype("float32")


def tokens() -> tuple[Any, Any]:
    """Sequences of words, of which 0 is none, and one number for each."""
    make = generator()
    x = make.integers(0, 9, (EXAMPLES, 8)).astype("int32")
    return x, make.normal(size=(EXAMPLES, 1)).astype("float32")


def images() -> tuple[Any, Any]:
    """Small images, and one number for each."""
    make = generator()
    x = make.normal(size=(EXAMPLES, 6, 6, 2)).astype("float32")
    return x, make.normal(size=(EXAMPLES, 1)).astype("float32")


def plain(loss: Any, outputs: int = 3, **options: Any) -> keras.Model:
    """Train a small network by a loss."""
    model = _network(keras.Model, outputs)
    return compiled(model, loss, **options)


def with_layers(*layers: Any, shape: Any = (WIDTH,), **options: Any) -> Any:
    """Train a stack of layers before a last number."""
    model = keras.Sequential(
        [keras.Input(shape), *layers, keras.layers.Dense(1)]
    )
    return compiled(model, **options)


def stepped(
    body: Callable[[Any, Any, Any], Any], outputs: int = 1, **options: Any
) -> keras.Model:
    """Train a small network by a step: of the model, features and targets."""

    class Stepped(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            return body(self, x, y)

    return compiled(_network(Stepped, outputs), **options)


def compiled(
    model: keras.Model, loss: Any = "mse", rate: float = 0.05, **options: Any
) -> keras.Model:
    """Compile with an optimizer that forgives nothing."""
    optimizer = options.pop("optimizer", None)
    model.compile(
        optimizer or keras.optimizers.SGD(rate),
        loss,
        jit_compile=False,
        **options,
    )
    return model


def apply(model: Any, tape: tf.GradientTape, loss: Any) -> dict[str, Any]:
    """Apply the gradients of a loss; return it as the log."""
    weights = model.trainable_variables
    model.optimizer.apply(tape.gradient(loss, weights), weights)
    return {"loss": loss}


def minimizing(
    loss_of: Callable[[Any, Any, Any], Any],
) -> Callable[[Any, Any, Any], Any]:
    """Make a step that minimizes a loss: of the model, features and targets."""

    def step(model: Any, x: Any, y: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        return apply(model, tape, loss)

    return step


def _network(kind: Any, outputs: int) -> keras.Model:
    entrance = keras.Input((WIDTH,))
    hidden = keras.layers.Dense(5, activation="tanh", name="hidden")(entrance)
    return kind(entrance, keras.layers.Dense(outputs, name="outputs")(hidden))


def count(t):
    return tf.cast(tf.shape(t)[0], tf.float32)


def errors(y, p):
    return tf.reduce_mean(tf.square(p - y), -1)


def positives(y):
    return tf.reduce_sum(tf.cast(y > 0, tf.int32))


def mse(y, p):
    return tf.reduce_mean(tf.square(p - y))


def by_default(model, x, y):
    with tf.GradientTape() as tape:
        loss = mse(y, model(x, training=True))
    return apply(model, tape, loss)


def with_variable(step, shape=(), initial=0.0, outputs=1, **options):
    """A step with a variable of the model's."""
    model = stepped(step, outputs)
    model.kept = model.add_weight(
        shape=shape,
        initializer=keras.initializers.Constant(initial),
        trainable=False,
        name="kept",
        **options,
    )
    return model


class Own(keras.layers.Layer):
    """A layer with one variable and a call of its own."""

    def __init__(self, call, initial=1.0, shape=(), **options):
        super().__init__()
        self.body = call
        self.kept = self.add_weight(
            shape=shape,
            initializer=keras.initializers.Constant(initial),
            **{"trainable": False, "name": "kept", **options},
        )

    def call(self, x):
        return self.body(self, x)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)
