"""Losses over the batch: contrastive, metric learning, self-supervised, clusters."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from .base import Own, built, case, dense, floats, ints


def unit(x):
    return tf.math.l2_normalize(x, -1)


def views(seed):
    return keras.Sequential(
        [
            keras.layers.RandomFlip(seed=seed),
            keras.layers.RandomRotation(0.1, seed=seed + 1),
            keras.layers.RandomZoom(0.2, seed=seed + 2),
            keras.layers.RandomBrightness(
                0.2, value_range=(-2, 2), seed=seed + 3
            ),
        ]
    )


@case
def simclr_with_keras_augmentation():
    class SimClr(Own):
        def create(self):
            self.temperature = self.add_weight(
                shape=(), initializer=keras.initializers.Constant(0.1)
            )

        def loss_of(self, x, y):
            z = tf.concat(
                [
                    self.net(v(x, training=True), training=True)
                    for v in (self.a, self.b)
                ],
                0,
            )
            z = unit(z)
            count = tf.shape(x)[0]
            logits = tf.matmul(z, z, transpose_b=True) / self.temperature
            logits -= 1e9 * tf.eye(2 * count)
            labels = tf.math.floormod(tf.range(2 * count) + count, 2 * count)
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            )
            right = tf.equal(tf.argmax(logits, 1, tf.int32), labels)
            return {
                "loss": loss,
                "accuracy": tf.reduce_mean(tf.cast(right, "float32")),
            }

    net = keras.Sequential(
        [
            keras.layers.Conv2D(4, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(5),
        ]
    )
    model = SimClr(net=net, a=views(1), b=views(11))
    return built(model, floats(2, 6, 6, 2)), floats(20, 6, 6, 2), None


@case
def moco_with_a_queue():
    class MoCo(Own):
        def create(self):
            self.queue = self.add_weight(
                shape=(16, 4),
                initializer=keras.initializers.RandomNormal(1, seed=2),
                trainable=False,
            )
            self.place = self.state((), 0, "int64")

        def weights_of_step(self):
            return self.net.trainable_variables

        def loss_of(self, x, y):
            q = unit(self.net(x + 0.1))
            # Shuffled, so that BatchNormalization does not give away the partner.
            count = tf.shape(x)[0]
            order = tf.random.experimental.stateless_shuffle(
                tf.range(count), (3, 4)
            )
            back = tf.argsort(order)
            k = tf.gather(
                unit(self.key(tf.gather(x, order), training=True)), back
            )
            k = tf.stop_gradient(k)
            positive = tf.reduce_sum(q * k, -1, keepdims=True)
            negative = tf.matmul(
                q, tf.convert_to_tensor(self.queue), transpose_b=True
            )
            logits = tf.concat([positive, negative], 1) / 0.2
            places = (
                tf.cast(self.place, "int64") + tf.range(tf.cast(count, "int64"))
            ) % 16
            self.queue.assign(
                tf.tensor_scatter_nd_update(self.queue, places[:, None], k)
            )
            self.place.assign((self.place + tf.cast(count, "int64")) % 16)
            labels = tf.zeros([count], "int32")
            return tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            )

        def after(self, x, y):
            for a, b in zip(self.net.weights, self.key.weights, strict=True):
                b.assign(b * 0.9 + a * 0.1)

    def net():
        return keras.Sequential(
            [
                keras.layers.Dense(8, use_bias=False),
                keras.layers.BatchNormalization(),
                keras.layers.ReLU(),
                keras.layers.Dense(4),
            ]
        )

    model = MoCo(net=net(), key=net())
    model.key(floats(2, 6))
    built(
        model, floats(2, 6), optimizer=keras.optimizers.SGD(0.1, momentum=0.9)
    )
    model.key.set_weights(model.net.get_weights())
    return model, floats(20, 6), None


@case
def byol_with_a_cosine_schedule_of_the_teacher():
    class Byol(Own):
        def create(self):
            self.seed = keras.random.SeedGenerator(3)

        def weights_of_step(self):
            return (
                self.net.trainable_variables
                + self.predictor.trainable_variables
            )

        def loss_of(self, x, y):
            a = x + 0.1 * keras.random.normal(tf.shape(x), seed=self.seed)
            b = x * keras.random.dropout(tf.ones_like(x), 0.2, seed=self.seed)
            loss = 0.0
            for one, two in ((a, b), (b, a)):
                p = unit(
                    self.predictor(self.net(one, training=True), training=True)
                )
                t = tf.stop_gradient(unit(self.teacher(two, training=True)))
                loss += tf.reduce_mean(2 - 2 * tf.reduce_sum(p * t, -1))
            return loss

        def after(self, x, y):
            progress = tf.cast(self.optimizer.iterations, "float32") / 4.0
            tau = 1 - (1 - 0.9) * (tf.cos(np.pi * progress) + 1) / 2
            for a, b in zip(
                self.net.trainable_weights,
                self.teacher.trainable_weights,
                strict=True,
            ):
                b.assign(tau * b + (1 - tau) * a)

    def net():
        return keras.Sequential(
            [
                keras.layers.Dense(8, use_bias=False),
                keras.layers.BatchNormalization(),
                keras.layers.ReLU(),
                keras.layers.Dense(4),
            ]
        )

    model = Byol(net=net(), teacher=net(), predictor=net())
    model.teacher(floats(2, 6)), model.predictor(floats(2, 4))
    return (
        built(model, floats(2, 6), optimizer=keras.optimizers.SGD(0.05)),
        floats(20, 6),
        None,
    )


@case
def swav_with_sinkhorn_and_prototypes():
    class Swav(Own):
        def assign_codes(self, scores):
            q = tf.transpose(tf.exp(scores / 0.3))
            q /= tf.reduce_sum(q)
            for _ in range(3):
                q /= tf.reduce_sum(q, 1, keepdims=True) * 5.0
                q /= tf.reduce_sum(q, 0, keepdims=True) * tf.cast(
                    tf.shape(q)[1], "float32"
                )
            return tf.stop_gradient(
                tf.transpose(q / tf.reduce_sum(q, 0, keepdims=True))
            )

        def train_step(self, x):
            kernel = self.prototypes.kernel
            kernel.assign(tf.math.l2_normalize(kernel, 0))
            return super().train_step(x)

        def call(self, x):
            return self.prototypes(unit(self.net(x)))

        def loss_of(self, x, y):
            scores = [self(x * s) for s in (1.0, 0.9, 1.2)]
            codes = [self.assign_codes(s) for s in scores[:2]]
            terms = [
                tf.reduce_mean(
                    tf.nn.softmax_cross_entropy_with_logits(code, s / 0.2)
                )
                for i, code in enumerate(codes)
                for j, s in enumerate(scores)
                if i != j
            ]
            return tf.add_n(terms) / len(terms)

        def change(self, gradients, weights):
            # Prototypes are frozen in the first step.
            frozen = self.optimizer.iterations < 1
            return [
                tf.where(frozen, tf.zeros_like(g), g)
                if "prototypes" in w.path
                else g
                for g, w in zip(gradients, weights, strict=True)
            ]

    model = Swav(
        net=dense(8, 4),
        prototypes=keras.layers.Dense(5, use_bias=False, name="prototypes"),
    )
    return built(model, floats(2, 6), optimizer="sgd"), floats(20, 6), None


@case
def clip_with_logit_scale_and_strings():
    class Clip(Own):
        def create(self):
            self.logit_scale = self.add_weight(
                shape=(), initializer=keras.initializers.Constant(2.6)
            )
            self.words = keras.layers.TextVectorization(
                max_tokens=12,
                output_sequence_length=5,
                vocabulary=["red", "green", "blue", "cat", "dog", "big"],
            )
            self.embed = keras.layers.Embedding(12, 4, mask_zero=True)
            self.pool = keras.layers.GlobalAveragePooling1D()

        def call(self, inputs):
            image, text = inputs["image"], inputs["text"]
            image = unit(self.net(keras.layers.Rescaling(1 / 255.0)(image)))
            ids = self.words(text)
            text = self.pool(self.embed(ids), mask=ids > 0)
            return {"image": image, "text": unit(text)}

        def loss_of(self, x, y):
            out = self(x)
            scale = tf.exp(tf.minimum(self.logit_scale, 4.6))
            logits = scale * tf.matmul(
                out["image"], out["text"], transpose_b=True
            )
            labels = tf.range(tf.shape(logits)[0])
            cross = tf.nn.sparse_softmax_cross_entropy_with_logits
            loss = tf.reduce_mean(
                cross(labels, logits) + cross(labels, tf.transpose(logits))
            )
            ranks = tf.argsort(tf.argsort(logits, 1, direction="DESCENDING"), 1)
            recall = tf.reduce_mean(
                tf.cast(tf.linalg.diag_part(ranks) < 3, "float32")
            )
            return {"loss": loss, "recall_at_3": recall}

    net = keras.Sequential(
        [
            keras.layers.Conv2D(3, 2),
            keras.layers.Flatten(),
            keras.layers.Dense(4),
        ]
    )
    words = np.array(["red", "green", "blue", "cat", "dog", "big", "odd"])
    text = np.array([" ".join(words[i]) for i in ints(7, 20, 4)])
    x = {"image": ints(256, 20, 4, 4, 3).astype("uint8"), "text": text}
    x = tf.data.Dataset.from_tensor_slices((x,)).batch(13)
    model = Clip(net=net)
    model(
        {"image": np.zeros((1, 4, 4, 3), "uint8"), "text": tf.constant(["red"])}
    )
    model.compile("adam")
    return model, x, None


@case
def supervised_contrastive_then_a_probe():
    """The probe is trained on stopped features, with an optimizer of its own."""

    class SupCon(Own):
        def compile(self, *args, **options):
            super().compile(*args, **options)
            self.probe_optimizer = keras.optimizers.SGD(
                0.1, nesterov=True, momentum=0.8
            )

        def weights_of_step(self):
            return self.net.trainable_variables

        def call(self, x):
            return self.probe(self.net(x))

        def loss_of(self, x, y):
            z = unit(self.net(x))
            logits = tf.matmul(z, z, transpose_b=True) / 0.3
            logits -= tf.reduce_max(logits, 1, keepdims=True)
            others = 1 - tf.eye(tf.shape(z)[0])
            same = tf.cast(tf.equal(y, tf.transpose(y)), "float32") * others
            log = logits - tf.math.log(
                tf.reduce_sum(tf.exp(logits) * others, 1, keepdims=True)
            )
            return -tf.reduce_mean(
                tf.math.divide_no_nan(
                    tf.reduce_sum(same * log, 1), tf.reduce_sum(same, 1)
                )
            )

        def after(self, x, y):
            features = tf.stop_gradient(self.net(x))
            self.descend(
                lambda: tf.reduce_mean(
                    keras.losses.sparse_categorical_crossentropy(
                        y, self.probe(features), from_logits=True
                    )
                ),
                self.probe_optimizer,
                self.probe.trainable_variables,
            )

    model = SupCon(net=dense(8, 4), probe=keras.layers.Dense(3))
    return built(model, floats(2, 6)), floats(20, 6), ints(3, 20, 1)


@case
def triplets_mined_by_boolean_mask():
    class Triplet(Own):
        def loss_of(self, x, y):
            z = self.net(x)
            d = tf.reduce_sum((z[:, None] - z[None]) ** 2, -1)
            same = tf.equal(y[:, None], y[None])
            ap = tf.logical_and(
                same, tf.logical_not(tf.eye(tf.shape(z)[0], dtype="bool"))
            )
            triplets = tf.where(ap[:, :, None] & ~same[:, None, :])
            a, p, n = tf.unstack(tf.transpose(triplets))
            margin = (
                tf.gather_nd(d, tf.stack([a, p], 1))
                - tf.gather_nd(d, tf.stack([a, n], 1))
                + 0.5
            )
            semi = tf.boolean_mask(margin, (margin > 0) & (margin < 0.8))
            count = tf.cast(tf.size(semi), "float32")
            return {
                "loss": tf.math.divide_no_nan(tf.reduce_sum(semi), count),
                "active": count,
            }

    return (
        built(Triplet(net=dense(8, 3, bias=False)), floats(2, 6)),
        floats(20, 6),
        ints(3, 20),
    )


@case
def barlow_twins():
    class Barlow(Own):
        def loss_of(self, x, y):
            a, b = (
                self.net(x, training=True),
                self.net(x[:, ::-1], training=True),
            )
            count = tf.cast(tf.shape(a)[0], "float32")
            c = tf.matmul(a, b, transpose_a=True) / count
            on = tf.reduce_sum((tf.linalg.diag_part(c) - 1) ** 2)
            off = tf.reduce_sum(c**2) - tf.reduce_sum(
                tf.linalg.diag_part(c) ** 2
            )
            return {"loss": on + 0.05 * off, "on": on, "off": off}

    net = keras.Sequential(
        [
            keras.layers.Dense(8, "tanh"),
            keras.layers.Dense(4, use_bias=False),
            keras.layers.BatchNormalization(
                center=False, scale=False, momentum=0.8
            ),
        ]
    )
    optimizer = keras.optimizers.Lion(1e-3)
    return (
        built(Barlow(net=net), floats(2, 6), optimizer=optimizer),
        floats(20, 6),
        None,
    )


@case
def vicreg_as_a_keras_loss():
    """One output of stacked views; y is what Keras demands, and unused."""

    def vicreg(y_true, y_pred):
        a, b = ops.split(y_pred, 2, axis=1)
        a, b = a[:, 0], b[:, 0]
        loss = 5 * ops.mean((a - b) ** 2)
        for z in (a, b):
            z = z - ops.mean(z, axis=0)
            loss += 5 * ops.mean(
                ops.relu(1 - ops.sqrt(ops.var(z, axis=0) + 1e-4))
            )
            cov = ops.matmul(ops.transpose(z), z) / ops.cast(
                ops.shape(z)[0] - 1, "float32"
            )
            loss += ops.sum((cov * (1 - ops.eye(4))) ** 2) / 4
        return loss

    x = keras.Input((2, 6))
    z = keras.layers.TimeDistributed(dense(8, 4, bias=False))(x)
    model = keras.Model(x, z)
    model.compile("adam", vicreg)
    return model, floats(20, 2, 6), np.zeros((20, 1))


@case
def center_loss_with_moving_centres():
    class Center(keras.layers.Layer):
        def build(self, shape):
            self.centers = self.add_weight(
                shape=(4, 3), trainable=False, initializer="zeros"
            )

        def call(self, inputs, training=False):
            z, y = inputs
            y = ops.cast(y[:, 0], "int32")
            apart = z - tf.gather(self.centers, y)
            self.add_loss(0.5 * tf.reduce_mean(tf.reduce_sum(apart**2, -1)))
            if training:
                unique, index, counts = tf.unique_with_counts(y)
                step = (
                    0.5
                    * apart
                    / tf.cast(1 + tf.gather(counts, index), "float32")[:, None]
                )
                self.centers.assign(
                    tf.tensor_scatter_nd_add(self.centers, y[:, None], step)
                )
            return z

    x, y = keras.Input((6,)), keras.Input((1,), dtype="int64")
    z = keras.layers.Dense(3)(keras.layers.Dense(8, "gelu")(x))
    z = Center()([z, y])
    model = keras.Model([x, y], keras.layers.Dense(4, "softmax")(z))
    model.compile(
        "rmsprop", "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    labels = ints(4, 20, 1)
    return model, [floats(20, 6), labels], labels


@case(predict=True)
def arcface_head_with_adaptive_margin():
    class Arc(keras.layers.Layer):
        def build(self, shapes):
            self.w = self.add_weight(shape=(shapes[0][-1], 4))
            self.mean_norm = self.add_weight(
                shape=(), initializer="ones", trainable=False
            )
            self.std_norm = self.add_weight(
                shape=(), initializer="ones", trainable=False
            )

        def call(self, inputs, training=False):
            z, y = inputs
            norm = tf.stop_gradient(tf.norm(z, axis=-1, keepdims=True))
            cosine = tf.matmul(unit(z), tf.math.l2_normalize(self.w, 0))
            if not training:
                return 8 * cosine
            # AdaFace: the margin follows the norm of the features in the batch.
            self.mean_norm.assign(
                0.9 * self.mean_norm + 0.1 * tf.reduce_mean(norm)
            )
            self.std_norm.assign(
                0.9 * self.std_norm + 0.1 * tf.math.reduce_std(norm)
            )
            scale = tf.clip_by_value(
                (norm - self.mean_norm) / (self.std_norm + 1e-3), -1, 1
            )
            hot = tf.one_hot(tf.cast(y[:, 0], "int32"), 4)
            theta = tf.acos(tf.clip_by_value(cosine, -0.999, 0.999))
            theta = tf.clip_by_value(
                theta - hot * 0.2 * scale, 1e-3, np.pi - 1e-3
            )
            return 8 * (tf.cos(theta) - hot * (0.2 + 0.2 * scale))

    x, y = keras.Input((6,)), keras.Input((1,), dtype="int32")
    model = keras.Model([x, y], Arc()([dense(8, 5)(x), y]))
    model.compile(
        keras.optimizers.Adam(1e-2, clipnorm=0.5),
        keras.losses.SparseCategoricalCrossentropy(True),
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)],
    )
    labels = ints(4, 20, 1)
    return model, [floats(20, 6), labels], labels


@case
def prototypical_episodes():
    """The first half of a batch are the support of the second."""

    class Proto(Own):
        def loss_of(self, x, y):
            half = tf.shape(x)[0] // 2
            z = self.net(x)
            support, query = z[:half], z[half:]
            prototypes = tf.math.unsorted_segment_mean(support, y[:half], 3)
            d = tf.reduce_sum((query[:, None] - prototypes[None]) ** 2, -1)
            entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(
                y[half:], -d
            )
            seen = tf.gather(
                tf.math.unsorted_segment_sum(
                    tf.ones_like(y[:half], "float32"), y[:half], 3
                ),
                y[half:],
            )
            mask = tf.cast(seen > 0, "float32")
            loss = tf.math.divide_no_nan(
                tf.reduce_sum(entropy * mask), tf.reduce_sum(mask)
            )
            return {"loss": loss, "seen": tf.reduce_mean(mask)}

    return (
        built(Proto(net=dense(8, 4)), floats(2, 6)),
        floats(20, 6),
        ints(3, 20),
    )


@case
def online_kmeans_of_deep_features():
    class Deep(Own):
        def create(self):
            self.centroids = self.add_weight(
                shape=(4, 3),
                initializer=keras.initializers.RandomNormal(1, seed=5),
                trainable=False,
            )
            self.usage = self.state((4,), 0, "int64")

        def call(self, x):
            z = self.net(x)
            d = tf.norm(z[:, None] - self.centroids[None], axis=-1)
            return tf.argmin(d, 1)

        def loss_of(self, x, y):
            z = self.net(x)
            d = tf.reduce_sum((z[:, None] - self.centroids[None]) ** 2, -1)
            # DEC: student's t, and a target that sharpens it over the batch.
            q = 1 / (1 + d)
            q /= tf.reduce_sum(q, 1, keepdims=True)
            p = q**2 / tf.reduce_sum(q, 0)
            p = tf.stop_gradient(p / tf.reduce_sum(p, 1, keepdims=True))
            return tf.reduce_sum(p * tf.math.log(p / q)) / tf.cast(
                tf.shape(x)[0], "float32"
            )

        def after(self, x, y):
            z, owner = self.net(x), self(x)
            means = tf.math.unsorted_segment_mean(z, owner, 4)
            counts = tf.math.bincount(
                tf.cast(owner, "int32"), minlength=4, maxlength=4
            )
            self.usage.assign_add(tf.cast(counts, "int64"))
            used = tf.cast(counts > 0, "float32")[:, None]
            self.centroids.assign_add(0.3 * used * (means - self.centroids))

    return built(Deep(net=dense(8, 3)), floats(2, 6)), floats(20, 6), None


@case
def nnclr_with_a_feature_queue():
    class NnClr(Own):
        def create(self):
            self.queue = self.add_weight(
                shape=(10, 4),
                initializer=keras.initializers.RandomNormal(1, seed=5),
                trainable=False,
            )

        def neighbours(self, z):
            near = tf.matmul(
                z, tf.convert_to_tensor(self.queue), transpose_b=True
            )
            found = tf.gather(self.queue, tf.argmax(near, 1))
            return z + tf.stop_gradient(found - z)

        def loss_of(self, x, y):
            a, b = unit(self.net(x)), unit(self.net(x * 1.1 + 0.05))
            labels = tf.range(tf.shape(x)[0])
            losses = []
            for one, two in ((a, b), (b, a)):
                logits = (
                    tf.matmul(self.neighbours(one), two, transpose_b=True) / 0.3
                )
                losses += [
                    keras.losses.sparse_categorical_crossentropy(
                        labels, m, True
                    )
                    for m in (logits, tf.transpose(logits))
                ]
            self.queue.assign(tf.concat([a, self.queue], 0)[:10])
            return tf.reduce_mean(tf.stack(losses))

    return built(NnClr(net=dense(8, 4)), floats(2, 6)), floats(20, 6), None


@case
def dino_with_centring_and_crops():
    class Dino(Own):
        def create(self):
            self.center = self.state((1, 5))

        def weights_of_step(self):
            return self.net.trainable_variables

        def loss_of(self, x, y):
            warm = tf.minimum(
                tf.cast(self.optimizer.iterations, "float32") / 3, 1.0
            )
            temperature = 0.1 + 0.1 * warm
            crops = [x, x[:, 1:] @ tf.ones((5, 6)) / 6, x * 0.5]
            students = [self.net(c) / 0.3 for c in crops]
            teachers = [self.teacher(c) for c in crops[:2]]
            loss, terms = 0.0, 0
            for i, t in enumerate(teachers):
                target = tf.stop_gradient(
                    tf.nn.softmax((t - self.center) / temperature)
                )
                for j, s in enumerate(students):
                    if i != j:
                        loss += tf.reduce_mean(
                            tf.nn.softmax_cross_entropy_with_logits(target, s)
                        )
                        terms += 1
            self.center.assign(
                self.center * 0.9
                + 0.1 * tf.reduce_mean(tf.concat(teachers, 0), 0, keepdims=True)
            )
            return loss / terms

        def after(self, x, y):
            for a, b in zip(
                self.net.weights, self.teacher.weights, strict=True
            ):
                b.assign(0.95 * b + 0.05 * a)

    model = Dino(net=dense(8, 5), teacher=dense(8, 5))
    model.teacher(floats(2, 6))
    optimizer = keras.optimizers.AdamW(
        keras.optimizers.schedules.CosineDecay(1e-2, 4), global_clipnorm=1.0
    )
    return built(model, floats(2, 6), optimizer=optimizer), floats(20, 6), None


@case
def hardest_negatives_by_top_k():
    class Hard(Own):
        def loss_of(self, x, y):
            z = unit(self.net(x))
            s = tf.matmul(z, z, transpose_b=True)
            same = tf.equal(y[:, None], y[None])
            count = tf.shape(z)[0]
            k = tf.minimum(3, count)
            hard_n = tf.math.top_k(tf.where(same, -9.0, s), k).values
            hard_p = -tf.math.top_k(-tf.where(same, s, 9.0), k).values
            # Circle loss
            an, ap = tf.nn.relu(hard_n + 0.25), tf.nn.relu(1.25 - hard_p)
            ln = tf.reduce_logsumexp(
                4 * tf.stop_gradient(an) * (hard_n - 0.25), 1
            )
            lp = tf.reduce_logsumexp(
                -4 * tf.stop_gradient(ap) * (hard_p - 0.75), 1
            )
            return tf.reduce_mean(tf.nn.softplus(ln + lp))

    return (
        built(Hard(net=dense(8, 3)), floats(2, 6)),
        floats(20, 6),
        ints(3, 20),
    )


@case
def histogram_loss_over_all_pairs():
    class Histogram(Own):
        def soft(self, s, mask):
            nodes = tf.linspace(-1.0, 1.0, 9)
            near = tf.nn.relu(1 - tf.abs(s[..., None] - nodes) * 4)
            near *= tf.cast(mask, "float32")[..., None]
            return tf.math.divide_no_nan(
                tf.reduce_sum(near, [0, 1]),
                tf.reduce_sum(tf.cast(mask, "float32")),
            )

        def loss_of(self, x, y):
            z = unit(self.net(x))
            s = tf.matmul(z, z, transpose_b=True)
            upper = tf.linalg.band_part(tf.ones_like(s), 0, -1) - tf.eye(
                tf.shape(s)[0]
            )
            same = tf.equal(y[:, None], y[None])
            p = self.soft(s, same & (upper > 0))
            n = self.soft(s, ~same & (upper > 0))
            return tf.reduce_sum(n * tf.cumsum(p))

    return (
        built(Histogram(net=dense(8, 3)), floats(2, 6)),
        floats(20, 6),
        ints(3, 20),
    )


@case
def momentum_teacher_with_knn_metric():
    """A metric that holds the last features and labels, and votes."""

    class Knn(keras.metrics.Metric):
        def __init__(self, name="knn"):
            super().__init__(name=name)
            self.bank = self.add_variable((12, 3), initializer="zeros")
            self.labels = self.add_variable(
                (12,), initializer="zeros", dtype="int32"
            )
            self.right = self.add_variable((), initializer="zeros")
            self.count = self.add_variable((), initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            y = ops.cast(ops.reshape(y_true, (-1,)), "int32")
            near = ops.top_k(ops.matmul(y_pred, ops.transpose(self.bank)), 3)[1]
            votes = ops.sum(
                ops.one_hot(ops.take(self.labels, near, axis=0), 3), axis=1
            )
            guess = ops.cast(ops.argmax(votes, axis=-1), "int32")
            self.right.assign_add(ops.sum(ops.cast(guess == y, "float32")))
            self.count.assign_add(ops.cast(ops.shape(y)[0], "float32"))
            self.bank.assign(ops.concatenate([y_pred, self.bank])[:12])
            self.labels.assign(ops.concatenate([y, self.labels])[:12])

        def result(self):
            return self.right / (self.count + 1e-9)

        def reset_state(self):
            self.right.assign(0.0)
            self.count.assign(0.0)

    model = dense(8, 3)
    model.build((None, 6))
    model.compile(
        "adam",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[Knn()],
    )
    return model, floats(20, 6), ints(3, 20, 1)
