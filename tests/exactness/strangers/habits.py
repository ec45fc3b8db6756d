"""Habits: decorated steps, layouts of batches, loops, effects."""

import collections

import keras
import numpy as np
import tensorflow as tf

from tests.exactness.strangers.base import (
    Own,
    built,
    case,
    cross,
    dense,
    floats,
    ints,
)


@case
def train_step_that_is_a_tf_function():
    class Decorated(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = keras.Sequential(
                [
                    keras.layers.Dense(6, use_bias=False),
                    keras.layers.BatchNormalization(),
                    keras.layers.ReLU(),
                    keras.layers.Dense(3),
                ]
            )
            self.tracker = keras.metrics.Mean(name="loss")

        def call(self, x, training=False):
            return self.net(x, training=training)

        @tf.function
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(cross(y, self(x, training=True)))
                if loss > 100.0:
                    loss = loss * 0.5
            self.optimizer.apply_gradients(
                zip(
                    tape.gradient(loss, self.trainable_variables),
                    self.trainable_variables,
                    strict=True,
                )
            )
            self.tracker.update_state(loss)
            return {"loss": self.tracker.result()}

        @tf.function
        def test_step(self, data):
            x, y = data
            self.tracker.update_state(tf.reduce_mean(cross(y, self(x))))
            return {"loss": self.tracker.result()}

    return (
        built(
            Decorated(),
            floats(2, 4),
            optimizer=keras.optimizers.Adam(1e-2, global_clipnorm=0.5),
        ),
        floats(20, 4),
        ints(3, 20),
    )


@case
def step_that_logs_the_state_of_its_optimizer():
    """Slots are read after the first update, as to watch the momentum."""

    class Watched(Own):
        def train_step(self, data):
            logs = super().train_step(data)
            slots = tf.add_n(
                [tf.reduce_sum(v**2) for v in self.optimizer._momentums]
            )
            return {
                **logs,
                "momentum": tf.sqrt(slots),
                "rate": tf.convert_to_tensor(self.optimizer.learning_rate),
                "count": len(self.optimizer.variables),
                "iteration": self.optimizer.iterations.value,
            }

        def loss_of(self, x, y):
            return tf.reduce_mean((self.net(x) - y) ** 2)

    return (
        built(Watched(net=dense(6, 1)), floats(2, 4)),
        floats(20, 4),
        floats(20, 1),
    )


@case
def slots_that_the_step_damps():
    """The step changes slots and the rate where the loss has grown."""

    class Damped(Own):
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

        def loss_of(self, x, y):
            return tf.reduce_mean((self.net(x) - y) ** 2)

    return (
        built(
            Damped(net=dense(6, 1)),
            floats(2, 4),
            optimizer=keras.optimizers.Adam(0.1),
        ),
        floats(20, 4),
        floats(20, 1),
    )


@case(batch=14)
def pairs_and_triples_of_neighbouring_rows():
    class Pairs(Own):
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

    return (
        built(Pairs(net=dense(6, 3)), floats(2, 4)),
        floats(20, 4),
        ints(2, 20),
    )


@case(predict=False)
def batches_with_time_first():
    class TimeMajor(Own):
        def call(self, x):
            h = tf.zeros([tf.shape(x)[1], 4])
            for t in range(5):
                h = tf.tanh(self.net(tf.concat([x[t], h], -1)))
            return self.head(h)

        def loss_of(self, x, y):
            return tf.reduce_mean((self(x) - y) ** 2)

    model = TimeMajor(net=dense(5, 4), head=keras.layers.Dense(1))
    built(model, floats(5, 2, 3))
    data = tf.data.Dataset.from_tensor_slices(
        (floats(20, 5, 3), floats(20, 1))
    ).batch(13)
    return model, data.map(lambda x, y: (tf.transpose(x, [1, 0, 2]), y)), None


@case(predict=False)
def support_and_query_of_other_lengths():
    class Episodes(Own):
        def loss_of(self, x, y):
            s, q = self.net(x["support"]), self.net(x["query"])
            centres = tf.math.unsorted_segment_mean(s, y["support"], 2)
            d = tf.reduce_sum((q[:, None] - centres[None]) ** 2, -1)
            return tf.reduce_mean(cross(y["query"], -d))

    model = Episodes(net=dense(6, 3, bias=False))
    built(model, floats(2, 4))
    x = {"support": floats(4, 5, 4), "query": floats(4, 7, 4, seed=1)}
    y = {"support": ints(2, 4, 5), "query": ints(2, 4, 7, seed=1)}
    return model, tf.data.Dataset.from_tensor_slices((x, y)), None


@case
def labelled_data_with_an_iterator_of_unlabelled():
    """The step draws its own batches from a second data set."""

    class Semi(Own):
        def create(self):
            data = (
                tf.data.Dataset.from_tensor_slices(floats(33, 4, seed=5))
                .repeat()
                .batch(11)
            )
            self.others = iter(data)

        def loss_of(self, x, y):
            u = self.net(next(self.others))
            p = tf.nn.softmax(u)
            return tf.reduce_mean(cross(y, self.net(x))) - 0.1 * tf.reduce_mean(
                tf.reduce_sum(p * tf.math.log(p + 1e-9), 1)
            )

    return (
        built(Semi(net=dense(6, 3)), floats(2, 4)),
        floats(20, 4),
        ints(3, 20),
    )


Item = collections.namedtuple("Item", "a b")


@case(predict=False)
def named_tuples_and_nested_batches():
    class Nested(Own):
        def call(self, x):
            return self.net(
                tf.concat(
                    [
                        x["i"].a,
                        x["i"].b[0],
                        tf.cast(x["t"][1], "float32")[:, None],
                    ],
                    1,
                )
            )

        def loss_of(self, x, y):
            return tf.reduce_mean((self(x) - y[0]) ** 2) + 0 * tf.cast(
                tf.size(y[1]), "float32"
            )

    model = Nested(net=dense(6, 1))
    x = {
        "i": Item(floats(20, 2), (floats(20, 1), floats(20, 3))),
        "t": (floats(20), ints(9, 20).astype("uint8")),
    }
    data = tf.data.Dataset.from_tensor_slices(
        (x, (floats(20, 1), ints(3, 20, 2, 2)))
    ).batch(13)
    for first, _ in data.take(1):
        model(first)
    model.compile("adam")
    return model, data, None


@case(predict=False)
def scalars_beside_the_rows():
    """A number of the batch, such as its weight, comes with the rows."""

    class Weighted(Own):
        def loss_of(self, x, y):
            return x["weight"] * tf.reduce_mean((self.net(x["v"]) - y) ** 2)

    model = Weighted(net=dense(6, 1))
    built(model, floats(2, 4))
    data = tf.data.Dataset.from_tensor_slices(
        (floats(20, 4), floats(20, 1))
    ).batch(13)
    return (
        model,
        data.map(
            lambda x, y: ({"v": x, "weight": tf.reduce_sum(x) * 0.01 + 1}, y)
        ),
        None,
    )


@case(predict=False)
def batches_without_rows_between_others():
    class Empty(Own):
        def loss_of(self, x, y):
            return {
                "loss": tf.reduce_sum((self.net(x) - y) ** 2),
                "rows": tf.shape(x)[0],
            }

    model = built(Empty(net=dense(6, 1)), floats(2, 4))
    data = tf.data.Dataset.from_tensor_slices(
        (floats(20, 4), floats(20, 1))
    ).batch(5)
    data = data.map(
        lambda x, y: (
            x[: tf.cast(tf.reduce_sum(x) > 1, "int32") * 9],
            y[: tf.cast(tf.reduce_sum(x) > 1, "int32") * 9],
        )
    )
    return model, data, None


@case
def draws_that_nobody_seeded():
    """Keras's own generator, and operations that have a seed of the program."""

    class Draws(Own):
        def create(self):
            self.drop = keras.layers.Dropout(0.3)
            self.noise = keras.layers.GaussianNoise(0.2)

        def loss_of(self, x, y):
            x = self.noise(self.drop(x, training=True), training=True)
            x = (
                x
                + 0.1 * keras.random.normal(tf.shape(x))
                + keras.random.uniform((4,)) * 0.1
            )
            x = (
                x
                + 0.1 * tf.random.normal(tf.shape(x), seed=4)
                + 0.1 * tf.random.uniform(tf.shape(x))
            )
            order = tf.random.shuffle(tf.range(tf.shape(x)[0]), seed=8)
            h = tf.nn.dropout(self.net(tf.gather(x, order)), 0.1)
            return tf.reduce_mean((h - tf.gather(y, order)) ** 2)

    return (
        built(Draws(net=dense(6, 1)), floats(2, 4)),
        floats(20, 4),
        floats(20, 1),
    )


@case
def failing_step_then_a_good_one():
    """An assertion fails in one batch; the caller goes on."""

    class Failing(Own):
        def loss_of(self, x, y):
            with tf.control_dependencies(
                [
                    tf.debugging.assert_less(
                        tf.reduce_max(x), 50.0, message="too large"
                    )
                ]
            ):
                return tf.reduce_mean((self.net(x) - y) ** 2)

    def script(model):
        x, y = floats(20, 4), floats(20, 1)
        bad = x.copy()
        bad[8, 2] = 99
        model.fit(x[:9], y[:9], batch_size=9, verbose=0)
        try:
            model.fit(bad, y, batch_size=7, verbose=0, shuffle=False)
            error = "none"
        except tf.errors.InvalidArgumentError as e:
            error = "too large" in str(e)
        # Which updates of the failed step have happened is TensorFlow's to say.
        model.set_weights([w * 0 + 0.1 for w in model.get_weights()])
        for variable in model.optimizer.variables:
            variable.assign(tf.zeros_like(variable) + variable * 0)
        model.optimizer.learning_rate = 1e-3
        model.fit(x, y, batch_size=7, verbose=0, shuffle=False)
        return {"error": np.array(str(error))}

    return built(Failing(net=dense(6, 1)), floats(2, 4)), script, None


@case
def sparse_tensors_made_in_the_step():
    class Sparse(Own):
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
            added = tf.tensor_scatter_nd_add(
                h[:, 0], s.indices[:, :1], s.values
            )
            return (
                tf.reduce_mean((h - y) ** 2)
                + 0.01 * tf.reduce_sum(gram**2)
                + tf.reduce_mean(rows * h[:, 0] + picked * added)
                + tf.reduce_mean(soft * h[:, :1])
            )

    return (
        built(Sparse(net=dense(6, 3)), floats(2, 4)),
        floats(20, 4),
        floats(20, 3),
    )


@case(tolerance=1e-6)
def doubles_and_other_types():
    keras.config.set_dtype_policy("float64")
    # `y` of a batch is not cast.

    class Doubles(Own):
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

    data = floats(20, 4).astype("float64"), floats(20, 3).astype("float64")
    return (
        built(Doubles(net=dense(6, 3)), data[0][:2]),
        tf.data.Dataset.from_tensor_slices(data).batch(13),
        None,
    )


@case
def replay_by_a_queue_of_tensorflow():
    class Queue(Own):
        def create(self):
            self.queue = tf.queue.FIFOQueue(100, ["float32"], [[4]])

        def loss_of(self, x, y):
            with tf.control_dependencies([self.queue.enqueue_many([x])]):
                old = self.queue.dequeue_many(3)
            return tf.reduce_mean(
                (self.net(x) - y) ** 2
            ) + 0.1 * tf.reduce_mean(self.net(old) ** 2)

    return (
        built(Queue(net=dense(6, 1)), floats(2, 4)),
        floats(20, 4),
        floats(20, 1),
    )


@case
def optimizer_applied_in_a_branch_before_it_is_built():
    class Branch(Own):
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
                self.optimizer.apply_gradients(
                    zip(gradients, weights, strict=True)
                )
                return tf.constant(1.0)

            return {
                "loss": loss,
                "good": tf.cond(good, update, lambda: tf.constant(0.0)),
            }

        def loss_of(self, x, y):
            return tf.reduce_mean((self.net(x) - y) ** 2)

    return (
        built(Branch(net=dense(6, 1)), floats(2, 4)),
        floats(20, 4),
        floats(20, 1),
    )
