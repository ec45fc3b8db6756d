"""Checks of a worker: steps that write state by themselves, on two ranks."""

import keras
import tensorflow as tf

from tests.exactness import models as m
from tests.exactness.cases import Case
from tests.fit.step import written
from tests.kit.compare import outcome
from tests.kit.ranks import check
from tests.kit.training import X, Y, compiled, fit, stacked
from tests.processes.exact import assert_one_device
from tests.processes.small import RANK, Strategy


def assert_exact(make, act):
    """What is done on the ranks is what is done by one process."""
    return assert_one_device(
        Case(make, act, 5e-6),
        lambda: outcome(make, act, in_graph=False),
        Strategy(),
    )


@check
def state_that_a_step_writes_whatever_runs_in_between():
    def act(model):
        between = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda *_: model.predict(X[:7], verbose=0)
        )
        # The last batch of five is uneven; a batch of one leaves a rank idle.
        history = model.fit(X, Y, 12, 2, 0, shuffle=False, callbacks=[between])
        logs = model.train_on_batch(X[:1], Y[:1])
        return history.history, logs, model.state()

    assert_exact(written.made(), act)


def scaled():
    inner = keras.optimizers.Adam(0.01, global_clipnorm=0.05)
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)


@check
def xla_compiles_what_each_rank_computes():
    make = compiled(m.mlp, scaled, jit_compile=True)
    assert_exact(make, lambda model: fit(model, x=X[:21], y=Y[:21]))


class Largest(keras.metrics.Metric):
    """The largest score, which is no mean over examples."""

    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(tf.maximum(self.value, tf.reduce_max(y_pred)))

    def result(self):
        return self.value


@check
def metrics_that_are_no_sums():
    make = stacked(
        lambda: [keras.layers.Dense(3)],
        metrics=lambda: [Largest(), "accuracy"],
    )
    assert_exact(make, lambda model: fit(model, x=X[:13], y=Y[:13]))


class WholeBatch(keras.Model):
    """Losses, state and effects that belong to the whole batch."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(6)
        self.norm = keras.layers.BatchNormalization(momentum=0.5)
        self.queue = self.add_weight(
            shape=(5, 6), initializer="ones", trainable=False
        )
        self.mean = keras.metrics.Mean(name="mean")
        self.seen = []

    def call(self, x, training=False):
        return tf.nn.l2_normalize(
            self.norm(self.dense(x), training=training), -1
        )

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            one = self(x, training=True)
            other = self(0.9 * x + 0.1, training=True)
            scores = tf.matmul(
                one, tf.concat([other, self.queue], 0), False, True
            )
            labels = tf.range(tf.shape(x)[0])
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels, scores
            )
            loss = tf.reduce_mean(losses)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.queue.assign(tf.concat([other, self.queue], 0)[:5])
        self.mean.update_state(loss)
        number = tf.py_function(self.counted, [loss], tf.float32)
        # Drawn without a seed, and of a known shape.
        drawn = tf.random.uniform([])
        return {
            "loss": loss,
            "mean": self.mean.result(),
            "number": number,
            "drawn": drawn - drawn,
        }

    def counted(self, loss):
        self.seen.append(float(loss))
        return float(len(self.seen))


@check
def losses_of_the_whole_batch_and_a_queue():
    made = []

    def make():
        keras.utils.set_random_seed(6)
        model = WholeBatch()
        model(X[:2])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
        made.append(model)
        return model

    def act(model):
        # Batches of which a rank has fewer than the other, or none.
        history = model.fit(X[:25], Y[:25], 8, 2, 0, shuffle=False)
        return history.history

    assert_exact(make, act)
    calls = [len(model.seen) for model in made]
    # What is no variable is done by rank 0; the reference is its own.
    assert calls == ([8, 8] if RANK == 0 else [0]), calls
