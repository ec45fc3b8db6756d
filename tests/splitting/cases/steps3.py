"""Steps with state, effects and data of other kinds."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.splitting.cases.layers import Own
from tests.splitting.cases.steps2 import by_default, mse, with_variable
from tests.splitting.cases.table import (
    EXAMPLES,
    WIDTH,
    apply,
    by_design,
    classes,
    compiled,
    differs,
    generator,
    images,
    proven,
    stepped,
    tokens,
    with_layers,
)


def counting(times):
    """A step that counts in a loop."""

    def step(model, x, y):
        def once(i):
            model.kept.assign_add(1.0)
            return (i + 1,)

        tf.while_loop(lambda i: i < times(x), once, (0,))  # here
        return by_default(model, x, y)

    return with_variable(step)


@differs()
def counted_by_loop():
    return counting(lambda x: tf.shape(x)[0])


@proven()
def counted_by_short_loop():
    return counting(lambda x: 3)


def counting_if(chosen, otherwise=0.0):
    """A step that counts in one branch, and perhaps in the other."""

    def add(model, number):
        if number:
            model.kept.assign_add(number)
        return tf.constant(0.0)

    def step(model, x, y):
        tf.cond(
            chosen(model, x),  # here
            lambda: add(model, 1.0),
            lambda: add(model, otherwise),
        )
        return by_default(model, x, y)

    return with_variable(step)


@differs()
def counted_if_positive():
    return counting_if(lambda model, x: tf.reduce_mean(x) > 0)  # here


@differs()
def counted_one_way_or_other():
    return counting_if(lambda model, x: tf.reduce_mean(x) > 0, -1.0)  # here


@proven()
def counted_by_parity():
    return counting_if(lambda model, x: model.optimizer.iterations % 2 == 0)


def embedded(change):
    """A step that changes an embedding's gradient, and says nothing."""

    class Words(keras.Model):
        def train_step(self, data):
            x, y = data
            weights = self.trainable_variables
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(y * self(x, training=True))
            first, *rest = tape.gradient(loss, weights)
            self.optimizer.apply([change(first), *rest], weights)
            return {"one": tf.ones(())}

    entrance = keras.Input((8,), dtype="int32")
    h = keras.layers.Embedding(9, 4)(entrance)
    h = keras.layers.Flatten()(h)
    return compiled(Words(entrance, keras.layers.Dense(1)(h)))


@differs(tokens)
def indices_rolled():
    return embedded(
        lambda g: tf.IndexedSlices(
            g.values,
            tf.roll(g.indices, 8, 0),  # here
            g.dense_shape,
        )
    )


@proven(tokens)
def indices_as_they_are():
    return embedded(lambda g: g)


@differs(tokens)
def indices_reordered():
    def change(g):
        at = tf.transpose(tf.reshape(g.indices, [-1, 8]))
        return tf.IndexedSlices(g.values, tf.reshape(at, [-1]), g.dense_shape)

    return embedded(change)


@differs()
def accumulated_by_hand():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        weights = model.trainable_variables
        grads = tape.gradient(loss, weights)
        for kept, g in zip(model.sums, grads, strict=True):
            kept.assign_add(g)
        scale = tf.cast(model.optimizer.iterations % 2, tf.float32)
        model.optimizer.apply([scale * kept for kept in model.sums], weights)
        for kept in model.sums:
            kept.assign(kept * (1 - scale))
        return {"loss": loss}

    model = stepped(step)
    model.sums = [
        model.add_weight(shape=w.shape, initializer="zeros", trainable=False)
        for w in model.trainable_variables
    ]
    return model


@proven()
def momentum_by_hand():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        weights = model.trainable_variables
        moved = []
        grads = tape.gradient(loss, weights)
        for kept, g in zip(model.sums, grads, strict=True):
            kept.assign(0.9 * kept + g)
            moved.append(kept + 0.0)
        model.optimizer.apply(moved, weights)
        return {"loss": loss}

    model = stepped(step)
    model.sums = [
        model.add_weight(shape=w.shape, initializer="zeros", trainable=False)
        for w in model.trainable_variables
    ]
    return model


