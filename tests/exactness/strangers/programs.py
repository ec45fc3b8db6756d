"""Odd programs: loops that train, inner functions, parsers, callbacks."""

import keras
import numpy as np
import tensorflow as tf

from tests.exactness.strangers.base import (
    Own,
    case,
    cross,
    floats,
    ints,
    step,
    with_layer,
)


@step(floats(20, 4), floats(20, 1), net=(8, 1))
class StepsUntilTheLossIsSmall(Own):
    """A while loop that trains until the batch is fitted, with a limit."""

    def create(self):
        self.net.build((None, 4))
        self.inner = keras.optimizers.Adam(0.05)
        self.inner.build(self.net.trainable_variables)

    def train_step(self, data):
        x, y = data
        weights = self.net.trainable_variables

        def body(i, _):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.net(x) - y) ** 2)
            self.inner.apply(tape.gradient(loss, weights), weights)
            return i + 1, loss

        i, loss = tf.while_loop(
            lambda i, loss: (i < 5) & (loss > 0.5),
            body,
            (0, tf.constant(9.0)),
        )
        return {"loss": loss, "steps": i}


@step(
    (floats(20, 6, 6, 1), floats(20, 3, 3, 1)),
    floats(20, 4, 4),
    net=lambda: keras.layers.Conv2D(3, 2, activation="relu"),
    batches=lambda data: data.batch(13),
    predict=False,
)
class DynamicFiltersFoldedIntoChannels(Own):
    """A Siamese tracker: each example has its own depthwise filter."""

    def call(self, inputs):
        search, template = inputs
        s, t = self.net(search), self.net(template)
        n = tf.shape(s)[0]
        folded = tf.reshape(tf.transpose(s, [1, 2, 0, 3]), [1, 5, 5, n * 3])
        filters = tf.reshape(tf.transpose(t, [1, 2, 0, 3]), [2, 2, n * 3, 1])
        r = tf.nn.depthwise_conv2d(folded, filters, [1, 1, 1, 1], "VALID")
        r = tf.transpose(tf.reshape(r, [4, 4, n, 3]), [2, 0, 1, 3])
        return tf.reduce_sum(r, -1)


@case
def styles_that_modulate_and_minibatch_deviation():
    class Modulated(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(3, 4))
            self.affine = keras.layers.Dense(3)
            self.affine.build((None, 3))

        def call(self, x):
            style = self.affine(tf.reduce_mean(x, [1, 2])) + 1
            w = self.w[None] * style[:, :, None]
            w = w * tf.math.rsqrt(tf.reduce_sum(w**2, 1, keepdims=True) + 1e-6)
            y = tf.einsum("bhwc,bco->bhwo", x, w)
            # StyleGAN's deviation over groups of examples.
            n = tf.shape(y)[0]
            group = tf.minimum(4, n)
            pad = (-n) % group
            g = tf.concat([y, y[:pad]], 0)
            g = tf.reshape(g, [group, -1, *y.shape[1:]])
            s = tf.sqrt(tf.math.reduce_variance(g, 0) + 1e-6)
            s = tf.tile(tf.reduce_mean(s, [1, 2, 3])[:, None], [group, 1])[:n]
            s = tf.broadcast_to(
                s[:, None, None], tf.concat([tf.shape(y)[:3], [1]], 0)
            )
            y = tf.concat([y, s], -1)
            y.set_shape([None, *x.shape[1:3], 5])
            return y

    x = keras.Input((3, 3, 3))
    h = keras.layers.GlobalMaxPooling2D()(Modulated()(x))
    model = keras.Model(x, keras.layers.Dense(1)(h))
    model.compile("adam", "hinge")
    return model, floats(20, 3, 3, 3), np.sign(floats(20, 1))


PNGS = [
    tf.io.encode_png(ints(256, 3 + i % 4, 5, 1, seed=i).astype("uint8"))
    for i in range(20)
]


