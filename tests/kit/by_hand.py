"""Models whose training step is a function."""

import keras
import tensorflow as tf


class ByHand(keras.Model):
    """A model of some parts, with a step that is written by hand.

    Args:
        function: takes the model, features and targets, and returns a loss of
            what is trained, or logs if it trains by itself.
        **parts: attributes of the model, of which ``net`` predicts.
    """

    def __init__(self, function, /, **parts):
        super().__init__()
        self._function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self._function(self, x, y)
            if isinstance(loss, dict):
                return loss
        return apply(self, tape, loss)


def apply(model, tape, loss):
    """Apply the gradients of a loss; return it as the log."""
    weights = model.trainable_variables
    model.optimizer.apply(tape.gradient(loss, weights), weights)
    return {"loss": loss}
