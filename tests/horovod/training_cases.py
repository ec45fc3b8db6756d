"""Cases of two processes: weights equal to those of one process."""

import keras
import numpy as np
import tensorflow as tf
from common import (
    GLOBAL_BATCH,
    case,
    compared,
    data,
    gradients,
    loss,
    mine,
    model,
    outcome,
    ranks_apart,
    sgd,
    train,
    trained_alone,
    weights_apart,
)

import keras_towers.horovod as hvd


@case
def momentum():
    return compared(sgd)


@case
def clipped_embedding():
    return compared(
        lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.05), "words"
    )


@case
def embedding_as_dense():
    return compared(sgd, "words", sparse_as_dense=True)


@case
def keras_accumulation():
    return compared(lambda: sgd(gradient_accumulation_steps=2))


@case
def decay_and_averages():
    return compared(
        lambda: keras.optimizers.AdamW(
            0.01, use_ema=True, ema_overwrite_frequency=3, clipvalue=0.02
        )
    )


@case
def passes_averaged():
    return compared(
        sgd,
        reference=lambda: sgd(gradient_accumulation_steps=2),
        backward_passes_per_step=2,
        average_aggregated_gradients=True,
    )


@case
def passes_summed():
    return compared(
        lambda: keras.optimizers.SGD(0.05),
        "words",
        reference=lambda: keras.optimizers.SGD(
            0.1, gradient_accumulation_steps=2
        ),
        backward_passes_per_step=2,
    )


@case
def passes_and_loss_scale():
    return compared(
        lambda: keras.optimizers.LossScaleOptimizer(sgd()),
        reference=lambda: keras.optimizers.LossScaleOptimizer(
            sgd(gradient_accumulation_steps=2)
        ),
        backward_passes_per_step=2,
        average_aggregated_gradients=True,
    )


@case
def half_precision():
    return compared(sgd, compression=hvd.Compression.fp16)


@case
def divided_before():
    return compared(sgd, gradient_predivide_factor=4.0)


@case
def summed():
    return compared(lambda: sgd(0.05), reference=lambda: sgd(0.1), op=hvd.Sum)


@case
def summed_embedding():
    return compared(
        lambda: sgd(0.05), "words", reference=lambda: sgd(0.1), op=hvd.Sum
    )


@case
def groups_by_number():
    return compared(sgd, groups=2)


@case
def groups_by_variables():
    alone = trained_alone(sgd)
    made = model()
    groups = [[made.layers[0].kernel, made.layers[1].bias]]
    ours = train(hvd.DistributedOptimizer(sgd(), groups=groups), made=made)
    return outcome(ours, alone)


@case
def steps_at_once():
    alone = trained_alone(sgd)
    ours = train(hvd.DistributedOptimizer(sgd()), steps_per_execution=4)
    return outcome(ours, alone)


@case
def eager_fit():
    alone = trained_alone(sgd, "words")
    ours = train(hvd.DistributedOptimizer(sgd()), "words", run_eagerly=True)
    return outcome(ours, alone, "words")


@case
def eager_passes():
    alone = train(sgd(gradient_accumulation_steps=2), alone=True)
    optimizer = hvd.DistributedOptimizer(
        sgd(), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    return outcome(train(optimizer, run_eagerly=True), alone)


def _by_hand(optimizer, alone, wrap):
    made = model()
    made.compile(optimizer, loss())
    x, y = data()
    if not alone:
        x, y = mine(x), mine(y)
    size = GLOBAL_BATCH if alone else GLOBAL_BATCH // 2

    @wrap
    def step(x, y):
        grads = gradients(made, x, y)
        optimizer.apply(grads, made.trainable_variables)

    for start in range(0, len(x), size):
        batch = slice(start, start + size)
        step(tf.constant(x[batch]), tf.constant(y[batch]))
    return made


@case
def loop_eager():
    alone = _by_hand(sgd(), True, lambda step: step)
    ours = _by_hand(hvd.DistributedOptimizer(sgd()), False, lambda step: step)
    return outcome(ours, alone)


@case
def loop_traced():
    alone = _by_hand(sgd(), True, tf.function)
    ours = _by_hand(hvd.DistributedOptimizer(sgd()), False, tf.function)
    return outcome(ours, alone)


@case
def single_batches():
    x, y = data()
    alone, ours = model(), model()
    alone.compile(sgd(), loss())
    ours.compile(hvd.DistributedOptimizer(sgd()), loss())
    alone.train_on_batch(x[:16], y[:16])
    ours.train_on_batch(mine(x)[:8], mine(y)[:8])
    return outcome(ours, alone)


class TwoParts(keras.Model):
    """Trains its layers with an optimizer each, and one variable never."""

    def __init__(self, distribute):
        super().__init__()
        keras.utils.set_random_seed(5)
        self.parts = [keras.layers.Dense(4), keras.layers.Dense(3)]
        self.unused = self.add_weight(shape=(2,), initializer="ones")
        self.optimizers = [distribute(sgd()), distribute(sgd(0.01))]

    def call(self, x):
        return self.parts[1](self.parts[0](x))

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape(persistent=True) as tape:
            value = loss()(y, self(x))
        groups = [
            [*self.parts[0].trainable_variables, self.unused],
            self.parts[1].trainable_variables,
        ]
        for group, optimizer in zip(groups, self.optimizers, strict=True):
            optimizer.apply(tape.gradient(value, group), group)
        return {"loss": value}


@case
def two_optimizers():
    # Also: a gradient that is None, and a model without a known input.
    alone = train(None, alone=True, made=TwoParts(lambda o: o))
    ours = train(None, made=TwoParts(hvd.DistributedOptimizer))
    return {
        "to_alone": weights_apart(ours, alone),
        "ranks": ranks_apart(ours),
        "moved": float(np.abs(ours.get_weights()[0]).max()),
    }


@case
def other_names():
    # A rank that has made more models than the other calls layers otherwise.
    if hvd.rank() == 1:
        keras.layers.Dense(1)
        model()
        sgd()
    return compared(sgd, "words")


@case
def overflow_on_one_rank():
    def make():
        return keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=2.0**14)

    found = []
    for alone in (True, False):
        optimizer = make() if alone else hvd.DistributedOptimizer(make())
        made = model()
        made.compile(optimizer, loss())
        x, y = data()
        x[GLOBAL_BATCH - 1] = np.inf  # in rank 1's part of the first batch
        if not alone:
            x, y = mine(x), mine(y)
        size = GLOBAL_BATCH if alone else GLOBAL_BATCH // 2
        made.fit(x, y, size, shuffle=False, verbose=0)
        found.append(made)
    scales = [float(m.optimizer.dynamic_scale.numpy()) for m in found]
    return {**outcome(found[1], found[0]), "scales": scales}


@case
def mixed_precision():
    # compile() itself puts the optimizer into a LossScaleOptimizer.
    found = []
    for alone in (True, False):
        optimizer = sgd() if alone else hvd.DistributedOptimizer(sgd())
        keras.config.set_dtype_policy("mixed_float16")
        try:
            made = model()
        finally:
            keras.config.set_dtype_policy("float32")
        found.append(train(optimizer, alone=alone, made=made))
    scaled = isinstance(found[1].optimizer, keras.optimizers.LossScaleOptimizer)
    return {**outcome(found[1], found[0]), "scaled": scaled}
