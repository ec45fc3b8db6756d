"""Habits of people: lazy layers, decorated steps, loops around batches, effects."""

import collections
import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from .base import CASES, Own, built, case, dense, floats, ints


def cross(y, logits):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.cast(y, "int32"), logits
    )


@case(evaluate=False, predict=False)
def gan_whose_networks_nobody_built():
    class Lazy(keras.Model):
        def __init__(self):
            super().__init__()
            self.g = keras.Sequential(
                [
                    keras.layers.Dense(6, use_bias=False),
                    keras.layers.BatchNormalization(),
                    keras.layers.Dense(5),
                ]
            )
            self.d = keras.Sequential(
                [
                    keras.layers.Dense(6),
                    keras.layers.LeakyReLU(),
                    keras.layers.Dense(1),
                ]
            )
            self.seed = keras.random.SeedGenerator(3)
            self.mean = keras.metrics.Mean(name="d")

        def compile(self, g_opt, d_opt, loss_fn):
            super().compile()
            self.g_opt, self.d_opt, self.loss_fn = g_opt, d_opt, loss_fn

        @property
        def metrics(self):
            return [self.mean]

        def train_step(self, real):
            n = tf.shape(real)[0]
            z = keras.random.normal((n, 3), seed=self.seed)
            with tf.GradientTape() as tape:
                both = tf.concat([self.d(self.g(z)), self.d(real)], 0)
                labels = tf.concat([tf.ones((n, 1)), tf.zeros((n, 1))], 0)
                loss = self.loss_fn(labels, both)
            self.d_opt.apply_gradients(
                zip(
                    tape.gradient(loss, self.d.trainable_weights),
                    self.d.trainable_weights,
                )
            )
            with tf.GradientTape() as tape:
                g_loss = self.loss_fn(
                    tf.zeros((n, 1)), self.d(self.g(z, training=True))
                )
            self.g_opt.apply_gradients(
                zip(
                    tape.gradient(g_loss, self.g.trainable_weights),
                    self.g.trainable_weights,
                )
            )
            self.mean.update_state(loss)
            return {
                "d": self.mean.result(),
                "g": g_loss,
                "steps": self.g_opt.iterations.value,
            }

    model = Lazy()
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.optimizers.Adam(2e-3),
        keras.losses.BinaryCrossentropy(True),
    )
    return model, floats(20, 5), None


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
    """The step changes an optimizer's slots and rate where the loss has grown."""

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
def files_prints_and_python_that_watch():
    class Watch(Own):
        def create(self):
            self.rows = []
            self.folder = tempfile.mkdtemp()
            self.writer = tf.summary.create_file_writer(self.folder)
            self.table = tf.lookup.StaticHashTable(
                tf.lookup.KeyValueTensorInitializer(
                    tf.constant([0, 1, 2], "int64"),
                    tf.constant([0.5, 1.0, 2.0]),
                ),
                1.0,
            )
            self.total = tf.Variable("", trainable=False)

        def loss_of(self, x, y):
            losses = cross(y, self.net(x)) * self.table.lookup(y)
            tf.print(
                "losses",
                losses,
                summarize=-1,
                output_stream="file://" + self.folder + "/prints",
            )

            def seen(v):
                self.rows.append(v.numpy().copy())
                return np.float32(len(self.rows))

            calls = tf.py_function(seen, [losses], "float32")
            calls.set_shape([])
            with self.writer.as_default(step=self.optimizer.iterations.value):
                tf.summary.histogram("losses", losses)
            self.total.assign(
                tf.strings.join(
                    [self.total, tf.strings.as_string(tf.shape(x)[0])], ","
                )
            )
            return {"loss": tf.reduce_mean(losses), "calls": calls}

        def outcome(self):
            with open(self.folder + "/prints") as lines:
                numbers = [
                    [float(v) for v in line[8:-2].split()] for line in lines
                ]
            return {
                "rows": np.concatenate(self.rows),
                "prints": np.concatenate([np.array(n) for n in numbers]),
                "calls": np.array(len(self.rows)),
                "files": np.array(len(os.listdir(self.folder))),
            }

    return (
        built(Watch(net=dense(6, 3)), floats(2, 4)),
        floats(20, 4),
        ints(3, 20),
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
def classical_gan_by_train_on_batch():
    """The discriminator is compiled, then frozen within the combined model."""
    z, x = keras.Input((3,)), keras.Input((5,))
    h = keras.layers.Dense(6, use_bias=False)(z)
    h = keras.layers.BatchNormalization(momentum=0.8)(h)
    g = keras.Model(
        z, keras.layers.Dense(5, "tanh")(keras.layers.LeakyReLU()(h))
    )
    d = keras.Model(
        x,
        keras.layers.Dense(1, "sigmoid")(
            keras.layers.Dropout(0.2, seed=1)(keras.layers.Dense(6)(x))
        ),
    )
    d.compile(
        keras.optimizers.Adam(1e-3), "binary_crossentropy", metrics=["accuracy"]
    )
    d.trainable = False
    combined = keras.Model(z, d(g(z)))
    combined.compile(keras.optimizers.Adam(1e-3), "binary_crossentropy")
    combined.d, combined.g = d, g

    def script(model):
        logs = []
        rng = np.random.default_rng(0)
        for _ in range(3):
            noise = rng.normal(size=(7, 3)).astype("float32")
            fake = g.predict(noise, verbose=0)
            logs.append(d.train_on_batch(floats(7, 5), np.ones((7, 1)))[0])
            logs.append(d.train_on_batch(fake, np.zeros((7, 1)))[0])
            logs.append(
                combined.train_on_batch(
                    noise, np.ones((7, 1)), sample_weight=np.linspace(0, 1, 7)
                )
            )
            logs.append(
                d.test_on_batch(fake, np.zeros((7, 1)), return_dict=True)[
                    "loss"
                ]
            )
        out = {f"d{i}": v.numpy() for i, v in enumerate(d.optimizer.variables)}
        return {
            "logs": np.array(logs, "float32"),
            "fake": g.predict_on_batch(noise),
            **out,
        }

    return combined, script, None


@case
def models_that_share_layers_and_callbacks_that_fit():
    """One encoder in two models; each epoch of one trains, and judges, the other."""
    x = keras.Input((4,))
    h = keras.layers.Dense(5, "tanh")(x)
    h = keras.layers.BatchNormalization()(h)
    a, b = (
        keras.Model(x, keras.layers.Dense(1)(h)),
        keras.Model(x, keras.layers.Dense(3)(h)),
    )
    a.compile("adam", "mse")
    b.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(True),
        metrics=["accuracy"],
    )

    def script(model):
        found = []

        class Other(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                found.extend(
                    b.fit(
                        floats(11, 4),
                        ints(3, 11),
                        batch_size=4,
                        verbose=0,
                        shuffle=False,
                    ).history["loss"]
                )
                found.append(float(np.sum(b.predict(floats(5, 4), verbose=0))))

            def on_train_batch_end(self, batch, logs=None):
                found.append(logs["loss"])
                found.append(
                    float(np.sum(self.model.predict_on_batch(floats(2, 4))))
                )

        a.fit(
            floats(20, 4),
            floats(20, 1),
            batch_size=13,
            epochs=2,
            verbose=0,
            shuffle=False,
            callbacks=[Other()],
        )
        return {
            "found": np.array(found, "float32"),
            "b": np.concatenate([w.ravel() for w in b.get_weights()]),
        }

    return a, script, None


@case
def layer_loaded_from_a_saved_model():
    """A function of an export runs within the step, and its variables train."""

    class Exported(tf.Module):
        def __init__(self):
            self.w = tf.Variable(tf.random.stateless_normal([4, 3], (1, 2)))
            self.mean = tf.Variable(tf.zeros([3]), trainable=False)

        @tf.function(input_signature=[tf.TensorSpec([None, 4])])
        def __call__(self, x):
            h = x @ self.w
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(h, 0))
            return h - self.mean

    folder = tempfile.mkdtemp()
    tf.saved_model.save(Exported(), folder)
    loaded = tf.saved_model.load(folder)

    class Uses(Own):
        def create(self):
            self.loaded_w, self.loaded_mean = loaded.w, loaded.mean

        def loss_of(self, x, y):
            return tf.reduce_mean((self.net(loaded(x)) - y) ** 2)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.loss_of(x, y)
            weights = [
                *(w.value for w in self.trainable_variables),
                self.loaded_w,
            ]
            gradients = tape.gradient(loss, weights)
            self.optimizer.apply(gradients[:-1], self.trainable_variables)
            self.loaded_w.assign_sub(0.1 * gradients[-1])
            return {"loss": loss}

        def call(self, x):
            return self.net(loaded(x))

    return (
        built(Uses(net=dense(6, 1)), floats(2, 4)),
        floats(20, 4),
        floats(20, 1),
    )


