"""Habits: decorated steps, layouts of batches, loops, effects."""

import keras
import pytest
import tensorflow as tf

from tests.exactness.strangers.base import (
    Own,
    case,
    cross,
    dense,
    floats,
    ints,
    step,
)


@step(
    floats(20, 4),
    ints(3, 20),
    net=lambda: keras.Sequential(
        [
            keras.layers.Dense(6, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Dense(3),
        ]
    ),
    optimizer=lambda: keras.optimizers.Adam(1e-2, global_clipnorm=0.5),
)
class StepsThatAreTfFunctions(Own):
    def create(self):
        self.tracker = keras.metrics.Mean(name="loss")

    @tf.function
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(cross(y, self(x, training=True)))
            if loss > 100.0:
                loss = loss * 0.5
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    @tf.function
    def test_step(self, data):
        x, y = data
        self.tracker.update_state(tf.reduce_mean(cross(y, self(x))))
        return {"loss": self.tracker.result()}


@step(
    floats(20, 4),
    floats(20, 1),
    net=(6, 1),
    optimizer=lambda: keras.optimizers.Adam(0.1),
)
class SlotsThatTheStepDamps(Own):
    """The step changes slots and the rate where the loss has grown."""

    def create(self):
        self.best = self.state((), 1e9)

    def train_step(self, data):
        logs = super().train_step(data)
        worse = logs["loss"] > 0.9 * self.best
        for slot in self.optimizer._momentums:
            slot.assign(tf.where(worse, 0.5 * slot, slot))
        rate = self.optimizer.learning_rate
        rate.assign(tf.where(worse, 0.7 * rate, rate))
        self.best.assign(tf.minimum(self.best, logs["loss"]))
        return {**logs, "rate": tf.convert_to_tensor(rate)}


@step(floats(20, 4), ints(2, 20), batch=14, net=(6, 3))
class PairsAndTriplesOfNeighbouringRows(Own):
    def loss_of(self, x, y):
        z = self.net(x)
        pairs = tf.reshape(z, [-1, 2, 3])
        same = tf.reshape(y, [-1, 2])
        d = tf.norm(pairs[:, 0] - pairs[:, 1] + 1e-6, axis=1)
        same = tf.cast(same[:, 0] == same[:, 1], "float32")
        first, second = tf.split(z, 2)
        return tf.reduce_mean(
            same * d**2 + (1 - same) * tf.nn.relu(1 - d) ** 2
        ) + 0.1 * tf.reduce_mean(first * second)


@step(
    floats(20, 5, 3),
    floats(20, 1),
    net=(5, 4),
    batches=lambda data: data.batch(13).map(
        lambda x, y: (tf.transpose(x, [1, 0, 2]), y)
    ),
    predict=False,
)
class BatchesWithTimeFirst(Own):
    def create(self):
        self.head = keras.layers.Dense(1)

    def call(self, x):
        h = tf.zeros([tf.shape(x)[1], 4])
        for t in range(5):
            h = tf.tanh(self.net(tf.concat([x[t], h], -1)))
        return self.head(h)


@step(floats(20, 4), ints(3, 20), net=(6, 3))
class LabelledDataWithAnIteratorOfUnlabelled(Own):
    """The step draws its own batches from a second data set."""

    def create(self):
        data = tf.data.Dataset.from_tensor_slices(floats(33, 4, seed=5))
        self.others = iter(data.repeat().batch(11))

    def loss_of(self, x, y):
        u = self.net(next(self.others))
        p = tf.nn.softmax(u)
        return tf.reduce_mean(cross(y, self.net(x))) - 0.1 * tf.reduce_mean(
            tf.reduce_sum(p * tf.math.log(p + 1e-9), 1)
        )


def emptied(x, y):
    rows = tf.cast(tf.reduce_sum(x) > 1, "int32") * 9
    return x[:rows], y[:rows]


@step(
    floats(20, 4),
    floats(20, 1),
    net=(6, 1),
    batches=lambda data: data.batch(5).map(emptied),
    predict=False,
)
class BatchesWithoutRowsBetweenOthers(Own):
    def loss_of(self, x, y):
        loss = tf.reduce_sum((self.net(x) - y) ** 2)
        return {"loss": loss, "rows": tf.shape(x)[0]}


@step(floats(20, 4), floats(20, 1), net=(6, 1))
class DrawsThatNobodySeeded(Own):
    """Keras's own generator, and operations that have a seed of the program."""

    def create(self):
        self.drop = keras.layers.Dropout(0.3)
        self.noise = keras.layers.GaussianNoise(0.2)

    def loss_of(self, x, y):
        x = self.noise(self.drop(x, training=True), training=True)
        x = x + 0.1 * keras.random.normal(tf.shape(x))
        x = x + 0.1 * keras.random.uniform((4,))
        x = x + 0.1 * tf.random.normal(tf.shape(x), seed=4)
        x = x + 0.1 * tf.random.uniform(tf.shape(x))
        order = tf.random.shuffle(tf.range(tf.shape(x)[0]), seed=8)
        h = tf.nn.dropout(self.net(tf.gather(x, order)), 0.1)
        return tf.reduce_mean((h - tf.gather(y, order)) ** 2)


class Failing(Own):
    def loss_of(self, x, y):
        small = tf.debugging.assert_less(tf.reduce_max(x), 50.0, "too large")
        with tf.control_dependencies([small]):
            return super().loss_of(x, y)


def fail_and_go_on(model):
    x, y = floats(20, 4), floats(20, 1)
    bad = x.copy()
    bad[8, 2] = 99
    options = {"verbose": 0, "shuffle": False}
    model.fit(x[:9], y[:9], batch_size=9, **options)
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        model.fit(bad, y, batch_size=7, **options)
    # Which updates of the failed step have happened is TensorFlow's to say.
    model.set_weights([w * 0 + 0.1 for w in model.get_weights()])
    for variable in model.optimizer.variables:
        variable.assign(tf.zeros_like(variable))
    model.optimizer.learning_rate = 1e-3
    model.fit(x, y, batch_size=7, **options)
    return {}


@case
def failing_step_then_a_good_one():
    """An assertion fails in one batch; the caller goes on."""
    model = Failing(dense(6, 1))
    model(floats(2, 4))
    model.compile("adam")
    return model, fail_and_go_on, None


@step(floats(20, 4), floats(20, 3), net=(6, 3))
class SparseTensorsMadeInTheStep(Own):
    def loss_of(self, x, y):
        s = tf.sparse.from_dense(tf.where(x > 0.3, x, 0.0))
        h = tf.sparse.sparse_dense_matmul(s, self.net(tf.eye(4)))
        gram = tf.sparse.sparse_dense_matmul(s, h, adjoint_a=True)
        rows = tf.sparse.reduce_sum(s, 1)
        rows.set_shape([None])
        soft = tf.sparse.to_dense(tf.sparse.softmax(s))
        picked = tf.scatter_nd(
            s.indices[:, :1], s.values * 0.5, tf.shape(x, "int64")[:1]
        )
        added = tf.tensor_scatter_nd_add(h[:, 0], s.indices[:, :1], s.values)
        return (
            tf.reduce_mean((h - y) ** 2)
            + 0.01 * tf.reduce_sum(gram**2)
            + tf.reduce_mean(rows * h[:, 0] + picked * added)
            + tf.reduce_mean(soft * h[:, :1])
        )


@step(
    floats(20, 4).astype("float64"),
    floats(20, 3).astype("float64"),
    net=(6, 3),
    # Unlike those of arrays, `y` of its batches are not cast.
    batches=lambda data: data.batch(13),
    policy="float64",
    tolerance=1e-6,
)
class DoublesAndOtherTypes(Own):
    def loss_of(self, x, y):
        h = self.net(x)
        z = tf.complex(h[:, :1], h[:, 1:2])
        p = tf.reduce_sum(z * tf.math.conj(tf.reduce_mean(z, 0)))
        return {
            "loss": tf.reduce_mean((h - y) ** 2) + tf.math.real(p) * 0.01,
            "half": tf.reduce_sum(tf.cast(h > 0, "float16")),
            "short": tf.reduce_sum(tf.cast(h > 0, "int16")),
            "unsigned": tf.reduce_sum(tf.cast(h > 0, "uint8")),
            "long": tf.reduce_sum(tf.cast(h * 100, "int64")),
        }


@step(floats(20, 4), floats(20, 1), net=(6, 1))
class ReplayByAQueueOfTensorflow(Own):
    def create(self):
        self.queue = tf.queue.FIFOQueue(100, ["float32"], [[4]])

    def loss_of(self, x, y):
        with tf.control_dependencies([self.queue.enqueue_many([x])]):
            old = self.queue.dequeue_many(3)
        return tf.reduce_mean((self.net(x) - y) ** 2) + 0.1 * tf.reduce_mean(
            self.net(old) ** 2
        )


@step(floats(20, 4), floats(20, 1), net=(6, 1))
class OptimizerAppliedInABranchBeforeItIsBuilt(Own):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        good = tf.reduce_all(
            [tf.reduce_all(tf.math.is_finite(g)) for g in gradients]
        )

        def update():
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return tf.constant(1.0)

        return {
            "loss": loss,
            "good": tf.cond(good, update, lambda: tf.constant(0.0)),
        }
