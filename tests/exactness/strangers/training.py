"""How steps are trained: two passes, several tasks, reinforcement."""

import keras
import numpy as np
import tensorflow as tf

from tests.exactness.strangers.base import (
    Own,
    cross,
    dense,
    floats,
    ints,
    step,
)


@step(
    floats(20, 4, 4, 1),
    ints(3, 20),
    net=lambda: keras.Sequential([keras.layers.Flatten(), dense(6, 3)]),
)
class RandAugmentBySwitchCasePerExample(Own):
    def create(self):
        self.seed = keras.random.SeedGenerator(4)

    def loss_of(self, x, y):
        count = tf.shape(x)[0]
        which = keras.random.randint((count,), 0, 4, seed=self.seed)
        power = keras.random.uniform((count,), seed=self.seed)

        def one(parts):
            image, op, p = parts
            return tf.switch_case(
                op,
                [
                    lambda: image,
                    lambda: tf.image.flip_left_right(image),
                    lambda: tf.roll(image, tf.cast(p * 3, "int32"), 0),
                    lambda: image * (1 + p),
                ],
            )

        x = tf.map_fn(one, (x, which, power), fn_output_signature="float32")
        return tf.reduce_mean(cross(y, self.net(x)))


@step(
    floats(20, 6),
    ints(3, 20),
    net=(8, 3),
    optimizer=lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.05), 2.0**10
    ),
    policy="mixed_float16",
    tolerance=2e-2,
)
class MixedFloat16WithScaleLossInTheStep(Own):
    def loss_of(self, x, y):
        return tf.reduce_mean(cross(y, tf.cast(self.net(x), "float32")))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data)
            scaled = self.optimizer.scale_loss(loss)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, weights), weights)
        scale = tf.convert_to_tensor(self.optimizer.dynamic_scale)
        return {"loss": loss, "scale": scale}


@step(floats(20, 6), ints(3, 20), net=(8, 3))
class SelfPacedCurriculumByACounter(Own):
    def loss_of(self, x, y):
        losses = cross(y, self.net(x))
        count = tf.shape(losses)[0]
        share = tf.minimum(
            0.4 + 0.2 * tf.cast(self.optimizer.iterations, "float32"), 1.0
        )
        keep = tf.cast(tf.math.ceil(share * tf.cast(count, "float32")), "int32")
        easiest = -tf.math.top_k(-losses, keep).values
        return {"loss": tf.reduce_mean(easiest), "kept": keep}


@step(floats(20, 6), ints(3, 20), net=(8, 3))
class CoTeachingOfTwoNetworks(Own):
    def create(self):
        self.other = dense(8, 3)
        self.other.build((None, 6))
        self.second = keras.optimizers.Adam(2e-3)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            a, b = cross(y, self.net(x)), cross(y, self.other(x))
            keep = tf.cast(tf.cast(tf.shape(y)[0], "float32") * 0.7, "int32")
            ia, ib = tf.argsort(a)[:keep], tf.argsort(b)[:keep]
            la = tf.reduce_mean(tf.gather(a, ib))
            lb = tf.reduce_mean(tf.gather(b, ia))
        for net, loss, optimizer in (
            (self.net, la, self.optimizer),
            (self.other, lb, self.second),
        ):
            w = net.trainable_variables
            optimizer.apply(tape.gradient(loss, w), w)
        agree = tf.size(tf.sets.intersection(ia[None], ib[None]).values)
        return {"a": la, "b": lb, "agree": agree}

    def loss_of(self, x, y):
        return tf.reduce_mean(cross(y, self.net(x)))


@step(floats(20, 6), ints(4, 20).astype("int32"), net=(8, 4))
class ClassBalancedFocalLossOfThisBatch(Own):
    def create(self):
        self.seen = self.state((4,))

    def loss_of(self, x, y):
        counts = tf.math.bincount(y, minlength=4, maxlength=4)
        self.seen.assign_add(tf.cast(counts, "float32"))
        effective = (1 - 0.9**self.seen) / (1 - 0.9)
        weights = tf.math.divide_no_nan(1.0, effective)
        weights = weights / tf.reduce_sum(weights) * 4
        p = tf.nn.softmax(self.net(x))
        pt = tf.gather(p, y, batch_dims=1)
        focal = -((1 - pt) ** 2) * tf.math.log(pt) * tf.gather(weights, y)
        return tf.reduce_sum(focal) / tf.reduce_sum(tf.gather(weights, y))


