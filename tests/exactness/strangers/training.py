"""How steps are trained: two passes, several tasks, reinforcement."""

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
def rand_augment_by_switch_case_per_example():
    class Rand(Own):
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

    net = keras.Sequential([keras.layers.Flatten(), dense(6, 3)])
    return (
        built(Rand(net=net), floats(2, 4, 4, 1)),
        floats(20, 4, 4, 1),
        ints(3, 20),
    )


@case
def lookahead_and_centralised_gradients():
    class Lookahead(Own):
        def create(self):
            self.net.build((None, 6))
            self.slow = [self.state(w.shape) for w in self.trainable_variables]
            for s, w in zip(self.slow, self.trainable_variables, strict=True):
                s.assign(w)

        def loss_of(self, x, y):
            return tf.reduce_mean(cross(y, self.net(x)))

        def change(self, gradients, weights):
            return [
                g
                - tf.reduce_mean(
                    g, list(range(len(g.shape) - 1)), keepdims=True
                )
                if len(g.shape) > 1
                else g
                for g in gradients
            ]

        def after(self, x, y):
            sync = tf.equal(self.optimizer.iterations % 2, 0)
            for s, w in zip(self.slow, self.trainable_variables, strict=True):
                moved = s + 0.5 * (w - s)
                s.assign(tf.where(sync, moved, s))
                w.assign(tf.where(sync, moved, w))

    model = Lookahead(net=dense(8, 3))
    model(floats(2, 6))
    model.compile(keras.optimizers.Adamax(1e-2))
    return model, floats(20, 6), ints(3, 20)


@case(tolerance=2e-2)
def mixed_float16_with_scale_loss_in_the_step():
    keras.config.set_dtype_policy("mixed_float16")

    class Half(Own):
        def loss_of(self, x, y):
            return tf.reduce_mean(cross(y, tf.cast(self.net(x), "float32")))

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                logits = tf.cast(self.net(x), "float32")
                loss = tf.reduce_mean(cross(y, logits))
                scaled = self.optimizer.scale_loss(loss)
            weights = self.trainable_variables
            self.optimizer.apply(tape.gradient(scaled, weights), weights)
            return {
                "loss": loss,
                "scale": tf.convert_to_tensor(self.optimizer.dynamic_scale),
            }

    model = Half(net=dense(8, 3))
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.05), 2.0**10
    )
    built(model, floats(2, 6), optimizer=optimizer)
    return model, floats(20, 6), ints(3, 20)


@case
def class_balanced_focal_loss_of_this_batch():
    class Balanced(Own):
        def create(self):
            self.seen = self.state((4,))

        def loss_of(self, x, y):
            counts = tf.cast(
                tf.math.bincount(y, minlength=4, maxlength=4), "float32"
            )
            self.seen.assign_add(counts)
            effective = (1 - 0.9**self.seen) / (1 - 0.9)
            weights = tf.math.divide_no_nan(1.0, effective)
            weights = weights / tf.reduce_sum(weights) * 4
            p = tf.nn.softmax(self.net(x))
            pt = tf.gather(p, y, batch_dims=1)
            focal = -((1 - pt) ** 2) * tf.math.log(pt) * tf.gather(weights, y)
            return tf.reduce_sum(focal) / tf.reduce_sum(tf.gather(weights, y))

    return (
        built(Balanced(net=dense(8, 4)), floats(2, 6)),
        floats(20, 6),
        ints(4, 20).astype("int32"),
    )


@case
def self_paced_curriculum_by_a_counter():
    class Paced(Own):
        def loss_of(self, x, y):
            losses = cross(y, self.net(x))
            count = tf.shape(losses)[0]
            share = tf.minimum(
                0.4 + 0.2 * tf.cast(self.optimizer.iterations, "float32"), 1.0
            )
            keep = tf.cast(
                tf.math.ceil(share * tf.cast(count, "float32")), "int32"
            )
            easiest = -tf.math.top_k(-losses, keep).values
            return {"loss": tf.reduce_mean(easiest), "kept": keep}

    return (
        built(Paced(net=dense(8, 3)), floats(2, 6)),
        floats(20, 6),
        ints(3, 20),
    )


