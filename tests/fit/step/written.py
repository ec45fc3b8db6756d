"""Models whose own ``train_step`` writes state, as training scripts do."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tests.exactness import models as m


def sparse(y: Any, p: Any) -> tf.Tensor:
    """Cross-entropy, the mean over the examples."""
    losses = keras.losses.sparse_categorical_crossentropy(
        y, p, from_logits=True
    )
    return tf.reduce_mean(losses)


class Stepping(keras.Sequential):
    """Trains by hand, then does more; each subclass something else."""

    def prepare(self) -> None:
        """Make what the step writes."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data[:2]
        self.before(x)
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = self.loss_of(y, p)
        variables = self.trainable_variables
        self.update(tape.gradient(loss, variables), variables)
        self.after(x, p)
        return {"mine": loss}

    def loss_of(self, y: Any, p: Any) -> tf.Tensor:
        return sparse(y, p)

    def update(self, grads: list[Any], variables: list[Any]) -> None:
        self.optimizer.apply(grads, variables)

    def before(self, x: Any) -> None:
        """What is done before the forward pass."""

    def after(self, x: Any, p: Any) -> None:
        """What is done after the update."""


class Averaging(Stepping):
    """A moving average of the weights, by hand."""

    def prepare(self):
        self.shadow = [
            self.add_weight(shape=w.shape, name=f"shadow_{i}", trainable=False)
            for i, w in enumerate(self.trainable_variables)
        ]

    def after(self, x, p):
        for shadow, weight in zip(
            self.shadow, self.trainable_variables, strict=True
        ):
            shadow.assign(0.9 * shadow + 0.1 * weight)


class Target(Stepping):
    """A target network, updated by hand, that no layer tracks."""

    def prepare(self):
        target = keras.models.clone_model(self)
        target.build((None, m.FEATURES.shape[1]))
        target.set_weights([v.numpy() for v in self.trainable_variables])
        self.__dict__["target"] = [target]

    def after(self, x, p):
        target = self.__dict__["target"][0]
        for old, new in zip(
            target.trainable_variables, self.trainable_variables, strict=True
        ):
            old.assign(0.8 * old + 0.2 * new)

    def state(self):
        return self.__dict__["target"][0].get_weights()


class ClippingSometimes(Stepping):
    """Clips its weights in every other step, as a Wasserstein critic."""

    def prepare(self):
        self.turns = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False
        )

    def after(self, x, p):
        def clip():
            for weight in self.trainable_variables:
                weight.assign(tf.clip_by_value(weight, -0.05, 0.05))
            return 0

        self.turns.assign_add(1)
        tf.cond(self.turns % 2 == 0, clip, lambda: 0)


class Decaying(Stepping):
    """Decays a bias before the forward pass."""

    def before(self, x):
        for weight in self.trainable_variables:
            if "bias" in weight.name:
                weight.assign(0.9 * weight)


class Counting(Stepping):
    """Counts steps and examples."""

    def prepare(self):
        self.counted = self.add_weight(
            shape=(), dtype="int64", initializer="zeros", trainable=False
        )
        self.seen = self.add_weight(
            shape=(),
            initializer="zeros",
            trainable=False,
            aggregation="sum",
            name="seen",
        )
        self.first = self.add_weight(
            shape=(),
            initializer="zeros",
            trainable=False,
            aggregation="only_first_replica",
            name="first",
        )

    def after(self, x, p):
        self.counted.assign_add(1)
        self.seen.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        self.first.assign(self.first * 0.5 + 1.0)


class BatchMeans(Stepping):
    """A moving mean of the features, of every batch."""

    def prepare(self):
        self.of_batches = self.add_weight(
            shape=(m.FEATURES.shape[1],), initializer="zeros", trainable=False
        )

    def after(self, x, p):
        mean = tf.reduce_mean(x, 0)
        self.of_batches.assign(0.7 * self.of_batches + 0.3 * mean)


class Native(Stepping):
    """Counters and averages in plain ``tf.Variable``s."""

    def prepare(self):
        self.steps = tf.Variable(0, trainable=False, name="steps")
        self.mean = tf.Variable(
            tf.zeros(m.FEATURES.shape[1]), trainable=False, name="mean"
        )
        self.table = tf.Variable(tf.zeros([3, 2]), trainable=False)

    def after(self, x, p):
        self.steps.assign_add(1)
        self.mean.assign_sub(0.3 * (self.mean - tf.reduce_mean(x, 0)))
        self.table.scatter_add(tf.IndexedSlices(tf.ones([1, 2]), [1]))
        self.table[2, 0].assign(self.table[2, 0] + 2.0)

    def state(self):
        return [v.numpy() for v in (self.steps, self.mean, self.table)]


class Together(Stepping):
    """Does what all of these do."""

    kinds = (
        *(ClippingSometimes, Averaging, Target, Decaying),
        *(Counting, BatchMeans, Native),
    )

    def prepare(self):
        for kind in self.kinds:
            kind.prepare(self)

    def before(self, x):
        for kind in self.kinds:
            kind.before(self, x)

    def after(self, x, p):
        for kind in self.kinds:
            kind.after(self, x, p)

    def state(self):
        return [*Target.state(self), *Native.state(self)]


class Unconditional(Together):
    """Does so in every step."""

    kinds = Together.kinds[1:]


class Looking(Stepping):
    """Uses what it counts: the loss depends on it."""

    def prepare(self):
        self.steps = tf.Variable(0.0, trainable=False, name="steps")

    def before(self, x):
        self.steps.assign_add(1.0)

    def loss_of(self, y, p):
        return sparse(y, p) / self.steps

    def state(self):
        return [self.steps.numpy()]


def made(kind: type[Stepping], **kwargs: Any) -> Callable[[], Stepping]:
    """Return a function that builds and compiles a model."""

    def make() -> Stepping:
        model = kind(m.mlp().layers)
        model.prepare()
        model.compile(keras.optimizers.SGD(0.02), **kwargs)
        return model

    return make