@differs()
def squares_by_hand():
    """RMSprop: the mean square of gradients is kept, and divides them."""

    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
        w = model.trainable_variables[-1]
        (g,) = tape.gradient(loss, [w])
        model.kept.assign(0.9 * model.kept + 0.1 * tf.square(g))  # here
        model.optimizer.apply([g / tf.sqrt(model.kept + 1e-6)], [w])  # here
        return {"loss": loss}

    return with_variable(step, (1,), 1.0)


@differs()
def queue_of_keys():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            p = model(x, training=True)
            loss = mse(y, p) + tf.reduce_mean(
                tf.nn.sigmoid(p @ tf.transpose(model.kept))
            )
        keys = tf.stop_gradient(p)[:4]  # here
        model.kept.assign(tf.concat([model.kept[4:], keys], 0))
        return apply(model, tape, loss)

    return with_variable(step, (12, 1), 0.5)


@differs()
def centre_of_outputs():
    """DINO: the teacher's outputs are centred by a moving mean."""

    def step(model, x, y):
        with tf.GradientTape() as tape:
            p = model(x, training=True)
            soft = tf.nn.softmax(tf.stop_gradient(p) - model.kept)  # here
            loss = -tf.reduce_mean(soft * tf.nn.log_softmax(p))
        mean = tf.reduce_mean(p, 0)
        model.kept.assign(0.9 * model.kept + 0.1 * mean)
        return apply(model, tape, loss)

    model = with_variable(step, (1,))
    return model


@differs(classes)
def centres_of_classes():
    def step(model, x, y):
        y = tf.reshape(y, [-1])
        with tf.GradientTape() as tape:
            h = model(x, training=True)
            off = h - tf.gather(model.kept, y)  # here
            loss = tf.reduce_mean(tf.square(off))
        n = tf.math.unsorted_segment_sum(tf.ones_like(off), y, 3)
        moved = tf.math.unsorted_segment_sum(off, y, 3) / (1 + n)  # here
        model.kept.assign_add(0.5 * moved)
        return apply(model, tape, loss)

    return with_variable(step, (3, 1), 0.1)


@differs(classes)
def groups_by_exponents():
    def step(model, x, y):
        y = tf.reshape(y, [-1])
        with tf.GradientTape() as tape:
            e = tf.square(model(x, training=True)[:, 0] - 1.0)
            n = tf.cast(tf.shape(x)[0], tf.float32)
            each = tf.math.unsorted_segment_sum(e, y, 3) / n
            q = tf.nn.softmax(model.kept + 0.1 * tf.stop_gradient(each))  # here
            loss = tf.reduce_sum(q * each)
        model.kept.assign(tf.math.log(q))
        return apply(model, tape, loss)

    return with_variable(step, (3,))


@proven()
def uncertain_weights():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            p = model(x, training=True)
            a, b = mse(y, p), tf.reduce_mean(tf.abs(y - p))
            s = model.scales
            loss = a * tf.exp(-s[0]) + b * tf.exp(-s[1]) + tf.reduce_sum(s)
        return apply(model, tape, loss)

    model = stepped(step)
    model.scales = model.add_weight(shape=(2,), initializer="zeros")
    return model


@differs()
def balanced_by_gradient_norms():
    def step(model, x, y):
        with tf.GradientTape(persistent=True) as tape:
            p = model(x, training=True)
            a, b = mse(y, p), tf.reduce_mean(tf.abs(y - p))
        weights = model.trainable_variables
        g, h = tape.gradient(a, weights), tape.gradient(b, weights)
        ratio = tf.norm(g[0]) / tf.norm(h[0])  # here
        grads = [u + ratio * v for u, v in zip(g, h, strict=True)]
        model.optimizer.apply(grads, weights)
        return {"loss": a}

    return stepped(step)