@case
def hard_examples_are_seen_again():
    """Online hard example mining, with a second pass over the hardest rows."""

    class Ohem(Own):
        def loss_of(self, x, y):
            losses = cross(y, self.net(x, training=False))
            hard = tf.math.top_k(
                losses, tf.shape(losses)[0] // 2, sorted=False
            ).indices
            hx, hy = tf.gather(x, hard), tf.gather(y, hard)
            return tf.reduce_mean(cross(hy, self.net(hx, training=True)))

    net = keras.Sequential(
        [
            keras.layers.Dense(8),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dropout(0.3, seed=4),
            keras.layers.Dense(3),
        ]
    )
    return (
        built(Ohem(net=net), floats(2, 6), optimizer="sgd"),
        floats(20, 6),
        ints(3, 20),
    )


@case
def co_teaching_of_two_networks():
    class Co(Own):
        def compile(self, *args, **options):
            super().compile(*args, **options)
            self.second = keras.optimizers.Adam(2e-3)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                a, b = cross(y, self.net(x)), cross(y, self.other(x))
                keep = tf.cast(
                    tf.cast(tf.shape(y)[0], "float32") * 0.7, "int32"
                )
                ia, ib = tf.argsort(a)[:keep], tf.argsort(b)[:keep]
                la, lb = (
                    tf.reduce_mean(tf.gather(a, ib)),
                    tf.reduce_mean(tf.gather(b, ia)),
                )
            for net, loss, optimizer in (
                (self.net, la, self.optimizer),
                (self.other, lb, self.second),
            ):
                w = net.trainable_variables
                optimizer.apply(tape.gradient(loss, w), w)
            agree = tf.size(tf.sets.intersection(ia[None], ib[None]).values)
            return {"a": la, "b": lb, "agree": agree}

        def test_step(self, data):
            return {"a": tf.reduce_mean(cross(data[1], self.net(data[0])))}

    model = Co(net=dense(8, 3), other=dense(8, 3))
    model.other(floats(2, 6))
    return built(model, floats(2, 6)), floats(20, 6), ints(3, 20)


@case
def group_dro_with_moving_weights():
    class Dro(Own):
        def create(self):
            self.q = self.state((3,), 1 / 3)

        def loss_of(self, x, y):
            group = y[:, 1]
            losses = cross(y[:, 0], self.net(x))
            means = tf.math.unsorted_segment_mean(losses, group, 3)
            q = tf.convert_to_tensor(self.q) * tf.exp(
                0.5 * tf.stop_gradient(means)
            )
            self.q.assign(q / tf.reduce_sum(q))
            worst = tf.math.unsorted_segment_max(losses, group, 3)
            return {
                "loss": tf.reduce_sum(self.q * means),
                "worst": tf.reduce_max(tf.where(worst > -1e9, worst, 0.0)),
            }

    y = np.stack([ints(3, 20), ints(3, 20, seed=1)], 1)
    return built(Dro(net=dense(8, 3)), floats(2, 6)), floats(20, 6), y


@case
def quantile_regression_with_conformal_width():
    class Conformal(Own):
        def create(self):
            self.width = self.state(())

        def loss_of(self, x, y):
            out = self.net(x)
            taus = tf.constant([0.1, 0.5, 0.9])
            e = y - out
            crossing = tf.nn.relu(out[:, :-1] - out[:, 1:])
            score = tf.maximum(out[:, 0] - y[:, 0], y[:, 0] - out[:, 2])
            ordered = tf.sort(score)
            n = tf.shape(score)[0]
            at = (
                tf.minimum(
                    tf.cast(
                        tf.math.ceil(0.8 * tf.cast(n + 1, "float32")), "int32"
                    ),
                    n,
                )
                - 1
            )
            self.width.assign(0.5 * self.width + 0.5 * ordered[at])
            inside = tf.reduce_mean(tf.cast(score <= self.width, "float32"))
            loss = tf.reduce_mean(
                tf.maximum(taus * e, (taus - 1) * e)
            ) + tf.reduce_sum(crossing)
            return {"loss": loss, "coverage": inside}

    return (
        built(Conformal(net=dense(8, 3)), floats(2, 6)),
        floats(20, 6),
        floats(20, 1, seed=3),
    )