@case
def fused_normalisation_of_version_one():
    class Fused(keras.layers.Layer):
        def build(self, shape):
            w = dict(shape=(shape[-1],))
            self.scale, self.offset = (
                self.add_weight(initializer="ones", **w),
                self.add_weight(initializer="zeros", **w),
            )
            self.mean = self.add_weight(
                initializer="zeros", trainable=False, **w
            )
            self.variance = self.add_weight(
                initializer="ones", trainable=False, **w
            )

        def call(self, x, training=False):
            get = tf.convert_to_tensor
            if not training:
                return tf.compat.v1.nn.fused_batch_norm(
                    x,
                    get(self.scale),
                    get(self.offset),
                    get(self.mean),
                    get(self.variance),
                    is_training=False,
                )[0]
            y, mean, variance = tf.compat.v1.nn.fused_batch_norm(
                x, get(self.scale), get(self.offset)
            )
            self.mean.assign(0.9 * self.mean + 0.1 * mean)
            self.variance.assign(0.9 * self.variance + 0.1 * variance)
            return y

    x = keras.Input((3, 3, 2))
    h = Fused()(keras.layers.Conv2D(3, 2, use_bias=False)(x))
    model = keras.Model(x, keras.layers.Dense(1)(keras.layers.Flatten()(h)))
    model.compile("adam", "mse")
    return model, floats(20, 3, 3, 2), floats(20, 1)


