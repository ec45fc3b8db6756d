"""What couples the rows of a batch: statistics, matrices, ranks, graphs."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from tests.exactness.strangers.base import (
    Own,
    built,
    case,
    cross,
    dense,
    floats,
    ints,
)


def functional(
    layer, features=6, loss="mse", head=1, metrics=None, optimizer="adam"
):
    """A model with a layer of my own between two Dense layers."""
    x = keras.Input((features,))
    h = keras.layers.Dense(5, "tanh")(x)
    model = keras.Model(x, keras.layers.Dense(head)(layer(h)))
    model.compile(optimizer, loss, metrics=metrics)
    return model, floats(20, features), floats(20, head, seed=1)


@case
def gaussian_process_head():
    class Gp(Own):
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

    return (
        built(Gp(net=dense(8, 2, bias=False)), floats(2, 4)),
        floats(20, 4),
        floats(20, 1),
    )


@case(tolerance=1e-3)
def deep_canonical_correlation():
    class Dcca(Own):
        def loss_of(self, x, y):
            a, b = self.net(x), self.other(y)
            n = tf.cast(tf.shape(a)[0], "float32")
            a, b = a - tf.reduce_mean(a, 0), b - tf.reduce_mean(b, 0)
            eye = 0.1 * tf.eye(3)

            def root(m):
                values, vectors = tf.linalg.eigh(m)
                return tf.matmul(
                    vectors * values**-0.5, vectors, transpose_b=True
                )

            saa = tf.matmul(a, a, transpose_a=True) / n + eye
            sbb = tf.matmul(b, b, transpose_a=True) / n + eye
            sab = tf.matmul(a, b, transpose_a=True) / n
            t = tf.matmul(tf.matmul(root(saa), sab), root(sbb))
            return -tf.reduce_sum(tf.linalg.svd(t, compute_uv=False)[:2])

    model = Dcca(net=dense(8, 3), other=dense(8, 3))
    model.other(floats(2, 5))
    return (
        built(model, floats(2, 6), optimizer="sgd"),
        floats(20, 6),
        floats(20, 5, seed=2),
    )


@case
def decorrelated_batch_norm_by_iterations():
    class IterNorm(keras.layers.Layer):
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
            if training:
                mean = ops.mean(x, axis=0)
                c = x - mean
                cov = ops.matmul(ops.transpose(c), c) / ops.cast(
                    ops.shape(x)[0], x.dtype
                )
                cov = cov + 0.1 * ops.eye(x.shape[-1])
                trace = ops.trace(cov)
                p = ops.eye(x.shape[-1])
                for _ in range(4):
                    p = 1.5 * p - 0.5 * ops.matmul(
                        ops.matmul(ops.matmul(p, p), p), cov / trace
                    )
                w = p / ops.sqrt(trace)
                self.mean.assign(0.9 * self.mean + 0.1 * mean)
                self.whiten.assign(0.9 * self.whiten + 0.1 * w)
            else:
                c, w = x - self.mean, self.whiten
            return ops.matmul(c, w) * self.gain

    return functional(IterNorm())


@case
def batch_renorm_with_a_ramp():
    class Renorm(keras.layers.Layer):
        def build(self, shape):
            d = shape[-1]
            w = {"shape": (d,), "trainable": False}
            self.mean = self.add_weight(initializer="zeros", **w)
            self.std = self.add_weight(initializer="ones", **w)
            self.steps = self.add_weight(
                shape=(), initializer="zeros", trainable=False
            )
            self.gamma = self.add_weight(shape=(d,), initializer="ones")

        def call(self, x, training=False):
            if not training:
                return (x - self.mean) / self.std * self.gamma
            mean, var = ops.moments(x, axes=0)
            std = ops.sqrt(var + 1e-3)
            rmax = ops.minimum(1 + self.steps, 3.0)
            r = ops.stop_gradient(ops.clip(std / self.std, 1 / rmax, rmax))
            dmax = ops.minimum(self.steps, 5.0)
            d = ops.stop_gradient(
                ops.clip((mean - self.mean) / self.std, -dmax, dmax)
            )
            out = ((x - mean) / std * r + d) * self.gamma
            self.mean.assign_add(0.1 * (mean - self.mean))
            self.std.assign_add(0.1 * (std - self.std))
            self.steps.assign_add(1.0)
            return out

    return functional(Renorm())


@case
def ghost_batch_norm_with_padding():
    class Ghost(keras.layers.Layer):
        def call(self, x):
            n = tf.shape(x)[0]
            parts = -(-n // 4)
            padded = tf.pad(x, [[0, parts * 4 - n], [0, 0]])
            mask = tf.reshape(
                tf.cast(tf.range(parts * 4) < n, "float32"), [parts, 4, 1]
            )
            grouped = tf.reshape(padded, [parts, 4, x.shape[-1]])
            count = tf.reduce_sum(mask, 1, keepdims=True)
            mean = tf.reduce_sum(grouped * mask, 1, keepdims=True) / count
            var = (
                tf.reduce_sum((grouped - mean) ** 2 * mask, 1, keepdims=True)
                / count
            )
            out = tf.reshape(
                (grouped - mean) / tf.sqrt(var + 1e-1), [parts * 4, x.shape[-1]]
            )
            out = out[:n]
            out.set_shape([None, x.shape[-1]])
            return out

    return functional(Ghost())


@case
def weight_norm_with_data_dependent_start():
    class WeightNorm(keras.layers.Layer):
        def build(self, shape):
            self.v = self.add_weight(shape=(shape[-1], 4))
            self.g = self.add_weight(shape=(4,), initializer="ones")
            self.b = self.add_weight(shape=(4,), initializer="zeros")
            self.ready = self.add_weight(
                shape=(), dtype="int32", initializer="zeros", trainable=False
            )

        def call(self, x, training=False):
            v = ops.convert_to_tensor(self.v)
            t = ops.matmul(x, v / ops.norm(v, axis=0))
            if training:

                def start():
                    mean, var = ops.moments(t, axes=0)
                    return 1 / ops.sqrt(var + 1e-2), -mean / ops.sqrt(
                        var + 1e-2
                    )

                def keep():
                    return ops.convert_to_tensor(self.g), ops.convert_to_tensor(
                        self.b
                    )

                g, b = ops.cond(self.ready < 1, start, keep)
                self.g.assign(g)
                self.b.assign(b)
                self.ready.assign(1)
            return t * self.g + self.b

    return functional(WeightNorm(), optimizer="sgd")


@case
def attention_between_examples():
    class Rows(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.attention = keras.layers.MultiHeadAttention(2, 3)
            self.norm = keras.layers.LayerNormalization()

        def call(self, x):
            rows = x[None]
            return self.norm(rows + self.attention(rows, rows))[0]

    return functional(Rows(), loss="huber", metrics=["mae"])


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


@case
def auc_surrogate_of_positives_and_negatives():
    class Auc(Own):
        def loss_of(self, x, y):
            s = self.net(x)[:, 0]
            pos, neg = tf.boolean_mask(s, y), tf.boolean_mask(s, ~y)
            margins = tf.nn.relu(0.5 - (pos[:, None] - neg[None])) ** 2
            pairs = tf.cast(tf.size(margins), "float32")
            # Partial: only the highest negatives.
            k = tf.minimum(3, tf.size(neg))
            top = tf.sort(neg)[-k:]
            partial = tf.reduce_sum(
                tf.nn.relu(0.5 - (pos[:, None] - top[None]))
            )
            return (
                tf.math.divide_no_nan(tf.reduce_sum(margins), pairs)
                + 0.01 * partial
            )

    return (
        built(Auc(net=dense(8, 1, bias=False)), floats(2, 6)),
        floats(20, 6),
        ints(2, 20, seed=1).astype(bool),
    )


@case
def neural_sort_and_optimal_transport():
    class Sorter(Own):
        def loss_of(self, x, y):
            s = self.net(x)[:, 0]
            n = tf.shape(s)[0]
            nf = tf.cast(n, "float32")
            a = tf.reduce_sum(tf.abs(s[:, None] - s[None]), 1)
            scale = nf + 1 - 2 * tf.range(1.0, nf + 1)
            p = tf.nn.softmax(scale[:, None] * s[None] - a[None], -1)
            ordered = tf.linalg.matvec(p, y)
            cost = (tf.sort(y)[::-1][:, None] - ordered[None]) ** 2
            u = tf.zeros([n])
            for _ in range(5):
                v = -tf.reduce_logsumexp(-cost / 0.5 + u[:, None], 0)
                u = -tf.reduce_logsumexp(-cost / 0.5 + v[None], 1)
            plan = tf.exp(-cost / 0.5 + u[:, None] + v[None])
            return tf.reduce_sum(plan * cost) / nf

    return (
        built(Sorter(net=dense(8, 1, bias=False)), floats(2, 4)),
        floats(20, 4),
        floats(20),
    )


@case
def duplicates_removed_by_unique():
    class Dedupe(Own):
        def create(self):
            self.embed = self.add_weight(shape=(30, 4))

        def call(self, ids):
            flat = tf.reshape(ids, [-1])
            unique, back = tf.unique(flat)
            rows = self.net(tf.nn.embedding_lookup(self.embed.value, unique))
            return tf.reduce_mean(
                tf.reshape(tf.gather(rows, back), [-1, 3, 2]), 1
            )

        def loss_of(self, x, y):
            u, _, counts = tf.unique_with_counts(tf.reshape(x, [-1]))
            return {
                "loss": tf.reduce_mean((self(x) - y) ** 2),
                "distinct": tf.size(u),
                "most": tf.reduce_max(counts),
            }

    model = Dedupe(net=dense(6, 2))
    return built(model, ints(30, 2, 3)), ints(30, 20, 3), floats(20, 2)


@case(predict=False)
def dense_graph_with_spectral_filters():
    class Cheb(Own):
        def call(self, inputs):
            x, a = inputs
            degree = tf.reduce_sum(a, -1)
            scale = tf.math.rsqrt(tf.maximum(degree, 1e-6))
            laplacian = (
                tf.eye(5)[None] - a * scale[:, :, None] * scale[:, None, :]
            )
            values, vectors = tf.linalg.eigh(laplacian)
            spectrum = tf.exp(-values * 0.5)
            filtered = tf.einsum(
                "bij,bj,bkj,bkd->bid", vectors, spectrum, vectors, x
            )
            t = [filtered, tf.matmul(laplacian, filtered)]
            t.append(2 * tf.matmul(laplacian, t[-1]) - t[-2])
            return self.net(
                tf.reduce_max(tf.nn.relu(self.mix(tf.concat(t, -1))), 1)
            )

        def loss_of(self, x, y):
            return tf.reduce_mean((self(x) - y) ** 2)

    a = np.random.default_rng(3).random((20, 5, 5)).astype("float32")
    a = a + a.transpose(0, 2, 1)
    model = Cheb(net=dense(4, 1), mix=keras.layers.Dense(6))
    built(model, (floats(2, 5, 3), a[:2]))
    data = tf.data.Dataset.from_tensor_slices(
        ((floats(20, 5, 3), a), floats(20, 1))
    ).batch(13)
    return model, data, None


@case
def fourier_layers_and_a_spectral_loss():
    class Fno(keras.layers.Layer):
        def build(self, shape):
            self.re = self.add_weight(shape=(3, shape[-1], shape[-1]))
            self.im = self.add_weight(shape=(3, shape[-1], shape[-1]))
            self.w = keras.layers.Dense(shape[-1])
            self.w.build(shape)

        def call(self, x):
            f = tf.signal.rfft(tf.transpose(x, [0, 2, 1]))
            kernel = tf.complex(
                tf.convert_to_tensor(self.re), tf.convert_to_tensor(self.im)
            )
            low = tf.einsum("bdk,kde->bek", f[..., :3], kernel)
            low = tf.pad(low, [[0, 0], [0, 0], [0, 2]])
            y = tf.transpose(tf.signal.irfft(low, [8]), [0, 2, 1])
            return tf.nn.gelu(y + self.w(x))

    def spectral(y_true, y_pred):
        a = tf.abs(tf.signal.stft(y_true[..., 0], 4, 2))
        b = tf.abs(tf.signal.stft(y_pred[..., 0], 4, 2))
        return tf.reduce_mean((a - b) ** 2, [1, 2]) + tf.reduce_mean(
            (y_true - y_pred) ** 2, [1, 2]
        )

    x = keras.Input((8, 1))
    h = Fno()(Fno()(keras.layers.Dense(3)(x)))
    model = keras.Model(x, keras.layers.Dense(1)(h))
    model.compile("adam", spectral)
    return model, floats(20, 8, 1), floats(20, 8, 1, seed=1)


@case
def complex_states_of_a_quantum_circuit():
    class Circuit(keras.layers.Layer):
        def build(self, shape):
            self.angles = self.add_weight(
                shape=(3, 4), initializer="random_normal"
            )

        def call(self, x):
            state = tf.cast(tf.math.l2_normalize(x, -1), "complex64")
            for i in range(3):
                phase = tf.exp(
                    tf.complex(0.0, 1.0) * tf.cast(self.angles[i], "complex64")
                )
                state = tf.signal.fft(state * phase) / 2.0
            return tf.abs(state) ** 2

    x = keras.Input((4,))
    model = keras.Model(x, Circuit()(keras.layers.Dense(4)(x)))
    model.compile("adam", "kl_divergence", metrics=["cosine_similarity"])
    y = np.abs(floats(20, 4, seed=3))
    return model, floats(20, 4), y / y.sum(1, keepdims=True)


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


@case
def low_rank_by_qr_and_subspace_iteration():
    class Subspace(Own):
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
                tf.matmul(cov, tf.convert_to_tensor(self.basis))
                + 0.1 * self.basis
            )
            q = q * tf.sign(tf.linalg.diag_part(r))
            self.basis.assign(tf.stop_gradient(q))
            inside = tf.matmul(tf.matmul(z, q), q, transpose_b=True)
            return tf.reduce_mean((z - inside) ** 2) - 0.1 * tf.linalg.logdet(
                cov + tf.eye(4)
            )

    return (
        built(Subspace(net=dense(8, 4)), floats(2, 6), optimizer="sgd"),
        floats(20, 6),
        None,
    )


@case
def running_histogram_and_percentile_loss():
    class Running(Own):
        def create(self):
            self.histogram = self.state((8,), 0, "int32")
            self.low = self.state((), 9.0)
            self.high = self.state((), -9.0)

        def loss_of(self, x, y):
            e = tf.abs(self.net(x) - y)[:, 0]
            self.low.assign(tf.minimum(self.low, tf.reduce_min(e)))
            self.high.assign(tf.maximum(self.high, tf.reduce_max(e)))
            self.histogram.assign_add(
                tf.histogram_fixed_width(e, [0.0, 3.0], 8)
            )
            cdf = tf.cumsum(tf.cast(self.histogram, "float32"))
            rank = (
                tf.gather(
                    cdf, tf.clip_by_value(tf.cast(e / 3 * 8, "int32"), 0, 7)
                )
                / cdf[-1]
            )
            return tf.reduce_mean(
                e * tf.stop_gradient(tf.where(rank > 0.9, 0.1, 1.0))
            )

    return (
        built(Running(net=dense(8, 1)), floats(2, 6)),
        floats(20, 6),
        floats(20, 1),
    )


@case
def table_of_counts_of_strings():
    class Counted(Own):
        def create(self):
            self.table = tf.lookup.experimental.MutableHashTable(
                "string", "float32", 0.0
            )

        def loss_of(self, x, y):
            words = x["word"]
            unique, back, counts = tf.unique_with_counts(words)
            before = self.table.lookup(unique)
            self.table.insert(unique, before + tf.cast(counts, "float32"))
            rarity = 1 / (1 + tf.gather(before, back))
            return tf.reduce_mean(rarity * (self.net(x["v"])[:, 0] - y) ** 2)

        def call(self, x):
            return self.net(x["v"])

        def test_step(self, data):
            x, y = data
            return {"known": tf.reduce_sum(self.table.lookup(x["word"]))}

    x = {
        "word": tf.constant(np.array(list("abcdefg"))[ints(7, 20)]),
        "v": floats(20, 4),
    }
    model = Counted(net=dense(6, 1))
    model({"v": floats(2, 4)})
    model.compile("adam")
    return (
        model,
        tf.data.Dataset.from_tensor_slices((x, floats(20))).batch(13),
        None,
    )


@case
def prints_checks_and_a_generator_of_tensorflow():
    class Checked(Own):
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

    return (
        built(Checked(net=dense(8, 1)), floats(2, 6)),
        floats(20, 6),
        floats(20, 1),
    )


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
    fit={
        "class_weight": {0: 1.0, 1: 3.0, 2: 0.2},
        "validation_split": 0.25,
        "validation_batch_size": 4,
    }
)
def class_weights_and_confusions():
    model = dense(8, 3)
    model.build((None, 6))
    model.add(keras.layers.Softmax())
    model.compile(
        keras.optimizers.Adam(1e-2, weight_decay=1e-2),
        "sparse_categorical_crossentropy",
        metrics=["accuracy", keras.metrics.MeanIoU(3, sparse_y_pred=False)],
        weighted_metrics=[keras.metrics.SparseCategoricalCrossentropy()],
    )
    return model, floats(20, 6), ints(3, 20)


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
    h = (
        keras.layers.BatchNormalization(renorm=False)(h)
        if False
        else keras.layers.BatchNormalization()(h)
    )
    h = keras.layers.GRU(4, return_sequences=True)(h)
    model = keras.Model(x, keras.layers.Dense(2)(h))
    model.compile("adam", "mse", weighted_metrics=["mae"], metrics=["mape"])
    return model, floats(21, 5, 3), floats(21, 5, 2, seed=1)


@case(batch=2)
def fewer_examples_than_towers():
    x = keras.Input((6,))
    h = keras.layers.Dense(
        6,
        kernel_constraint="max_norm",
        kernel_regularizer=keras.regularizers.L1L2(1e-3, 1e-3),
        activity_regularizer="l2",
    )(x)
    h = keras.layers.UnitNormalization()(h)
    h = keras.layers.AlphaDropout(0.2, seed=3)(h)
    model = keras.Model(x, [keras.layers.Dense(1)(h), h])
    model.compile(keras.optimizers.Lamb(1e-2), ["mse", None])
    return model, floats(5, 6), floats(5, 1)


@case(tolerance=5e-2)
def bfloat16_with_gather_by_argsort():
    keras.config.set_dtype_policy("mixed_bfloat16")

    class Sorted(keras.layers.Layer):
        def call(self, x):
            order = tf.argsort(tf.cast(x[:, 0], "float32"))
            s = tf.gather(x, order)
            smooth = (s + tf.roll(s, 1, 0)) / 2
            return tf.gather(smooth, tf.argsort(order))

    return functional(Sorted(), optimizer="sgd")


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


@case
def lstsq_readout_solved_in_the_step():
    """Features are trained through a ridge regression of the batch."""

    class Ridge(Own):
        def create(self):
            self.readout = self.state((5, 2))

        def call(self, x):
            return tf.matmul(self.net(x), tf.convert_to_tensor(self.readout))

        def loss_of(self, x, y):
            h = self.net(x)
            half = tf.shape(x)[0] // 2
            a, b = h[:half], h[half:]
            w = tf.linalg.lstsq(a, y[:half], l2_regularizer=0.1)
            self.readout.assign(0.5 * self.readout + 0.5 * tf.stop_gradient(w))
            return tf.reduce_mean((tf.matmul(b, w) - y[half:]) ** 2)

    return (
        built(Ridge(net=dense(8, 5)), floats(2, 6), optimizer="sgd"),
        floats(20, 6),
        floats(20, 2),
    )


@case
def neighbours_graph_and_label_propagation():
    class Propagate(Own):
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
            known = tf.cast(y >= 0, "float32")[:, None]
            labels = tf.one_hot(tf.maximum(y, 0), 3) * known
            f = tf.linalg.solve(tf.eye(n) - 0.5 * s, labels)
            p = f / (tf.reduce_sum(f, 1, keepdims=True) + 1e-3)
            return tf.reduce_mean(
                cross(tf.maximum(y, 0), tf.math.log(p + 1e-3)) * known[:, 0]
            )

    y = ints(3, 20)
    y[::3] = -1
    return built(Propagate(net=dense(8, 2)), floats(2, 6)), floats(20, 6), y