@case
def adaptive_gradient_clipping_by_unit():
    class Agc(Own):
        def loss_of(self, x, y):
            return tf.reduce_mean((self.net(x) - y) ** 2)

        def change(self, gradients, weights):
            out = []
            for g, w in zip(gradients, weights, strict=True):
                axes = list(range(len(w.shape) - 1))
                gn = tf.sqrt(tf.reduce_sum(g**2, axes, keepdims=True))
                wn = tf.maximum(
                    tf.sqrt(tf.reduce_sum(w**2, axes, keepdims=True)), 1e-3
                )
                out.append(
                    tf.where(gn > 0.1 * wn, g * 0.1 * wn / (gn + 1e-6), g)
                )
            # And noise that decays, of one seed per step.
            seed = tf.stack([tf.cast(self.optimizer.iterations, "int32"), 7])
            return [
                g + 0.01 * tf.random.stateless_normal(g.shape, seed + i)
                for i, g in enumerate(out)
            ]

    return (
        built(Agc(net=dense(8, 2)), floats(2, 6), optimizer="sgd"),
        floats(20, 6),
        floats(20, 2),
    )


@tf.custom_gradient
def reverse(x):
    return tf.identity(x), lambda upstream: -0.3 * upstream


@case
def early_exit_on_the_confidence_of_the_batch():
    class Exit(Own):
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

    model = Exit(
        net=dense(8, 6),
        one=keras.layers.Dense(3),
        deep=keras.layers.Dense(6),
        two=keras.layers.Dense(3),
    )
    model.loss_of(floats(2, 6), ints(3, 2))
    model.compile("adam")
    return model, floats(20, 6) * 2, ints(3, 20)


@case
def actor_critic_with_gae_by_reverse_scan():
    class A2c(Own):
        def loss_of(self, x, y):
            logits, values = self.net(x), self.critic(x)[..., 0]
            rewards, done = y[..., 0], y[..., 1]
            following = tf.concat([values[:, 1:], values[:, -1:]], 1)
            delta = rewards + 0.9 * following * (1 - done) - values

            def step(carry, parts):
                d, alive = parts
                return d + 0.9 * 0.95 * alive * carry

            gae = tf.scan(
                step,
                (tf.transpose(delta), tf.transpose(1 - done)),
                initializer=tf.zeros_like(delta[:, 0]),
                reverse=True,
            )
            gae = tf.stop_gradient(tf.transpose(gae))
            action = tf.argmax(tf.stop_gradient(logits), -1)
            policy = (
                tf.nn.sparse_softmax_cross_entropy_with_logits(action, logits)
                * gae
            )
            return tf.reduce_mean(policy) + 0.5 * tf.reduce_mean(
                (values - tf.stop_gradient(values) - gae) ** 2
            )

    model = A2c(net=dense(8, 3), critic=dense(8, 1))
    model.critic(floats(2, 5, 4))
    y = np.stack([floats(20, 5), (floats(20, 5, seed=1) > 1)], -1).astype(
        "float32"
    )
    return built(model, floats(2, 5, 4)), floats(20, 5, 4), y


@case
def physics_informed_with_second_derivatives():
    class Pinn(Own):
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

    return built(Pinn(net=dense(8, 8, 1)), floats(2, 2)), floats(20, 2), None