def adversarial(change):
    """A step on examples that were moved along their gradients."""

    def step(model, x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = mse(y, model(x, training=True))
        moved = x + change(tape.gradient(loss, x))
        with tf.GradientTape() as tape:
            loss = mse(y, model(moved, training=True))
        return apply(model, tape, loss)

    return stepped(step)


@proven()
def moved_by_sign():
    return adversarial(lambda g: 0.1 * tf.sign(g))


@proven()
def moved_by_direction():
    return adversarial(lambda g: g / tf.reduce_max(tf.abs(g), 1, keepdims=True))


@differs()
def moved_by_gradient():
    return adversarial(lambda g: 5.0 * g)


@differs()
def moved_by_norm_of_all():
    return adversarial(lambda g: g / tf.norm(g))  # here


@differs()
def moved_by_norm_and_a_bit():
    return adversarial(
        lambda g: g / (tf.norm(g, axis=1, keepdims=True) + 0.1)  # here
    )


@differs()
def normalized_advantages():
    def step(model, x, y):
        a = y - tf.reduce_mean(y)  # here
        a = a / (tf.math.reduce_std(y) + 1e-6)  # here
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(a * model(x, training=True))
        return apply(model, tape, loss)

    return stepped(step)


@differs()
def stopped_early():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            p = model(x, training=True)
            loss = mse(y, p)
            far = tf.reduce_mean(tf.abs(p)) > 0.5  # here
            loss = tf.where(far, 0.0 * loss, loss)  # here
        return apply(model, tape, loss)

    return stepped(step)


@proven()
def differences_in_time():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            v = model(x, training=True)
            later = tf.stop_gradient(x @ model.kept)
            loss = tf.reduce_mean(keras.losses.huber(y + 0.9 * later, v))
        return apply(model, tape, loss)

    return with_variable(step, (WIDTH, 1), 0.1)


@differs()
def printed():
    def step(model, x, y):
        tf.print(tf.shape(x), output_stream="file:///dev/null")  # here
        return by_default(model, x, y)

    return stepped(step)


@differs()
def written_into_a_table():
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)

    def step(model, x, y):
        one = tf.ones([1], tf.int64)
        table.insert(one, table.lookup(one) + 1)  # here
        steps = tf.cast(table.lookup(one)[0], tf.float32)  # here
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True)) / steps  # here
        return apply(model, tape, loss)

    return stepped(step)


@proven()
def constant_of_numpy():
    make = np.random.default_rng(0)

    def step(model, x, y):
        noise = make.normal(size=(1, WIDTH)).astype("float32")
        with tf.GradientTape() as tape:
            loss = mse(y, model(x + 0 * noise, training=True))
        return apply(model, tape, loss)

    return stepped(step)


@by_design()
def noise_for_every_example():
    def step(model, x, y):
        noise = tf.random.normal(tf.shape(x))
        with tf.GradientTape() as tape:
            loss = mse(y, model(x + 0.1 * noise, training=True))
        return apply(model, tape, loss)

    return stepped(step)


@differs()
def shuffled_targets():
    return stepped(
        lambda model, x, y: by_default(
            model,
            x,
            tf.random.shuffle(y, seed=1),  # here
        )
    )


@proven()
def loss_by_method():
    model = stepped(by_default)

    class Own(keras.Model):
        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            return mse(y, y_pred) + 0.1 * tf.reduce_mean(tf.abs(x))

    return compiled(Own(model.inputs, model.outputs))


@proven()
def loss_of_examples_by_method():
    model = stepped(by_default)

    class Own(keras.Model):
        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            return tf.reduce_sum(tf.square(y - y_pred), -1)

    return compiled(Own(model.inputs, model.outputs))


def long_texts():
    make = generator()
    x = make.integers(1, 9, (EXAMPLES, 7)).astype("int32")
    x[:, 4:] *= make.integers(0, 2, (EXAMPLES, 3)).astype("int32")
    return x, make.normal(size=(EXAMPLES, 1)).astype("float32")


def of_any_length(*layers):
    return compiled(
        keras.Sequential(
            [
                keras.Input((None,), dtype="int32"),
                keras.layers.Embedding(9, 4, mask_zero=True),
                *layers,
                keras.layers.Dense(1),
            ]
        )
    )


@proven(long_texts)
def gru():
    return of_any_length(keras.layers.GRU(3))


@proven(long_texts)
def lstm_both_ways():
    return of_any_length(keras.layers.Bidirectional(keras.layers.LSTM(3)))


