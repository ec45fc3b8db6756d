"""What couples the rows of a batch: statistics, matrices, ranks, graphs."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from tests.exactness.strangers.base import (
    Own,
    case,
    cross,
    dense,
    floats,
    ints,
    step,
    with_layer,
)


@step(floats(20, 4), floats(20, 1), net=lambda: dense(8, 2, bias=False))
class GaussianProcessHead(Own):
    def create(self):
        self.log_scale = self.add_weight(shape=(), initializer="zeros")
        self.log_noise = self.add_weight(shape=(), initializer="zeros")

    def loss_of(self, x, y):
        z = self.net(x)
        d = tf.reduce_sum((z[:, None] - z[None]) ** 2, -1)
        n = tf.shape(z)[0]
        k = tf.exp(-d * tf.exp(self.log_scale)) + tf.exp(
            self.log_noise
        ) * tf.eye(n)
        chol = tf.linalg.cholesky(k)
        alpha = tf.linalg.cholesky_solve(chol, y)
        logdet = tf.reduce_sum(tf.math.log(tf.linalg.diag_part(chol)))
        return 0.5 * tf.reduce_sum(y * alpha) + logdet


class IterNorm(keras.layers.Layer):
    """Decorrelated batch normalization by iterations."""

    def build(self, shape):
        d = shape[-1]
        self.mean = self.add_weight(
            shape=(d,), trainable=False, initializer="zeros"
        )
        self.whiten = self.add_weight(
            shape=(d, d), trainable=False, initializer="identity"
        )
        self.gain = self.add_weight(shape=(d,), initializer="ones")

    def call(self, x, training=False):
        if not training:
            return ops.matmul(x - self.mean, self.whiten) * self.gain
        mean, eye = ops.mean(x, axis=0), ops.eye(x.shape[-1])
        c = x - mean
        cov = ops.matmul(ops.transpose(c), c)
        cov = cov / ops.cast(ops.shape(x)[0], x.dtype) + 0.1 * eye
        trace, p = ops.trace(cov), eye
        for _ in range(4):
            cube = ops.matmul(ops.matmul(p, p), p)
            p = 1.5 * p - 0.5 * ops.matmul(cube, cov / trace)
        w = p / ops.sqrt(trace)
        self.mean.assign(0.9 * self.mean + 0.1 * mean)
        self.whiten.assign(0.9 * self.whiten + 0.1 * w)
        return ops.matmul(c, w) * self.gain


@case
def decorrelated_batch_norm_by_iterations():
    return with_layer(IterNorm())


class Ghost(keras.layers.Layer):
    """Batch normalization of groups of four rows, the last one padded."""

    def call(self, x):
        n = tf.shape(x)[0]
        parts = -(-n // 4)
        padded = tf.pad(x, [[0, parts * 4 - n], [0, 0]])
        is_there = tf.cast(tf.range(parts * 4) < n, "float32")
        mask = tf.reshape(is_there, [parts, 4, 1])
        grouped = tf.reshape(padded, [parts, 4, x.shape[-1]])
        count = tf.reduce_sum(mask, 1, keepdims=True)
        mean = tf.reduce_sum(grouped * mask, 1, keepdims=True) / count
        apart = grouped - mean
        var = tf.reduce_sum(apart**2 * mask, 1, keepdims=True) / count
        out = apart / tf.sqrt(var + 1e-1)
        out = tf.reshape(out, [parts * 4, x.shape[-1]])[:n]
        out.set_shape([None, x.shape[-1]])
        return out


@case
def ghost_batch_norm_with_padding():
    return with_layer(Ghost())


class AttentionBetweenRows(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, 3, use_bias=False)
        self.norm = keras.layers.LayerNormalization()

    def call(self, x):
        rows = x[None]
        return self.norm(rows + self.attention(rows, rows))[0]


@case
def attention_between_examples():
    return with_layer(AttentionBetweenRows(), loss="huber", metrics=["mae"])


@case
def survival_by_cox_partial_likelihood():
    def cox(y_true, y_pred):
        time, event = y_true[:, 0], y_true[:, 1]
        order = ops.argsort(-time)
        risk = ops.take(y_pred[:, 0], order)
        log_risk = tf.math.cumulative_logsumexp(risk)
        event = ops.take(event, order)
        return -ops.sum((risk - log_risk) * event) / ops.maximum(
            ops.sum(event), 1.0
        )

    def concordance(y_true, y_pred):
        t, e, r = y_true[:, 0], y_true[:, 1], y_pred[:, 0]
        comparable = (t[:, None] < t[None]) & (e[:, None] > 0)
        right = comparable & (r[:, None] > r[None])
        return ops.sum(ops.cast(right, "float32")) / ops.maximum(
            ops.sum(ops.cast(comparable, "float32")), 1.0
        )

    model = dense(8, 1, bias=False)
    model.build((None, 6))
    model.compile("adam", cox, metrics=[concordance])
    y = np.stack([np.abs(floats(20)), ints(2, 20)], 1).astype("float32")
    return model, floats(20, 6), y


@step(
    floats(20, 6),
    ints(2, 20, seed=1).astype(bool),
    net=lambda: dense(8, 1, bias=False),
)
class AucSurrogateOfPositivesAndNegatives(Own):
    def loss_of(self, x, y):
        s = self.net(x)[:, 0]
        pos, neg = tf.boolean_mask(s, y), tf.boolean_mask(s, ~y)
        margins = tf.nn.relu(0.5 - (pos[:, None] - neg[None])) ** 2
        pairs = tf.cast(tf.size(margins), "float32")
        # Partial: only the highest negatives.
        k = tf.minimum(3, tf.size(neg))
        top = tf.sort(neg)[-k:]
        partial = tf.reduce_sum(tf.nn.relu(0.5 - (pos[:, None] - top[None])))
        return (
            tf.math.divide_no_nan(tf.reduce_sum(margins), pairs)
            + 0.01 * partial
        )


@step(ints(30, 20, 3), floats(20, 2), net=(6, 2))
class DuplicatesRemovedByUnique(Own):
    def create(self):
        self.embed = self.add_weight(shape=(30, 4))

    def call(self, ids):
        unique, back = tf.unique(tf.reshape(ids, [-1]))
        rows = self.net(tf.nn.embedding_lookup(self.embed.value, unique))
        rows = tf.reshape(tf.gather(rows, back), [-1, 3, 2])
        return tf.reduce_mean(rows, 1)

    def loss_of(self, x, y):
        unique, _, counts = tf.unique_with_counts(tf.reshape(x, [-1]))
        return {
            "loss": super().loss_of(x, y),
            "distinct": tf.size(unique),
            "most": tf.reduce_max(counts),
        }


class Fourier(keras.layers.Layer):
    def build(self, shape):
        self.re = self.add_weight(shape=(3, shape[-1], shape[-1]))
        self.im = self.add_weight(shape=(3, shape[-1], shape[-1]))
        self.w = keras.layers.Dense(shape[-1])
        self.w.build(shape)

    def call(self, x):
        f = tf.signal.rfft(tf.transpose(x, [0, 2, 1]))
        kernel = tf.complex(*map(tf.convert_to_tensor, (self.re, self.im)))
        low = tf.einsum("bdk,kde->bek", f[..., :3], kernel)
        low = tf.pad(low, [[0, 0], [0, 0], [0, 2]])
        y = tf.transpose(tf.signal.irfft(low, [8]), [0, 2, 1])
        return tf.nn.gelu(y + self.w(x))


def spectral(y_true, y_pred):
    a = tf.abs(tf.signal.stft(y_true[..., 0], 4, 2))
    b = tf.abs(tf.signal.stft(y_pred[..., 0], 4, 2))
    errors = tf.reduce_mean((y_true - y_pred) ** 2, [1, 2])
    return tf.reduce_mean((a - b) ** 2, [1, 2]) + errors


@case
def fourier_layers_and_a_spectral_loss():
    model, x, _ = with_layer(Fourier(), (8, 1), loss=spectral)
    return model, x, floats(20, 8, 1, seed=1)


@case
def kernel_two_sample_and_hsic():
    def hsic(y_true, y_pred):
        def center(k):
            k = k - ops.mean(k, axis=0, keepdims=True)
            return k - ops.mean(k, axis=1, keepdims=True)

        def kernel(z):
            d = ops.sum((z[:, None] - z[None]) ** 2, -1)
            # The bandwidth is the median of the batch.
            return ops.exp(-d / (2 * ops.stop_gradient(ops.median(d)) + 1e-3))

        a, b = center(kernel(y_true)), center(kernel(y_pred))
        return -ops.sum(a * b) / ops.sqrt(
            ops.sum(a * a) * ops.sum(b * b) + 1e-6
        )

    model = dense(8, 3, bias=False)
    model.build((None, 6))
    model.compile("adam", hsic)
    return model, floats(20, 6), floats(20, 2)


@step(floats(20, 6), net=(8, 4), optimizer="sgd")
class LowRankByQrAndSubspaceIteration(Own):
    def create(self):
        self.basis = self.add_weight(
            shape=(4, 2),
            trainable=False,
            initializer=keras.initializers.Orthogonal(seed=3),
        )

    def loss_of(self, x, y):
        z = self.net(x)
        z = z - tf.reduce_mean(z, 0)
        cov = tf.matmul(z, z, transpose_a=True) / tf.cast(
            tf.shape(z)[0], "float32"
        )
        q, r = tf.linalg.qr(
            tf.matmul(cov, tf.convert_to_tensor(self.basis)) + 0.1 * self.basis
        )
        q = q * tf.sign(tf.linalg.diag_part(r))
        self.basis.assign(tf.stop_gradient(q))
        inside = tf.matmul(tf.matmul(z, q), q, transpose_b=True)
        return tf.reduce_mean((z - inside) ** 2) - 0.1 * tf.linalg.logdet(
            cov + tf.eye(4)
        )


@step(floats(20, 6), floats(20, 1), net=(8, 1))
class RunningHistogramAndPercentileLoss(Own):
    def create(self):
        self.histogram = self.state((8,), 0, "int32")
        self.low = self.state((), 9.0)
        self.high = self.state((), -9.0)

    def loss_of(self, x, y):
        e = tf.abs(self.net(x) - y)[:, 0]
        self.low.assign(tf.minimum(self.low, tf.reduce_min(e)))
        self.high.assign(tf.maximum(self.high, tf.reduce_max(e)))
        self.histogram.assign_add(tf.histogram_fixed_width(e, [0.0, 3.0], 8))
        cdf = tf.cumsum(tf.cast(self.histogram, "float32"))
        rank = (
            tf.gather(cdf, tf.clip_by_value(tf.cast(e / 3 * 8, "int32"), 0, 7))
            / cdf[-1]
        )
        return tf.reduce_mean(
            e * tf.stop_gradient(tf.where(rank > 0.9, 0.1, 1.0))
        )


@step(
    {
        "word": np.array(list("abcdefg"))[ints(7, 20)],
        "v": floats(20, 4),
    },
    floats(20),
    net=(6, 1),
    batches=lambda data: data.batch(13),
)
class TableOfCountsOfStrings(Own):
    def create(self):
        self.table = tf.lookup.experimental.MutableHashTable(
            "string", "float32", 0.0
        )

    def call(self, x):
        return self.net(x["v"])

    def loss_of(self, x, y):
        unique, back, counts = tf.unique_with_counts(x["word"])
        before = self.table.lookup(unique)
        self.table.insert(unique, before + tf.cast(counts, "float32"))
        rarity = 1 / (1 + tf.gather(before, back))
        return tf.reduce_mean(rarity * (self(x)[:, 0] - y) ** 2)

    def test_step(self, data):
        x, y = data
        return {"known": tf.reduce_sum(self.table.lookup(x["word"]))}


@step(floats(20, 6), floats(20, 1), net=(8, 1))
class PrintsChecksAndAGeneratorOfTensorflow(Own):
    def create(self):
        self.generator = tf.random.Generator.from_seed(7)

    def loss_of(self, x, y):
        tf.debugging.assert_all_finite(x, "x")
        tf.debugging.assert_equal(tf.shape(x)[0], tf.shape(y)[0])
        noise = self.generator.normal(tf.shape(x), 0.0, 0.1)
        out = self.net(x + noise)
        tf.print(
            "largest", tf.reduce_max(out), output_stream="file:///dev/null"
        )
        with tf.control_dependencies(
            [tf.debugging.assert_less(tf.reduce_mean(y), 9.0)]
        ):
            out = tf.identity(out)
        return tf.reduce_mean((out - y) ** 2)


class Headed(keras.Model):
    def __init__(self):
        super().__init__()
        self.trunk, self.a, self.b, self.c = (
            dense(8, 6),
            dense(4, 2),
            dense(4, 3),
            dense(4, 1),
        )

    def call(self, x):
        h = self.trunk(x["one"]) + self.trunk(x["two"][..., 0])
        return {"a": self.a(h), "b": self.b(h), "aux": self.c(h)}


@case(
    fit={
        "validation_split": 0.2,
        "sample_weight": {
            "a": np.random.default_rng(1).random(20).astype("float32"),
            "b": np.random.default_rng(2).random(20).astype("float32"),
            "aux": np.ones(20, "float32"),
        },
    }
)
def nested_heads_with_a_loss_of_none():
    model = Headed()
    x = {"one": floats(20, 4), "two": floats(20, 4, 1)}
    y = {"a": floats(20, 2), "b": ints(3, 20), "aux": floats(20, 1)}
    model({k: v[:2] for k, v in x.items()})
    model.compile(
        "adam",
        {
            "a": "mse",
            "b": keras.losses.SparseCategoricalCrossentropy(True),
            "aux": None,
        },
        loss_weights={"a": 0.3, "b": 1.0, "aux": 0.0},
        metrics={"b": ["accuracy"], "aux": [keras.metrics.MeanAbsoluteError()]},
        weighted_metrics={"a": ["mae"]},
    )
    return model, x, y


@case(
    batch=4,
    fit={
        "sample_weight": (
            np.random.default_rng(4).random((21, 5)) > 0.4
        ).astype("float32")
    },
)
def temporal_weights_and_a_last_batch_of_one():
    x = keras.Input((5, 3))
    h = keras.layers.Conv1D(4, 3, padding="causal", dilation_rate=2)(x)
    h = keras.layers.BatchNormalization()(h)
    h = keras.layers.GRU(4, return_sequences=True)(h)
    model = keras.Model(x, keras.layers.Dense(2)(h))
    model.compile("adam", "mse", weighted_metrics=["mae"], metrics=["mape"])
    return model, floats(21, 5, 3), floats(21, 5, 2, seed=1)


class SortedByTheFirst(keras.layers.Layer):
    def call(self, x):
        order = tf.argsort(tf.cast(x[:, 0], "float32"))
        s = tf.gather(x, order)
        smooth = (s + tf.roll(s, 1, 0)) / 2
        return tf.gather(smooth, tf.argsort(order))


@case(policy="mixed_bfloat16", tolerance=5e-2)
def bfloat16_with_gather_by_argsort():
    return with_layer(SortedByTheFirst(), optimizer="sgd")


@case
def odd_wiring_with_a_shared_layer_and_loops():
    x, z = keras.Input((4,)), keras.Input((4,))
    shared = keras.layers.Dense(4, "relu")
    a, b = shared(x), shared(z)
    a = shared(a)
    dot = keras.layers.Dot(1)([a, b])
    stacked = ops.stack([a, b, a * b], axis=1)
    picked = ops.vectorized_map(
        lambda m: ops.matmul(m, ops.transpose(m)), stacked
    )
    switched = ops.switch(
        1, [lambda v: v, lambda v: ops.tanh(v)], ops.sum(picked, axis=1)
    )
    h = ops.concatenate(
        [switched, dot, ops.cumsum(a, axis=1), ops.sort(b, axis=-1)], axis=-1
    )
    h = h - ops.mean(h, axis=0, keepdims=True)
    out = keras.layers.Dense(1, name="out")(h)
    side = keras.layers.Dense(2, "softmax", name="side")(
        keras.layers.Minimum()([a, b])
    )
    model = keras.Model([x, z], {"out": out, "side": side})
    model.compile(
        "rmsprop",
        {"out": "mse", "side": "sparse_categorical_crossentropy"},
        metrics={"side": "accuracy"},
    )
    return (
        model,
        [floats(20, 4), floats(20, 4, seed=1)],
        {"out": floats(20, 1), "side": ints(2, 20)},
    )


@step(floats(20, 6), np.where(np.arange(20) % 3, ints(3, 20), -1), net=(8, 2))
class NeighboursGraphAndLabelPropagation(Own):
    def loss_of(self, x, y):
        z = self.net(x)
        d = tf.reduce_sum((z[:, None] - z[None]) ** 2, -1)
        n = tf.shape(z)[0]
        k = tf.minimum(4, n)
        _, near = tf.math.top_k(-d, k)
        rows = tf.repeat(tf.range(n), k)
        index = tf.stack([rows, tf.reshape(near, [-1])], 1)
        mask = tf.scatter_nd(index, tf.ones([n * k]), [n, n])
        w = tf.exp(-d) * tf.maximum(mask, tf.transpose(mask))
        s = w / tf.reduce_sum(w, 1, keepdims=True)
        known = tf.cast(y >= 0, "float32")
        labels = tf.one_hot(tf.maximum(y, 0), 3) * known[:, None]
        f = tf.linalg.solve(tf.eye(n) - 0.5 * s, labels)
        p = f / (tf.reduce_sum(f, 1, keepdims=True) + 1e-3)
        losses = cross(tf.maximum(y, 0), tf.math.log(p + 1e-3))
        return tf.reduce_mean(losses * known)
