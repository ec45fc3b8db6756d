"""How steps are trained: mixing examples, two passes, several tasks, reinforcement."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from .base import Own, built, case, dense, floats, ints


def cross(y, logits):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.cast(y, "int32"), logits
    )


@case
def mixup_and_cutmix_in_the_step():
    class Mixed(keras.Model):
        def __init__(self, net):
            super().__init__()
            self.net = net
            self.seed = keras.random.SeedGenerator(4)

        def call(self, x, training=False):
            return self.net(x, training=training)

        def mixup(self, x, y):
            count = tf.shape(x)[0]
            lam = keras.random.beta((count,), 0.4, 0.4, seed=self.seed)
            lam4 = lam[:, None, None, None]
            other = tf.reverse(x, [0])
            return lam4 * x + (1 - lam4) * other, (
                lam[:, None] * y + (1 - lam[:, None]) * tf.reverse(y, [0])
            )

        def cutmix(self, x, y):
            order = keras.random.shuffle(
                tf.range(tf.shape(x)[0]), seed=self.seed
            )
            corner = keras.random.randint((2,), 0, 3, seed=self.seed)
            rows, columns = tf.range(5)[:, None], tf.range(5)[None]
            box = (
                (rows >= corner[0])
                & (rows < corner[0] + 2)
                & (columns >= corner[1])
                & (columns < corner[1] + 3)
            )
            box = tf.cast(box, "float32")[None, :, :, None]
            share = tf.reduce_mean(box)
            return (1 - box) * x + box * tf.gather(x, order), (
                (1 - share) * y + share * tf.gather(y, order)
            )

        def train_step(self, data):
            x, y = data
            coin = keras.random.uniform((), seed=self.seed)
            x, y = tf.cond(
                coin < 0.5, lambda: self.mixup(x, y), lambda: self.cutmix(x, y)
            )
            return super().train_step((x, y))

    net = keras.Sequential(
        [
            keras.layers.Conv2D(4, 2),
            keras.layers.BatchNormalization(),
            keras.layers.SpatialDropout2D(0.2, seed=3),
            keras.layers.GlobalMaxPooling2D(),
            keras.layers.Dense(3, "softmax"),
        ]
    )
    model = Mixed(net)
    model(floats(2, 5, 5, 2))
    model.compile(
        "nadam",
        keras.losses.CategoricalCrossentropy(label_smoothing=0.1),
        metrics=["accuracy", keras.metrics.F1Score("macro")],
    )
    return model, floats(20, 5, 5, 2), np.eye(3, dtype="float32")[ints(3, 20)]


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
def sharpness_aware_minimisation():
    class Sam(keras.Model):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def call(self, x, training=False):
            return self.net(x, training=training)

        def train_step(self, data):
            x, y = data
            weights = self.trainable_variables
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, weights)
            norm = tf.linalg.global_norm(gradients)
            up = [g * 0.05 / (norm + 1e-12) for g in gradients]
            for w, e in zip(weights, up, strict=True):
                w.assign_add(e)
            with tf.GradientTape() as tape:
                predictions = self(x, training=True)
                loss = self.compute_loss(x, y, predictions)
            gradients = tape.gradient(loss, weights)
            for w, e in zip(weights, up, strict=True):
                w.assign_sub(e)
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss, sample_weight=tf.shape(x)[0])
                else:
                    metric.update_state(y, predictions)
            return {m.name: m.result() for m in self.metrics}

    net = keras.Sequential(
        [
            keras.layers.Dense(8, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.Activation("relu"),
            keras.layers.Dense(3),
        ]
    )
    model = Sam(net)
    model(floats(2, 6))
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=1e-3),
        keras.losses.SparseCategoricalCrossentropy(True),
        metrics=["accuracy"],
    )
    return model, floats(20, 6), ints(3, 20)


@case
def gradient_surgery_of_three_tasks():
    class PcGrad(Own):
        def call(self, x):
            return [head(self.net(x)) for head in self.heads]

        def train_step(self, data):
            x, y = data
            weights = self.net.trainable_variables
            with tf.GradientTape(persistent=True) as tape:
                outputs = self(x)
                losses = [
                    tf.reduce_mean((o[:, 0] - y[:, i]) ** 2)
                    for i, o in enumerate(outputs)
                ]
            flat = [
                tf.concat(
                    [tf.reshape(g, [-1]) for g in tape.gradient(l, weights)], 0
                )
                for l in losses
            ]
            changed = []
            for i, g in enumerate(flat):
                for j, other in enumerate(flat):
                    if i != j:
                        inner = tf.minimum(tf.tensordot(g, other, 1), 0.0)
                        g = g - inner / (tf.reduce_sum(other**2) + 1e-9) * other
                changed.append(g)
            total, gradients = tf.add_n(changed), []
            for w in weights:
                size = int(np.prod(w.shape))
                gradients.append(tf.reshape(total[:size], w.shape))
                total = total[size:]
            heads = [w for h in self.heads for w in h.trainable_variables]
            gradients += tape.gradient(tf.add_n(losses), heads)
            self.optimizer.apply(gradients, weights + heads)
            return {f"loss_{i}": l for i, l in enumerate(losses)}

        def test_step(self, data):
            return {"norm": tf.add_n([tf.norm(o) for o in self(data[0])])}

    model = PcGrad(
        net=dense(8, 4), heads=[keras.layers.Dense(1) for _ in range(3)]
    )
    return built(model, floats(2, 6)), floats(20, 6), floats(20, 3, seed=4)


@case
def gradnorm_of_two_tasks_with_missing_labels():
    class GradNorm(Own):
        def create(self):
            self.balance = self.add_weight(shape=(2,), initializer="ones")
            self.first = self.state((2,), -1.0)

        def compile(self, *args, **options):
            super().compile(*args, **options)
            self.balance_optimizer = keras.optimizers.Adam(0.02)

        def call(self, x):
            return self.net(x)

        def train_step(self, data):
            x, y = data
            shared = self.net.layers[0].layers[0].kernel
            weights = self.net.trainable_variables
            with tf.GradientTape(persistent=True) as outer:
                with tf.GradientTape(persistent=True) as tape:
                    errors = (
                        self.net(x) - tf.where(tf.math.is_nan(y), 0.0, y)
                    ) ** 2
                    known = tf.cast(~tf.math.is_nan(y), "float32")
                    losses = tf.math.divide_no_nan(
                        tf.reduce_sum(errors * known, 0),
                        tf.reduce_sum(known, 0),
                    )
                    one, two = tf.unstack(losses * self.balance)
                    total = one + two
                norms = tf.stack(
                    [
                        tf.norm(tape.gradient(l, shared.value))
                        for l in (one, two)
                    ]
                )
                self.first.assign(tf.where(self.first < 0, losses, self.first))
                rate = losses / (self.first + 1e-6)
                rate = rate / tf.reduce_mean(rate)
                target = tf.stop_gradient(tf.reduce_mean(norms) * rate**0.5)
                apart = tf.reduce_sum(tf.abs(norms - target))
            gradients = tape.gradient(total, weights)
            step = outer.gradient(apart, self.balance.value)
            self.balance_optimizer.apply([step], [self.balance])
            self.optimizer.apply(gradients, weights)
            self.balance.assign(2 * self.balance / tf.reduce_sum(self.balance))
            return {"loss": total, "apart": apart}

        def test_step(self, data):
            return {"mean": tf.reduce_mean(self.net(data[0]))}

    y = floats(20, 2, seed=4)
    y[ints(20, 8, seed=1), ints(2, 8, seed=2)] = np.nan
    net = keras.Sequential([dense(8, 4), dense(4, 2)])
    return built(GradNorm(net=net), floats(2, 6)), floats(20, 6), y


@case(evaluate=False)
def maml_with_a_stateless_inner_loop():
    class Maml(Own):
        def train_step(self, data):
            x, y = data
            weights = self.net.trainable_variables
            with tf.GradientTape() as outer:
                values = [tf.convert_to_tensor(w) for w in weights]

                def task(part):
                    sx, sy = part
                    fast = values
                    for _ in range(2):
                        with tf.GradientTape() as tape:
                            tape.watch(fast)
                            out, _ = self.net.stateless_call(fast, [], sx[:3])
                            loss = tf.reduce_mean((out - sy[:3]) ** 2)
                        slopes = tape.gradient(loss, fast)
                        fast = [
                            f - 0.1 * s
                            for f, s in zip(fast, slopes, strict=True)
                        ]
                    out, _ = self.net.stateless_call(fast, [], sx[3:])
                    return tf.reduce_mean((out - sy[3:]) ** 2)

                losses = tf.vectorized_map(task, (x, y))
                loss = tf.reduce_mean(losses)
            self.optimizer.apply(outer.gradient(loss, weights), weights)
            return {"loss": loss, "worst": tf.reduce_max(losses)}

    net = dense(8, 1)
    net.build((None, 2))
    model = Maml(net=net)
    return (
        built(model, floats(2, 2)),
        floats(20, 6, 2),
        floats(20, 6, 1, seed=1),
    )


@case
def accumulation_by_hand_with_cond():
    class Accumulate(Own):
        def loss_of(self, x, y):
            return tf.reduce_mean(cross(y, self.net(x)))

        def create(self):
            self.count = self.state((), 0, "int32")
            self.net.build((None, 6))
            self.sums = [self.state(w.shape) for w in self.trainable_variables]

        def train_step(self, data):
            x, y = data
            weights = self.trainable_variables
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(cross(y, self(x, training=True)))
            for s, g in zip(
                self.sums, tape.gradient(loss, weights), strict=True
            ):
                s.assign_add(g)
            self.count.assign_add(1)

            def apply():
                self.optimizer.apply(
                    [s / 3.0 for s in map(tf.convert_to_tensor, self.sums)],
                    weights,
                )
                for s in self.sums:
                    s.assign(tf.zeros(s.shape))
                return tf.constant(True)

            applied = tf.cond(
                tf.equal(self.count % 3, 0), apply, lambda: tf.constant(False)
            )
            return {"loss": loss, "applied": applied}

    model = Accumulate(net=dense(8, 3))
    model(floats(2, 6))
    model.compile(keras.optimizers.Adam(1e-2))
    model.optimizer.build(model.trainable_variables)
    return model, floats(20, 6), ints(3, 20)


@case
def mean_teacher_with_unlabelled_rows():
    class Teacher(Own):
        def create(self):
            self.seed = keras.random.SeedGenerator(5)

        def weights_of_step(self):
            return self.net.trainable_variables

        def loss_of(self, x, y):
            known = tf.cast(y >= 0, "float32")
            noisy = x + 0.1 * keras.random.normal(tf.shape(x), seed=self.seed)
            logits = self.net(noisy, training=True)
            target = tf.stop_gradient(
                tf.nn.softmax(self.teacher(x, training=True))
            )
            supervised = tf.reduce_sum(cross(tf.maximum(y, 0), logits) * known)
            supervised /= tf.maximum(tf.reduce_sum(known), 1.0)
            ramp = tf.exp(
                -5
                * (
                    1
                    - tf.minimum(
                        tf.cast(self.optimizer.iterations, "float32") / 4, 1.0
                    )
                )
                ** 2
            )
            # FixMatch: only confident rows count.
            sure = tf.reduce_max(target, 1) > 0.4
            consistency = tf.reduce_sum(
                (tf.nn.softmax(logits) - target) ** 2, 1
            )
            consistency = tf.boolean_mask(consistency, sure)
            mean = tf.math.divide_no_nan(
                tf.reduce_sum(consistency),
                tf.cast(tf.size(consistency), "float32"),
            )
            return {
                "loss": supervised + ramp * mean,
                "sure": tf.reduce_mean(tf.cast(sure, "float32")),
            }

        def after(self, x, y):
            for a, b in zip(
                self.net.weights, self.teacher.weights, strict=True
            ):
                if "seed" not in a.path:
                    b.assign(0.9 * b + 0.1 * a)

    def net():
        return keras.Sequential(
            [
                keras.layers.Dense(8, "relu"),
                keras.layers.Dropout(0.2, seed=8),
                keras.layers.Dense(3),
            ]
        )

    model = Teacher(net=net(), teacher=net())
    model.teacher(floats(2, 6))
    y = ints(3, 20)
    y[ints(20, 9, seed=3)] = -1
    return built(model, floats(2, 6)), floats(20, 6), y


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


@case
def loss_scale_by_hand_that_backs_off():
    class Scaled(Own):
        def create(self):
            self.scale = self.state((), 2.0**15)
            self.good = self.state((), 0, "int32")

        def loss_of(self, x, y):
            return tf.reduce_mean(cross(y, self.net(x)))

        def train_step(self, data):
            x, y = data
            weights = self.trainable_variables
            with tf.GradientTape() as tape:
                half = tf.cast(self.net(x), "float16")
                loss = tf.reduce_mean(cross(y, tf.cast(half, "float32")))
                scaled = tf.cast(loss * self.scale, "float16")
            gradients = [
                tf.cast(g, "float32") / self.scale
                for g in tape.gradient(scaled, weights)
            ]
            finite = tf.reduce_all(
                [tf.reduce_all(tf.math.is_finite(g)) for g in gradients]
            )

            def good():
                self.optimizer.apply(gradients, weights)
                self.good.assign_add(1)
                return tf.constant(1)

            def bad():
                self.scale.assign(self.scale / 2)
                self.good.assign(0)
                return tf.constant(0)

            return {"loss": loss, "ok": tf.cond(finite, good, bad)}

    model = Scaled(net=dense(8, 3))
    built(model, floats(2, 6), optimizer="sgd")
    model.optimizer.build(model.trainable_variables)
    return model, floats(20, 6), ints(3, 20)


@case(rtol=2e-2, atol=2e-3)
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
def uncertainty_weights_of_a_dictionary_of_tasks():
    class Weigh(keras.Model):
        def __init__(self):
            super().__init__()
            self.trunk = dense(8, 6)
            self.age, self.sex, self.boxes = (
                keras.layers.Dense(1),
                keras.layers.Dense(2),
                keras.layers.Dense(4),
            )
            self.log_vars = self.add_weight(shape=(3,), initializer="zeros")

        def call(self, x):
            z = self.trunk(tf.concat([x["a"], tf.cast(x["b"], "float32")], -1))
            return {
                "age": self.age(z),
                "head": {"sex": self.sex(z), "box": self.boxes(z)},
            }

        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            losses = [
                tf.reduce_mean(tf.abs(y["age"] - y_pred["age"][:, 0])),
                tf.reduce_mean(cross(y["head"]["sex"], y_pred["head"]["sex"])),
                tf.reduce_mean(
                    keras.losses.huber(y["head"]["box"], y_pred["head"]["box"])
                ),
            ]
            total = tf.add_n(
                [
                    l * tf.exp(-self.log_vars[i]) + self.log_vars[i]
                    for i, l in enumerate(losses)
                ]
            )
            return total

    model = Weigh()
    x = {"a": floats(20, 3), "b": ints(9, 20, 2)}
    y = {"age": floats(20), "head": {"sex": ints(2, 20), "box": floats(20, 4)}}
    model({"a": floats(2, 3), "b": ints(9, 2, 2)})
    model.compile(keras.optimizers.Adafactor(1e-2))
    return model, x, y


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


@case
def pgd_attack_in_a_while_loop():
    class Pgd(Own):
        def loss_of(self, x, y):
            def body(i, delta):
                with tf.GradientTape() as tape:
                    tape.watch(delta)
                    loss = tf.reduce_sum(
                        cross(y, self.net(x + delta, training=False))
                    )
                step = 0.05 * tf.sign(tape.gradient(loss, delta))
                return i + 1, tf.clip_by_value(delta + step, -0.1, 0.1)

            _, delta = tf.while_loop(
                lambda i, d: i < 3,
                body,
                (0, tf.zeros_like(x)),
                maximum_iterations=4,
            )
            attacked = tf.stop_gradient(x + delta)
            clean, dirty = (
                self.net(x, training=True),
                self.net(attacked, training=True),
            )
            return {
                "loss": 0.5 * tf.reduce_mean(cross(y, clean) + cross(y, dirty)),
                "robust": tf.reduce_mean(
                    tf.cast(
                        tf.argmax(dirty, 1) == tf.cast(y, "int64"), "float32"
                    )
                ),
            }

    net = keras.Sequential(
        [
            keras.layers.Dense(8, "tanh"),
            keras.layers.GroupNormalization(2),
            keras.layers.Dense(3),
        ]
    )
    return built(Pgd(net=net), floats(2, 6)), floats(20, 6), ints(3, 20)


@case
def virtual_adversarial_training():
    class Vat(Own):
        def create(self):
            self.seed = keras.random.SeedGenerator(3)

        def loss_of(self, x, y):
            logits = self.net(x)
            p = tf.stop_gradient(tf.nn.softmax(logits))

            def kl(q):
                return tf.reduce_mean(
                    tf.nn.softmax_cross_entropy_with_logits(p, q)
                    - tf.nn.softmax_cross_entropy_with_logits(
                        p, tf.math.log(p + 1e-9)
                    )
                )

            d = tf.math.l2_normalize(
                keras.random.normal(tf.shape(x), seed=self.seed), 1
            )
            with tf.GradientTape() as tape:
                tape.watch(d)
                apart = kl(self.net(x + 1e-1 * d))
            d = tf.stop_gradient(
                tf.math.l2_normalize(tape.gradient(apart, d), 1)
            )
            entropy = -tf.reduce_mean(
                tf.reduce_sum(p * tf.math.log(p + 1e-9), 1)
            )
            return (
                tf.reduce_mean(cross(y, logits))
                + kl(self.net(x + 0.5 * d))
                + entropy
            )

    return built(Vat(net=dense(8, 3)), floats(2, 6)), floats(20, 6), ints(3, 20)


@tf.custom_gradient
def reverse(x):
    return tf.identity(x), lambda upstream: -0.3 * upstream


@case
def domain_adversarial_with_gradient_reversal():
    class Dann(Own):
        def loss_of(self, x, y):
            z = self.net(x)
            source = y[:, 1] == 0
            labelled = tf.boolean_mask(z, source)
            labels = tf.boolean_mask(y[:, 0], source)
            task = cross(labels, self.head(labelled))
            domain = self.judge(reverse(z))
            deep = tf.nn.sigmoid_cross_entropy_with_logits(
                tf.cast(y[:, 1:], "float32"), domain
            )
            # CORAL
            a, b = labelled, tf.boolean_mask(z, ~source)

            def cov(v):
                n = tf.maximum(tf.cast(tf.shape(v)[0], "float32") - 1, 1.0)
                v = v - tf.math.divide_no_nan(
                    tf.reduce_sum(v, 0), tf.cast(tf.shape(v)[0], "float32")
                )
                return tf.matmul(v, v, transpose_a=True) / n

            coral = tf.reduce_sum((cov(a) - cov(b)) ** 2)
            mean = tf.math.divide_no_nan(
                tf.reduce_sum(task), tf.cast(tf.size(task), "float32")
            )
            return {"loss": mean + tf.reduce_mean(deep) + coral, "coral": coral}

        def call(self, x):
            z = self.net(x)
            return self.head(z), self.judge(z)

    y = np.stack([ints(3, 20), ints(2, 20, seed=1)], 1)
    model = Dann(net=dense(8, 4), head=dense(5, 3), judge=dense(5, 1))
    return built(model, floats(2, 6)), floats(20, 6), y


@case
def manifold_mixup_at_a_drawn_layer():
    class Manifold(Own):
        def create(self):
            self.seed = keras.random.SeedGenerator(4)

        def loss_of(self, x, y):
            where = keras.random.randint((), 0, 3, seed=self.seed)
            lam = keras.random.uniform((), seed=self.seed)
            hot = tf.one_hot(y, 3)

            def mix(v):
                return lam * v + (1 - lam) * tf.roll(v, 1, 0)

            def through(level):
                def branch():
                    h = x
                    for i, layer in enumerate(self.net.layers):
                        h = mix(h) if i == level else h
                        h = layer(h)
                    return h

                return branch

            logits = tf.switch_case(where, [through(i) for i in range(3)])
            return tf.reduce_mean(
                tf.nn.softmax_cross_entropy_with_logits(mix(hot), logits)
            )

    net = keras.Sequential(
        [
            keras.layers.Dense(8, "relu"),
            keras.layers.Dense(6, "tanh"),
            keras.layers.Dense(3),
        ]
    )
    return built(Manifold(net=net), floats(2, 6)), floats(20, 6), ints(3, 20)


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
def distillation_with_attention_and_a_frozen_teacher():
    class Distil(keras.Model):
        def __init__(self, student, teacher):
            super().__init__()
            self.student, self.teacher = student, teacher
            teacher.trainable = False

        def call(self, x, training=False):
            return self.student(x, training=training)[0]

        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, **_
        ):
            t, tf_map = self.teacher(x, training=False)
            s, s_map = self.student(x, training=True)
            hard = super().compute_loss(x, y, s, sample_weight)
            soft = (
                keras.losses.KLDivergence()(
                    ops.softmax(t / 3), ops.softmax(s / 3)
                )
                * 9
            )

            def attention(m):
                a = ops.reshape(ops.mean(m**2, axis=-1), (-1, 9))
                return a / ops.sqrt(
                    ops.sum(a**2, axis=-1, keepdims=True) + 1e-6
                )

            at = ops.mean((attention(tf_map) - attention(s_map)) ** 2)

            # Relations between examples
            def relation(z):
                z = ops.normalize(z, axis=-1)
                return ops.matmul(z, ops.transpose(z))

            return (
                hard
                + soft
                + 10 * at
                + ops.mean((relation(t) - relation(s)) ** 2)
            )

    def net(width):
        x = keras.Input((4, 4, 2))
        h = keras.layers.Conv2D(width, 2, use_bias=False)(x)
        h = keras.layers.BatchNormalization()(h)
        h = m = keras.layers.ReLU()(h)
        return keras.Model(
            x, [keras.layers.Dense(3)(keras.layers.Flatten()(h)), m]
        )

    model = Distil(net(3), net(6))
    model(floats(2, 4, 4, 2))
    model.compile(
        "adam",
        keras.losses.SparseCategoricalCrossentropy(True),
        weighted_metrics=["accuracy"],
    )
    return model, floats(20, 4, 4, 2), ints(3, 20)


@case(
    fit={"sample_weight": np.random.default_rng(3).random(20).astype("float32")}
)
def distillation_with_sample_weights():
    return distillation_with_attention_and_a_frozen_teacher()


@case(predict=False, evaluate=False)
def ppo_with_shuffled_minibatches_in_the_step():
    class Ppo(Own):
        def train_step(self, data):
            (states, actions, old, returns), _ = data, None
            values = self.critic(states)[:, 0]
            advantages = returns - values
            advantages = (advantages - tf.reduce_mean(advantages)) / (
                tf.math.reduce_std(advantages) + 1e-6
            )
            count = tf.shape(states)[0]
            weights = (
                self.net.trainable_variables + self.critic.trainable_variables
            )
            for epoch in range(2):
                order = tf.argsort(
                    tf.random.stateless_uniform([count], (epoch, 5))
                )
                for part in (order[: count // 2], order[count // 2 :]):
                    s, a, o, r, adv = (
                        tf.gather(v, part)
                        for v in (states, actions, old, returns, advantages)
                    )
                    with tf.GradientTape() as tape:
                        log = tf.nn.log_softmax(self.net(s))
                        new = tf.gather(log, a, batch_dims=1)
                        ratio = tf.exp(new - o)
                        clipped = tf.clip_by_value(ratio, 0.8, 1.2)
                        policy = -tf.reduce_mean(
                            tf.minimum(ratio * adv, clipped * adv)
                        )
                        entropy = -tf.reduce_mean(
                            tf.reduce_sum(tf.exp(log) * log, 1)
                        )
                        value = tf.reduce_mean((self.critic(s)[:, 0] - r) ** 2)
                        loss = policy + 0.5 * value - 0.01 * entropy
                    gradients, norm = tf.clip_by_global_norm(
                        tape.gradient(loss, weights), 0.5
                    )
                    kl = tf.reduce_mean(o - new)
                    gradients = [
                        g * tf.cast(kl < 1.5, "float32") for g in gradients
                    ]
                    self.optimizer.apply(gradients, weights)
            return {"loss": loss, "kl": kl, "norm": norm}

    model = Ppo(net=dense(8, 3), critic=dense(8, 1))
    model.critic(floats(2, 4))
    built(model, floats(2, 4))
    data = (floats(20, 4), ints(3, 20), -np.abs(floats(20)), floats(20, seed=2))
    return model, tf.data.Dataset.from_tensor_slices(data).batch(13), None


@case(predict=False, evaluate=False)
def double_dqn_with_priorities_and_a_target():
    class Dqn(Own):
        def create(self):
            self.priorities = self.state((20,), 1.0)
            self.beta = self.state((), 0.4)

        def weights_of_step(self):
            return self.net.trainable_variables

        def train_step(self, data):
            s, a, r, s2, done, index = data
            best = tf.argmax(self.net(s2), 1)
            future = tf.gather(self.target(s2), best, batch_dims=1)
            goal = r + 0.9 * (1 - tf.cast(done, "float32")) * future
            p = tf.gather(self.priorities, index)
            weight = (p / tf.reduce_sum(self.priorities)) ** -self.beta
            weight /= tf.reduce_max(weight)
            errors = []

            def loss_function():
                q = tf.gather(self.net(s), a, batch_dims=1)
                errors.append(goal - q)
                return tf.reduce_mean(
                    weight * keras.losses.huber(goal[:, None], q[:, None])
                )

            loss = self.descend(loss_function)
            self.priorities.assign(
                tf.tensor_scatter_nd_update(
                    self.priorities, index[:, None], tf.abs(errors[0]) + 0.01
                )
            )
            self.beta.assign(tf.minimum(1.0, self.beta + 0.1))

            def sync():
                for w, t in zip(
                    self.net.weights, self.target.weights, strict=True
                ):
                    t.assign(w)
                return True

            synced = tf.cond(
                self.optimizer.iterations % 3 == 0, sync, lambda: False
            )
            return {"loss": loss, "synced": synced, "q": tf.reduce_max(goal)}

    model = Dqn(net=dense(8, 3), target=dense(8, 3))
    model.target(floats(2, 4))
    built(model, floats(2, 4))
    data = (
        floats(20, 4),
        ints(3, 20),
        floats(20),
        floats(20, 4, seed=1),
        ints(2, 20).astype(bool),
        np.arange(20),
    )
    return model, tf.data.Dataset.from_tensor_slices(data).batch(7), None


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


@case(predict=False, evaluate=False)
def soft_actor_critic_with_three_optimizers():
    class Sac(Own):
        def create(self):
            self.seed = keras.random.SeedGenerator(2)
            self.log_alpha = self.add_weight(shape=(), initializer="zeros")

        def compile(self, *args, **options):
            super().compile(*args, **options)
            self.a_optimizer = keras.optimizers.Adam(1e-2)
            self.q_optimizer = keras.optimizers.Adam(1e-2, global_clipnorm=1.0)

        def sample(self, s):
            mean, log = tf.split(self.net(s), 2, -1)
            log = tf.clip_by_value(log, -3, 1)
            u = mean + tf.exp(log) * keras.random.normal(
                tf.shape(mean), seed=self.seed
            )
            a = tf.tanh(u)
            p = (
                -0.5 * ((u - mean) / tf.exp(log)) ** 2
                - log
                - tf.math.log(1 - a**2 + 1e-4)
            )
            return a, tf.reduce_sum(p, -1, keepdims=True)

        def train_step(self, data):
            s, a, r, s2 = data
            alpha = tf.exp(self.log_alpha)
            a2, p2 = self.sample(s2)
            both = tf.concat([s2, a2], -1)
            goal = r[:, None] + 0.9 * (
                tf.minimum(self.t1(both), self.t2(both)) - alpha * p2
            )
            pair = tf.concat([s, a], -1)
            q = self.descend(
                lambda: tf.reduce_mean(
                    (self.q1(pair) - goal) ** 2 + (self.q2(pair) - goal) ** 2
                ),
                self.q_optimizer,
                self.q1.trainable_variables + self.q2.trainable_variables,
            )
            kept = []

            def actor():
                new, p = self.sample(s)
                kept.append(p)
                pair = tf.concat([s, new], -1)
                return tf.reduce_mean(
                    alpha * p - tf.minimum(self.q1(pair), self.q2(pair))
                )

            pi = self.descend(
                actor, self.optimizer, self.net.trainable_variables
            )
            al = self.descend(
                lambda: (
                    -tf.reduce_mean(
                        tf.exp(self.log_alpha) * tf.stop_gradient(kept[0] - 2.0)
                    )
                ),
                self.a_optimizer,
                [self.log_alpha],
            )
            for a_, b in ((self.q1, self.t1), (self.q2, self.t2)):
                for v, w in zip(a_.weights, b.weights, strict=True):
                    w.assign(0.9 * w + 0.1 * v)
            return {"q": q, "pi": pi, "alpha": al}

    model = Sac(
        net=dense(8, 4),
        q1=dense(8, 1),
        q2=dense(8, 1),
        t1=dense(8, 1),
        t2=dense(8, 1),
    )
    for q in (model.q1, model.q2, model.t1, model.t2):
        q(floats(2, 6))
    built(model, floats(2, 4))
    data = (
        floats(20, 4),
        np.tanh(floats(20, 2)),
        floats(20),
        floats(20, 4, seed=1),
    )
    return model, tf.data.Dataset.from_tensor_slices(data).batch(13), None


@case
def reinforce_with_a_moving_baseline_and_gumbel():
    class Reinforce(Own):
        def create(self):
            self.baseline = self.state(())
            self.seed = keras.random.SeedGenerator(2)

        def loss_of(self, x, y):
            logits = self.net(x)
            action = keras.random.categorical(
                tf.stop_gradient(logits), 1, seed=self.seed
            )[:, 0]
            reward = tf.cast(tf.cast(action, "int64") == y, "float32")
            log = -tf.nn.sparse_softmax_cross_entropy_with_logits(
                action, logits
            )
            loss = -tf.reduce_mean(log * (reward - self.baseline))
            self.baseline.assign(
                0.8 * self.baseline + 0.2 * tf.reduce_mean(reward)
            )
            gumbel = -tf.math.log(
                -tf.math.log(
                    keras.random.uniform(
                        tf.shape(logits), 1e-3, 0.999, seed=self.seed
                    )
                )
            )
            soft = tf.nn.softmax((logits + gumbel) / 0.7)
            return loss + 0.1 * tf.reduce_mean(
                cross(y, tf.math.log(soft + 1e-6))
            )

    return (
        built(Reinforce(net=dense(8, 3)), floats(2, 6)),
        floats(20, 6),
        ints(3, 20),
    )


@case
def private_gradients_clipped_per_example():
    class Private(Own):
        def train_step(self, data):
            x, y = data
            weights = self.trainable_variables

            def one(pair):
                xi, yi = pair
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(cross(yi[None], self.net(xi[None])))
                gradients = tape.gradient(loss, weights)
                norm = tf.linalg.global_norm(gradients)
                factor = tf.minimum(1.0, 0.5 / (norm + 1e-6))
                return [g * factor for g in gradients], norm

            clipped, norms = tf.vectorized_map(one, (x, y))
            step = tf.cast(self.optimizer.iterations, "int32")
            count = tf.cast(tf.shape(x)[0], "float32")
            gradients = [
                (
                    tf.reduce_sum(g, 0)
                    + 0.1
                    * tf.random.stateless_normal(w.shape, tf.stack([step, i]))
                )
                / count
                for i, (g, w) in enumerate(zip(clipped, weights, strict=True))
            ]
            self.optimizer.apply(gradients, weights)
            return {"norm": tf.reduce_mean(norms), "max": tf.reduce_max(norms)}

        def test_step(self, data):
            return {"loss": tf.reduce_mean(cross(data[1], self.net(data[0])))}

    return (
        built(Private(net=dense(8, 3)), floats(2, 6)),
        floats(20, 6),
        ints(3, 20),
    )


@case
def hutchinson_curvature_by_hessian_vector_products():
    class AdaHessian(Own):
        def create(self):
            self.net.build((None, 6))
            self.h = [self.state(w.shape) for w in self.trainable_variables]
            self.seed = keras.random.SeedGenerator(2)

        def train_step(self, data):
            x, y = data
            weights = self.trainable_variables
            with tf.GradientTape() as outer:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((self.net(x) - y) ** 2)
                gradients = tape.gradient(loss, weights)
                draws = [
                    tf.sign(
                        keras.random.uniform(w.shape, -1, 1, seed=self.seed)
                    )
                    for w in weights
                ]
                inner = tf.add_n(
                    [
                        tf.reduce_sum(g * d)
                        for g, d in zip(gradients, draws, strict=True)
                    ]
                )
            products = outer.gradient(inner, weights)
            updates = []
            for h, p, d, g in zip(
                self.h, products, draws, gradients, strict=True
            ):
                h.assign(0.9 * h + 0.1 * (p * d) ** 2)
                updates.append(g / (tf.sqrt(h) + 0.1))
            self.optimizer.apply(updates, weights)
            return {
                "loss": loss,
                "trace": tf.add_n(
                    [
                        tf.reduce_sum(p * d)
                        for p, d in zip(products, draws, strict=True)
                    ]
                ),
            }

        def loss_of(self, x, y):
            return tf.reduce_mean((self.net(x) - y) ** 2)

    model = AdaHessian(net=dense(8, 2))
    model(floats(2, 6))
    model.compile("sgd")
    return model, floats(20, 6), floats(20, 2)


@case
def kfac_preconditioner_of_one_layer():
    class Kfac(Own):
        def create(self):
            self.a = self.state((6, 6))
            self.a.assign(tf.eye(6))
            self.g = self.state((3, 3))
            self.g.assign(tf.eye(3))

        def train_step(self, data):
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                h = self.net(x)
                logits = self.head(h)
                losses = cross(y, logits)
                loss = tf.reduce_mean(losses)
            count = tf.cast(tf.shape(x)[0], "float32")
            d = tape.gradient(losses, logits)
            self.a.assign(
                0.9 * self.a + 0.1 * tf.matmul(h, h, transpose_a=True) / count
            )
            self.g.assign(
                0.9 * self.g + 0.1 * tf.matmul(d, d, transpose_a=True) / count
            )
            kernel = self.head.kernel
            gradient = tape.gradient(loss, kernel.value)
            chol = tf.linalg.cholesky(self.a + 0.1 * tf.eye(6))
            left = tf.linalg.cholesky_solve(chol, gradient)
            right = tf.transpose(
                tf.linalg.solve(self.g + 0.1 * tf.eye(3), tf.transpose(left))
            )
            rest = self.net.trainable_variables
            self.optimizer.apply(
                [right, *tape.gradient(loss, rest)], [kernel, *rest]
            )
            return {
                "loss": loss,
                "condition": tf.reduce_max(tf.linalg.eigvalsh(self.a)),
            }

        def call(self, x):
            return self.head(self.net(x))

        def loss_of(self, x, y):
            return tf.reduce_mean(cross(y, self(x)))

    return (
        built(
            Kfac(net=dense(8, 6), head=keras.layers.Dense(3, use_bias=False)),
            floats(2, 6),
            optimizer="sgd",
        ),
        floats(20, 6),
        ints(3, 20),
    )


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


from .base import CASES  # noqa: E402

CASES["maml_with_a_stateless_inner_loop"][1]["predict"] = False