@proven(long_texts)
def dense_at_all_times():
    return of_any_length(
        keras.layers.TimeDistributed(keras.layers.Dense(3)),
        keras.layers.GlobalAveragePooling1D(),
    )


@proven(long_texts)
def attention_to_texts():
    class Attends(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.heads = keras.layers.MultiHeadAttention(2, 3)

        def call(self, x):
            return tf.reduce_mean(self.heads(x, x), 1)

        def compute_output_spec(self, x):
            return keras.KerasTensor((x.shape[0], 4), x.dtype)

    return of_any_length(Attends())


@proven(images)
def convolutions():
    return with_layers(
        keras.layers.Conv2D(3, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.SeparableConv2D(4, 2),
        keras.layers.GroupNormalization(2),
        keras.layers.Flatten(),
        shape=(6, 6, 2),
    )


@differs(images)
def deviation_of_minibatch():
    """The extra channel of a critic in progressive growing."""

    def call(layer, x):
        s = tf.reduce_mean(tf.math.reduce_std(x, 0))  # here
        return tf.concat([x, tf.zeros_like(x) + s], -1)  # here

    return with_layers(
        keras.layers.Conv2D(2, 3),
        keras.layers.Lambda(lambda x: call(None, x), output_shape=(4, 4, 4)),
        keras.layers.Flatten(),
        shape=(6, 6, 2),
    )


@proven(images)
def standardized_images():
    def call(x):
        return tf.image.per_image_standardization(x)

    return with_layers(
        keras.layers.Lambda(call, output_shape=(6, 6, 2)),
        keras.layers.Flatten(),
        shape=(6, 6, 2),
    )


@proven(images)
def patches():
    """A vision transformer's patches, mixed within an image."""

    def call(x):
        p = tf.image.extract_patches(
            x, [1, 2, 2, 1], [1, 2, 2, 1], [1, 1, 1, 1], "VALID"
        )
        return tf.reshape(p, [-1, 9, 8])

    return with_layers(
        keras.layers.Lambda(call, output_shape=(9, 8)),
        keras.layers.Dense(4),
        keras.layers.LayerNormalization(),
        keras.layers.GlobalAveragePooling1D(),
        shape=(6, 6, 2),
    )


@proven()
def constrained():
    return with_layers(
        keras.layers.Dense(4, kernel_constraint="max_norm"),
        keras.layers.UnitNormalization(),
    )


@proven()
def spectral():
    return with_layers(
        keras.layers.SpectralNormalization(keras.layers.Dense(4))
    )


@by_design()
def dropped_out():
    return with_layers(keras.layers.Dropout(0.5, seed=1))


@proven()
def mixture_of_experts():
    def call(layer, x):
        gates = tf.nn.softmax(x[:, :3])
        at = tf.argmax(gates, -1)
        each = tf.stack([x, tf.tanh(x), tf.square(x)], 1)
        return tf.gather(each, at, batch_dims=1) * tf.reduce_max(
            gates, -1, keepdims=True
        )

    return with_layers(Own(call))


@differs()
def balanced_experts():
    def call(layer, x):
        gates = tf.nn.softmax(x)
        used = tf.one_hot(tf.argmax(gates, -1), WIDTH)
        layer.add_loss(
            tf.reduce_sum(
                tf.reduce_mean(gates, 0) * tf.reduce_mean(used, 0)  # here
            )
        )
        return gates

    return with_layers(keras.layers.Dense(WIDTH), Own(call))


@differs()
def limited_experts():
    """Each expert takes the first two examples that want it."""

    def call(layer, x):
        used = tf.one_hot(tf.argmax(x, -1), WIDTH)
        before = tf.cumsum(used)  # here
        return x * tf.where(before > 2, 0.0, used)

    return with_layers(Own(call))


@proven()
def low_rank():
    a = keras.layers.Dense(2, use_bias=False)
    b = keras.layers.Dense(WIDTH, kernel_initializer="zeros")
    frozen = keras.layers.Dense(WIDTH)
    frozen.trainable = False
    entrance = keras.Input((WIDTH,))
    h = frozen(entrance) + b(a(entrance))
    return compiled(keras.Model(entrance, keras.layers.Dense(1)(h)))