@step(
    tf.stack(PNGS),
    ints(3, 20),
    net=lambda: keras.Sequential(
        [
            keras.layers.Conv2D(3, 2),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    ),
    batches=lambda data: data.batch(7),
)
class PngsDecodedInTheModel(Own):
    def call(self, x):
        def one(png):
            image = tf.io.decode_png(png, 1)
            image = tf.image.resize(tf.cast(image, "float32"), [4, 4])
            return tf.image.per_image_standardization(image)

        shape = tf.TensorSpec([4, 4, 1])
        return self.net(tf.map_fn(one, x, fn_output_signature=shape))

    def loss_of(self, x, y):
        return tf.reduce_mean(cross(y, self(x)))


@case
def experts_by_dynamic_partition():
    class Partition(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.experts = [keras.layers.Dense(4, "tanh") for _ in range(3)]
            self.gate = keras.layers.Dense(3)

        def build(self, shape):
            for layer in [*self.experts, self.gate]:
                layer.build(shape)

        def call(self, x):
            p = tf.nn.softmax(self.gate(x))
            owner = tf.argmax(p, 1, "int32")
            parts = tf.dynamic_partition(x, owner, 3)
            places = tf.dynamic_partition(tf.range(tf.shape(x)[0]), owner, 3)
            outs = [
                e(part) for e, part in zip(self.experts, parts, strict=True)
            ]
            joined = tf.dynamic_stitch(places, outs)
            joined.set_shape([None, 4])
            return joined * tf.reduce_max(p, 1, keepdims=True)

    return with_layer(Partition())


@step(floats(20, 4), net=(6, 3))
class BankWhoseRowsGrow(Own):
    """A variable of unknown length, to which each batch is appended."""

    def create(self):
        self.bank = tf.Variable(
            tf.zeros([1, 3]), trainable=False, shape=[None, 3]
        )

    def loss_of(self, x, y):
        z = self.net(x)
        old = self.bank.read_value()
        loss = tf.reduce_mean(
            tf.nn.softplus(tf.matmul(z, old, transpose_b=True))
        )
        self.bank.assign(tf.concat([old, tf.stop_gradient(z)], 0)[-30:])
        return {"loss": loss, "rows": tf.shape(self.bank.read_value())[0]}


@step(floats(20, 4), net=(6, 3))
class MemoryWrittenBySlicesAndScatters(Own):
    def create(self):
        self.memory = tf.Variable(
            tf.random.stateless_normal([9, 3], (1, 2)), trainable=False
        )
        self.hits = tf.Variable(tf.zeros([9]), trainable=False)

    def loss_of(self, x, y):
        z = self.net(x)
        near = tf.argmax(tf.matmul(z, self.memory, transpose_b=True), 1)
        self.hits.scatter_add(
            tf.IndexedSlices(tf.ones_like(near, "float32"), near)
        )
        found = self.memory.sparse_read(near)
        loss = tf.reduce_mean((z - found) ** 2)
        start = tf.cast(self.optimizer.iterations % 3, "int32") * 3
        part = self.memory[start : start + 3]
        fresh = tf.reduce_mean(z, 0, keepdims=True) + 0.5 * part
        self.memory.scatter_update(
            tf.IndexedSlices(tf.stop_gradient(fresh), start + tf.range(3))
        )
        self.memory[0].assign(tf.stop_gradient(z[-1]))
        self.hits.scatter_max(tf.IndexedSlices([1.5], [2]))
        return {"loss": loss, "hits": tf.reduce_max(self.hits)}


@step(floats(20, 4), floats(20, 2), net=(6, 2))
class GradientsByForwardModeAndJacobians(Own):
    def loss_of(self, x, y):
        v = tf.ones_like(x)
        with tf.autodiff.ForwardAccumulator(x, v) as acc:
            out = self.net(x)
        along = acc.jvp(out)
        with tf.GradientTape() as tape:
            tape.watch(x)
            z = tf.reduce_sum(self.net(x), 0)
        j = tape.jacobian(z, x, experimental_use_pfor=False)
        return (
            tf.reduce_mean((out - y) ** 2)
            + 0.1 * tf.reduce_mean(along**2)
            + 0.1 * tf.reduce_mean(tf.abs(j))
        )


@step(floats(20, 4), floats(20), net=(6, 4))
class RecomputedAndInnerFunctions(Own):
    def create(self):
        self.drop = keras.layers.Dropout(0.3, seed=4)

    def loss_of(self, x, y):
        f = tf.recompute_grad(lambda v: tf.nn.gelu(self.net(v)))

        rows = tf.TensorSpec([None, 4])

        @tf.function(input_signature=[rows, rows], autograph=False)
        def g(a, b):
            return tf.reduce_sum(a * b, 1) - tf.reduce_mean(a)

        @tf.function(jit_compile=True)
        def h(a):
            a = a - tf.reduce_mean(a, 0)
            return tf.reduce_sum(tf.linalg.matmul(a, a, transpose_a=True) ** 2)

        z = self.drop(f(x), training=True)
        return tf.reduce_mean((g(z, x) - y) ** 2) + 0.1 * h(z)


@step(floats(20, 4), ints(3, 20), net=(6, 3))
class LogsThatAreNoScalars(Own):
    def create(self):
        self.confusion = self.add_weight(
            shape=(3, 3), trainable=False, initializer="zeros"
        )

    def loss_of(self, x, y):
        logits = self.net(x)
        losses = cross(y, logits)
        self.confusion.assign_add(
            tf.math.confusion_matrix(
                y, tf.argmax(logits, 1), 3, dtype="float32"
            )
        )
        return {
            "loss": tf.reduce_mean(losses),
            "per_class": tf.math.unsorted_segment_mean(losses, y, 3),
            "confusion": tf.convert_to_tensor(self.confusion),
            "in_top": tf.reduce_mean(
                tf.cast(tf.math.in_top_k(y, logits, 2), "float32")
            ),
            "count": tf.shape(x)[0],
            "constant": 3.0,
        }


@step(floats(20, 4), evaluate=False, net=(6, 2))
class PredictionsOfOtherLengths(Own):
    def loss_of(self, x, y):
        return tf.reduce_mean(self.net(x) ** 2)

    def predict_step(self, data):
        x = data
        z = self.net(x)
        return {
            "twice": tf.concat([z, -z], 0),
            "mean": tf.reduce_mean(z, 0, keepdims=True),
            "kept": tf.boolean_mask(x, x[:, 0] > 0),
            "sorted": tf.sort(z[:, 0]),
            "time": tf.reshape(z, [-1]),
            "words": tf.strings.as_string(tf.cast(z[:, 0] * 10, "int32")),
            "rank": tf.argsort(tf.argsort(z[:, 0])),
        }


class Unfreeze(keras.callbacks.Callback):
    """Changes the model in mid-training, as fine-tuning does."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.build(self.model.trainable_variables)
        for variable in self.model.optimizer.momentums:
            variable.assign(-variable)

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.05 / (1 + batch)
        weight = self.model.layers[2].bias
        weight.assign(weight * 0.5)


@case(callbacks=(Unfreeze,))
def callbacks_that_change_the_model():
    x = keras.Input((4,))
    h = keras.layers.Dense(5, "relu")(x)
    model = keras.Model(x, keras.layers.Dense(1)(h))
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model, floats(20, 4), floats(20, 1)


@case
def bucketed_lengths_trace_again():
    x = keras.Input((None,), dtype="int32")
    h = keras.layers.Embedding(9, 4, mask_zero=True)(x)
    h = keras.layers.Bidirectional(keras.layers.LSTM(3))(h)
    model = keras.Model(x, keras.layers.Dense(1)(h))
    model.compile("adam", "mse")

    def batches():
        for i, (rows, length) in enumerate(
            [(7, 3), (5, 5), (7, 3), (1, 2), (2, 5)]
        ):
            yield (
                ints(9, rows, length, seed=i).astype("int32"),
                floats(rows, 1, seed=i),
            )

    data = tf.data.Dataset.from_generator(
        batches,
        output_signature=(
            tf.TensorSpec([None, None], "int32"),
            tf.TensorSpec([None, 1]),
        ),
    )
    return model, data.apply(tf.data.experimental.assert_cardinality(5)), None


TABLE = tf.constant(floats(5, 3, seed=2))


@step(
    floats(20, 3),
    floats(20, 3, seed=1),
    net=(6, 4),
    batches=lambda data: data.batch(13).map(lambda x, y: ((x, TABLE), y)),
    predict=False,
)
class ConstantsOfAnotherLengthInEachBatch(Own):
    """Each batch brings a table that belongs to no example."""

    def call(self, inputs):
        x, table = inputs
        scores = tf.matmul(self.net(x), self.net(table), transpose_b=True)
        return tf.matmul(tf.nn.softmax(scores), table)


@step(floats(20, 4), net=(8, 9))
class LinearAlgebraOfEachExample(Own):
    def loss_of(self, x, y):
        m = tf.reshape(self.net(x), [-1, 3, 3])
        s = tf.matmul(m, m, transpose_b=True) + tf.eye(3)
        e = tf.linalg.expm(0.1 * m)
        chol = tf.linalg.cholesky(s)
        solved = tf.linalg.triangular_solve(chol, e)
        inv = tf.linalg.inv(s)
        det = tf.linalg.slogdet(s).log_abs_determinant
        q, r = tf.linalg.qr(s)
        total = tf.linalg.logdet(tf.reduce_mean(s, 0))
        return (
            tf.reduce_mean(solved**2)
            + tf.reduce_mean(tf.linalg.trace(inv))
            + tf.reduce_mean(det)
            + 0.1 * tf.reduce_mean(tf.abs(tf.linalg.diag_part(r)))
            + total
            + tf.reduce_mean(
                tf.linalg.norm(tf.linalg.band_part(m, 0, -1), axis=[1, 2])
            )
        )


@case
def volumes_padded_patched_and_pooled():
    class Patches(keras.layers.Layer):
        def call(self, x):
            p = tf.image.extract_patches(
                x, [1, 2, 2, 1], [1, 2, 2, 1], [1, 1, 1, 1], "SAME"
            )
            b = tf.space_to_batch(x, [2, 2], [[0, 0], [0, 0]])
            b = tf.nn.max_pool2d(b, 2, 1, "SAME")
            b = tf.batch_to_space(b, [2, 2], [[0, 0], [0, 0]])
            d = tf.nn.space_to_depth(x + b, 2)
            m, where = tf.nn.max_pool_with_argmax(
                x, 2, 2, "SAME", include_batch_in_index=True
            )
            flat = tf.reshape(x, [-1])
            same = tf.reshape(tf.gather(flat, where), tf.shape(m))
            lrn = tf.nn.local_response_normalization(x)
            return tf.concat([p, d, m, same, tf.image.resize(lrn, [2, 2])], -1)

    x = keras.Input((4, 4, 2))
    h = keras.layers.ZeroPadding2D(0)(
        keras.layers.Conv2D(2, 3, padding="same")(x)
    )
    h = keras.layers.GlobalAveragePooling2D()(Patches()(h))
    model = keras.Model(x, keras.layers.Dense(1)(h))
    model.compile("adam", "mse")
    return model, floats(20, 4, 4, 2), floats(20, 1)


@step(floats(20, 4), floats(20), net=(6, 3))
class GradientOfAPyFunction(Own):
    def loss_of(self, x, y):
        def smooth(z):
            return tf.reduce_sum(tf.sort(z, 1) ** 2, 1) + tf.math.reduce_std(z)

        s = tf.py_function(smooth, [self.net(x)], "float32")
        s.set_shape([None])
        return tf.reduce_mean((s - y) ** 2)