@step(
    floats(20, 6),
    np.stack([ints(3, 20), ints(3, 20, seed=1)], 1),
    net=(8, 3),
)
class GroupDroWithMovingWeights(Own):
    def create(self):
        self.q = self.state((3,), 1 / 3)

    def loss_of(self, x, y):
        group = y[:, 1]
        losses = cross(y[:, 0], self.net(x))
        means = tf.math.unsorted_segment_mean(losses, group, 3)
        q = self.q * tf.exp(0.5 * tf.stop_gradient(means))
        self.q.assign(q / tf.reduce_sum(q))
        worst = tf.math.unsorted_segment_max(losses, group, 3)
        return {
            "loss": tf.reduce_sum(self.q * means),
            "worst": tf.reduce_max(tf.where(worst > -1e9, worst, 0.0)),
        }


@step(floats(20, 6), floats(20, 2), net=(8, 2), optimizer="sgd")
class AdaptiveGradientClippingByUnit(Own):
    def change(self, gradients, weights):
        out = []
        for g, w in zip(gradients, weights, strict=True):
            axes = list(range(len(w.shape) - 1))
            gn = tf.sqrt(tf.reduce_sum(g**2, axes, keepdims=True))
            wn = tf.maximum(
                tf.sqrt(tf.reduce_sum(w**2, axes, keepdims=True)), 1e-3
            )
            out.append(tf.where(gn > 0.1 * wn, g * 0.1 * wn / (gn + 1e-6), g))
        # And noise that decays, of one seed per step.
        seed = tf.stack([tf.cast(self.optimizer.iterations, "int32"), 7])
        return [
            g + 0.01 * tf.random.stateless_normal(g.shape, seed + i)
            for i, g in enumerate(out)
        ]


@step(floats(20, 6) * 2, ints(3, 20), net=(8, 6))
class EarlyExitOnTheConfidenceOfTheBatch(Own):
    def create(self):
        self.one, self.two = keras.layers.Dense(3), keras.layers.Dense(3)
        self.deep = keras.layers.Dense(6)
        for head in (self.one, self.two, self.deep):
            head.build((None, 6))

    def call(self, x, training=False):
        h = self.net(x)
        first = self.one(h)
        sure = tf.reduce_mean(tf.reduce_max(tf.nn.softmax(first), -1)) > 0.5
        return tf.cond(
            sure, lambda: first, lambda: self.two(tf.nn.relu(self.deep(h)))
        )

    def loss_of(self, x, y):
        h = self.net(x)
        both = [self.one(h), self.two(tf.nn.relu(self.deep(h))), self(x)]
        return tf.add_n([tf.reduce_mean(cross(y, o)) for o in both])


@step(floats(20, 2), net=(8, 8, 1))
class PhysicsInformedWithSecondDerivatives(Own):
    def create(self):
        self.conductivity = self.add_weight(shape=(), initializer="ones")

    def loss_of(self, x, y):
        t, p = x[:, :1], x[:, 1:]
        with tf.GradientTape() as second:
            second.watch(p)
            with tf.GradientTape(persistent=True) as first:
                first.watch([t, p])
                u = self.net(tf.concat([t, p], 1))
            u_t, u_p = first.gradient(u, t), first.gradient(u, p)
        u_pp = second.gradient(u_p, p)
        with tf.GradientTape() as tape:
            tape.watch(x)
            v = self.net(x)
        j = tape.batch_jacobian(v, x)
        edge = tf.cast(tf.abs(p) > 1, "float32")
        residual = u_t - self.conductivity * u_pp
        boundary = tf.math.divide_no_nan(
            tf.reduce_sum(edge * u**2), tf.reduce_sum(edge)
        )
        return {
            "loss": tf.reduce_mean(residual**2)
            + boundary
            + 1e-2 * tf.reduce_mean(j**2),
            "k": tf.convert_to_tensor(self.conductivity),
        }
