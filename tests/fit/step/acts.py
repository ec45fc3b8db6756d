"""Layers and steps that do something besides, as those of users do."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import keras_towers as kt


class Acts(keras.layers.Layer):
    """Does what a function does."""

    def __init__(self, act: Callable[[Any], Any] = tf.identity):
        super().__init__()
        self.act = act

    def call(self, x: Any) -> Any:
        return self.act(x)


def shown(x: Any) -> Any:
    tf.print(tf.shape(x), output_stream="file:///dev/null")
    return x


def exchanged(x: Any) -> Any:
    return x + 0 * tf.reduce_mean(kt.gather(x))


class Own(keras.Model):
    """A step of the user's own, which applies its gradients in some way."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        weights = self.trainable_weights
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.way(tape.gradient(loss, weights), weights)
        return {"loss": loss}

    def way(self, grads: list[Any], weights: list[Any]) -> None:
        self.optimizer.apply(grads, weights)


class Both(Own):
    """Updates two parts, whose gradients are known before."""

    def way(self, grads: list[Any], weights: list[Any]) -> None:
        super().way(grads[:2], weights[:2])
        super().way(grads[2:], weights[2:])


class Twice(Own):
    """Updates once more."""

    def way(self, grads: list[Any], weights: list[Any]) -> None:
        super().way(grads, weights)
        super().way([w * 0.1 for w in weights], weights)