@case
def extrema_with_ties_and_reductions_of_all_kinds():
    class Reductions(Own):
        def loss_of(self, x, y):
            h = tf.nn.relu(self.net(x))
            top = tf.reduce_max(h, 0) + tf.reduce_min(h, 0)  # many are 0
            prod = tf.reduce_prod(1 + 0.01 * h, 0)
            lse = tf.reduce_logsumexp(h, 0)
            first = tf.gather(h, tf.argmax(tf.reduce_sum(h, 1)))
            ends = h[-1] + h[0] + h[-2:][0]
            med = tf.sort(h, 0)[tf.shape(h)[0] // 2]
            cum = tf.math.cumprod(1 + 0.01 * h, 0)[-1] + tf.reduce_mean(
                tf.math.cumulative_logsumexp(h, 0), 0
            )
            flags = tf.cast(tf.reduce_any(h > 1, 0), "float32") + tf.cast(
                tf.reduce_all(h >= 0, 0), "float32"
            )
            bits = tf.cast(
                tf.reduce_sum(tf.bitwise.bitwise_xor(y, tf.reverse(y, [0]))),
                "float32",
            )
            words = tf.strings.reduce_join(
                tf.strings.as_string(y), separator=""
            )
            return {
                "loss": tf.reduce_sum(
                    top + prod + lse + first + 0.1 * ends + med + cum + flags
                )
                + 1e-3 * bits,
                "letters": tf.strings.length(words),
                "lead": tf.strings.to_number(tf.strings.substr(words, 0, 4)),
                "norm": tf.norm(h),
                "global": tf.linalg.global_norm([h, x]),
                "l2": tf.nn.l2_loss(h),
            }

    return (
        built(
            Reductions(
                net=dense(6, 4),
            ),
            floats(2, 4),
            optimizer="sgd",
        ),
        floats(20, 4),
        ints(2, 20),
    )


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


@case
def module_of_tensorflow_trained_by_hand():
    class Adam(tf.Module):
        def __init__(self, weights):
            self.m = [
                tf.Variable(tf.zeros_like(w), trainable=False) for w in weights
            ]
            self.t = tf.Variable(0.0, trainable=False)

        def step(self, weights, gradients):
            self.t.assign_add(1.0)
            for w, m, g in zip(weights, self.m, gradients, strict=True):
                with tf.control_dependencies([m.assign(0.9 * m + 0.1 * g)]):
                    w.assign_sub(0.05 * m.read_value() / (1 - 0.9**self.t))

    class Hand(Own):
        def create(self):
            self.inner = tf.Variable(tf.random.stateless_normal([4, 3], (1, 2)))
            self.bias = tf.Variable(tf.zeros([3]))
            self.hand = Adam([self.inner, self.bias])

        def train_step(self, data):
            x, y = data
            weights = [self.inner, self.bias]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(weights)
                loss = self.loss_of(x, y)
                with tape.stop_recording():
                    before = tf.reduce_mean(loss)
            self.hand.step(
                weights,
                tape.gradient(loss, weights, unconnected_gradients="zero"),
            )
            return {"loss": before, "after": self.loss_of(x, y)}

        def call(self, x):
            return tf.nn.bias_add(tf.matmul(x, self.inner), self.bias)

        def loss_of(self, x, y):
            return tf.reduce_mean((self(x) - y) ** 2)

    return (
        built(Hand(), floats(2, 4), optimizer="sgd"),
        floats(20, 4),
        floats(20, 3),
    )


@case
def metrics_of_my_own_and_other_overrides():
    class Over(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = dense(6, 3)
            self.seen = keras.metrics.Sum(name="seen")
            self.kappa = self.add_weight(
                shape=(3, 3), initializer="zeros", trainable=False
            )

        def call(self, x):
            return self.net(x)

        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            loss = super().compute_loss(x, y, y_pred, sample_weight)
            l2 = tf.add_n(
                [
                    tf.reduce_sum(w**2)
                    for w in self.trainable_variables
                    if "kernel" in w.path
                ]
            )
            return loss + 1e-3 * l2 + tf.reduce_mean(y_pred**2) * 0.01

        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            self.seen.update_state(
                tf.ones_like(y_pred[:, 0]),
                sample_weight=tf.cast(y, "float32") + 0.5,
            )
            self.kappa.assign_add(
                tf.math.confusion_matrix(
                    y, tf.argmax(y_pred, 1), 3, dtype="float32"
                )
            )
            logs = super().compute_metrics(x, y, y_pred, sample_weight)
            return {
                **logs,
                "diag": tf.linalg.trace(self.kappa.value)
                / tf.reduce_sum(self.kappa),
            }

        def reset_metrics(self):
            super().reset_metrics()
            self.kappa.assign(tf.zeros((3, 3)))

    model = Over()
    model(floats(2, 4))
    model.compile(
        "adam",
        keras.losses.SparseCategoricalCrossentropy(True, reduction="sum"),
        metrics=["accuracy"],
        weighted_metrics=[
            keras.metrics.SparseCategoricalCrossentropy(from_logits=True)
        ],
    )
    return model, floats(20, 4), ints(3, 20)


CASES["metrics_of_my_own_and_other_overrides"][1]["fit"] = {
    "validation_data": (floats(9, 4, seed=3), ints(3, 9)),
    "validation_batch_size": 4,
    "class_weight": {0: 1.0, 1: 2.0, 2: 0.5},
}


@case(rtol=1e-6, atol=1e-8)
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


@case(predict=False)
def batches_that_are_extension_types():
    class Graph(tf.experimental.BatchableExtensionType):
        nodes: tf.Tensor
        edges: tf.RaggedTensor

    class Extended(Own):
        def loss_of(self, x, y):
            degree = tf.cast(x.edges.row_lengths(), "float32")[:, None]
            return tf.reduce_mean(
                (self.net(tf.concat([x.nodes, degree], 1)) - y) ** 2
            )

    model = built(Extended(net=dense(6, 1)), floats(2, 5))
    lengths = ints(4, 20)
    g = Graph(
        tf.constant(floats(20, 4)),
        tf.RaggedTensor.from_row_lengths(ints(9, lengths.sum()), lengths),
    )
    return (
        model,
        tf.data.Dataset.from_tensor_slices((g, floats(20, 1))).batch(13),
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
