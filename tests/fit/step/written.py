"""A model whose own ``train_step`` writes state, as training scripts do."""

import keras
import tensorflow as tf

from keras_towers.inspection.conformance import case_models as m
from tests.fit.step.acts import Stepping

WIDTH = m.FEATURES.shape[1]


class Writing(Stepping):
    """Writes Keras's variables and TensorFlow's, before and after its update.

    In every other step it clips its weights, as a Wasserstein critic.
    """

    def prepare(self):
        weights = self.trainable_variables
        target = m.mlp()
        target.set_weights([v.numpy() for v in weights])
        # A target network, updated by hand, that no layer tracks.
        self.__dict__["target"] = target
        self.shadow = [self._zeros(w.shape) for w in weights]
        self.counted = self._zeros(dtype="int64")
        self.seen = self._zeros(aggregation="sum")
        self.first = self._zeros(aggregation="only_first_replica")
        self.queue = self._zeros((4, WIDTH))
        self.steps = tf.Variable(0, trainable=False)
        self.mean = tf.Variable(tf.zeros(WIDTH), trainable=False)
        self.table = tf.Variable(tf.zeros([3, 2]), trainable=False)

    def _zeros(self, shape=(), **options):
        options = {"initializer": "zeros", "trainable": False, **options}
        return self.add_weight(shape=shape, **options)

    def before(self, x):
        for weight in self.trainable_variables:
            if "bias" in weight.name:
                weight.assign(0.9 * weight)

    def after(self, x, p):
        target = self.__dict__["target"].trainable_variables
        for shadow, old, new in zip(
            self.shadow, target, self.trainable_variables, strict=True
        ):
            shadow.assign(0.9 * shadow + 0.1 * new)
            old.assign(0.8 * old + 0.2 * new)
        self.counted.assign_add(1)
        self.seen.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        self.first.assign(self.first * 0.5 + 1.0)
        self.queue.assign(tf.concat([x, self.queue], 0)[:4])
        self.steps.assign_add(1)
        self.mean.assign_sub(0.3 * (self.mean - tf.reduce_mean(x, 0)))
        self.table.scatter_add(tf.IndexedSlices(tf.ones([1, 2]), [1]))
        self.table[2, 0].assign(self.table[2, 0] + 2.0)
        tf.cond(self.steps % 2 == 0, self._clip, lambda: 0)

    def _clip(self):
        for weight in self.trainable_variables:
            weight.assign(tf.clip_by_value(weight, -0.05, 0.05))
        return 0

    def state(self):
        """The state that Keras does not know, as arrays."""
        native = [v.numpy() for v in (self.steps, self.mean, self.table)]
        return [*self.__dict__["target"].get_weights(), *native]


def made(**options):
    """A function that builds and compiles a model, the same every time."""
    return lambda: Writing.made(keras.optimizers.SGD(0.02), **options)
