"""Checks of two ranks: weights equal to those of one process."""

import keras
import numpy as np
import tensorflow as tf

import keras_towers.horovod as hvd
from tests.horovod.small import (
    GLOBAL_BATCH,
    ROUNDING,
    assert_as_alone,
    assert_trains_as_alone,
    data,
    gradients,
    loss,
    mine,
    model,
    ranks_apart,
    sgd,
    train,
    trained_alone,
    weights_apart,
)
from tests.kit.ranks import check


@check
def momentum():
    assert_trains_as_alone(sgd)


@check
def clipped_embedding():
    assert_trains_as_alone(
        lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.05), "words"
    )


@check
def embedding_as_dense():
    assert_trains_as_alone(sgd, "words", sparse_as_dense=True)


@check
def keras_accumulation():
    assert_trains_as_alone(
        lambda: sgd(gradient_accumulation_steps=2), iterations=6
    )


@check
def decay_and_averages():
    assert_trains_as_alone(
        lambda: keras.optimizers.AdamW(
            0.01, use_ema=True, ema_overwrite_frequency=3, clipvalue=0.02
        )
    )


@check
def passes_averaged():
    assert_trains_as_alone(
        sgd,
        reference=lambda: sgd(gradient_accumulation_steps=2),
        iterations=6,
        backward_passes_per_step=2,
        average_aggregated_gradients=True,
    )


@check
def passes_summed():
    assert_trains_as_alone(
        lambda: keras.optimizers.SGD(0.05),
        "words",
        reference=lambda: keras.optimizers.SGD(
            0.1, gradient_accumulation_steps=2
        ),
        iterations=6,
        backward_passes_per_step=2,
    )


@check
def passes_and_loss_scale():
    assert_trains_as_alone(
        lambda: keras.optimizers.LossScaleOptimizer(sgd()),
        reference=lambda: keras.optimizers.LossScaleOptimizer(
            sgd(gradient_accumulation_steps=2)
        ),
        iterations=6,
        backward_passes_per_step=2,
        average_aggregated_gradients=True,
    )


@check
def half_precision_is_close_and_in_use():
    options = {"compression": hvd.Compression.fp16}
    ours = train(hvd.DistributedOptimizer(sgd(), **options))
    assert ROUNDING < weights_apart(ours, trained_alone(sgd)) < 1e-3
    assert ranks_apart(ours) == 0


@check
def divided_before():
    assert_trains_as_alone(sgd, gradient_predivide_factor=4.0)


@check
def summed():
    assert_trains_as_alone(
        lambda: sgd(0.05), reference=lambda: sgd(0.1), op=hvd.Sum
    )


@check
def summed_embedding():
    assert_trains_as_alone(
        lambda: sgd(0.05), "words", reference=lambda: sgd(0.1), op=hvd.Sum
    )


@check
def groups_by_number():
    assert_trains_as_alone(sgd, groups=2)


@check
def groups_by_variables():
    alone = trained_alone(sgd)
    made = model()
    groups = [[made.layers[0].kernel, made.layers[1].bias]]
    ours = train(hvd.DistributedOptimizer(sgd(), groups=groups), made=made)
    assert_as_alone(ours, alone)


@check
def steps_at_once():
    alone = trained_alone(sgd)
    ours = train(hvd.DistributedOptimizer(sgd()), steps_per_execution=4)
    assert_as_alone(ours, alone)


@check
def eager_fit():
    alone = trained_alone(sgd, "words")
    ours = train(hvd.DistributedOptimizer(sgd()), "words", run_eagerly=True)
    assert_as_alone(ours, alone, "words")


@check
def eager_passes():
    alone = train(sgd(gradient_accumulation_steps=2), alone=True)
    optimizer = hvd.DistributedOptimizer(
        sgd(), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    ours = train(optimizer, run_eagerly=True)
    assert_as_alone(ours, alone, iterations=6)


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


@check
def loop_eager():
    alone = _by_hand(sgd(), True, lambda step: step)
    ours = _by_hand(hvd.DistributedOptimizer(sgd()), False, lambda step: step)
    assert_as_alone(ours, alone, iterations=6)


@check
def loop_traced():
    alone = _by_hand(sgd(), True, tf.function)
    ours = _by_hand(hvd.DistributedOptimizer(sgd()), False, tf.function)
    assert_as_alone(ours, alone, iterations=6)


@check
def single_batches():
    x, y = data()
    alone, ours = model(), model()
    alone.compile(sgd(), loss())
    ours.compile(hvd.DistributedOptimizer(sgd()), loss())
    alone.train_on_batch(x[:16], y[:16])
    ours.train_on_batch(mine(x)[:8], mine(y)[:8])
    assert_as_alone(ours, alone, iterations=1)


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


@check
def two_optimizers():
    # Also: a gradient that is None, and a model without a known input.
    alone = train(None, alone=True, made=TwoParts(lambda o: o))
    ours = train(None, made=TwoParts(hvd.DistributedOptimizer))
    assert weights_apart(ours, alone) < ROUNDING
    assert ranks_apart(ours) == 0


@check
def other_names():
    # A rank that has made more models than the other calls layers otherwise.
    if hvd.rank() == 1:
        keras.layers.Dense(1)
        model()
        sgd()
    assert_trains_as_alone(sgd, "words")


@check
def an_overflow_of_one_rank_skips_the_step_of_all():
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
    assert_as_alone(found[1], found[0], iterations=5)
    for made in found:
        assert float(made.optimizer.dynamic_scale) == 2.0**13


@check
def the_loss_scale_that_compile_adds_goes_outside():
    found = []
    for alone in (True, False):
        optimizer = sgd() if alone else hvd.DistributedOptimizer(sgd())
        keras.config.set_dtype_policy("mixed_float16")
        try:
            made = model()
        finally:
            keras.config.set_dtype_policy("float32")
        found.append(train(optimizer, alone=alone, made=made))
    alone, ours = found
    assert isinstance(ours.optimizer, keras.optimizers.LossScaleOptimizer)
    assert weights_apart(ours, alone) < 1e-2
    assert ranks_apart(ours) == 0
