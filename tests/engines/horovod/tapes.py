"""Checks of two ranks: tapes, join, batch normalization, other ranks."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_towers import horovod as hvd
from keras_towers.engines.horovod.hvd import distributed_optimizers
from keras_towers.inspection.conformance import case_models as m
from tests.engines.horovod import small
from tests.kit.compare import assert_all_close, assert_close
from tests.kit.ranks import check


@check
def a_tape_reduces_gradients_of_a_structure():
    distributed_optimizers._reducer.cache_clear()
    alone = small.train(m.momentum(), small.WORDS, alone=True)
    made, optimizer = m.with_embedding(), m.momentum()
    made.compile(optimizer, m.cross_entropy())

    def step(x, y):
        with tf.GradientTape() as tape:
            value = m.cross_entropy()(y, made(x, training=True))
        tape = hvd.DistributedGradientTape(tape)
        # Paths would be sorted, and may be numbered otherwise on each rank.
        variables = dict(enumerate(made.trainable_variables))
        grads = tape.gradient(value, variables)
        optimizer.apply([grads[p] for p in variables], variables.values())

    rows = tf.data.Dataset.from_tensor_slices(
        (small.mine(m.TOKENS), small.mine(m.LABELS))
    ).batch(small.GLOBAL_BATCH // 2)
    in_a_graph = tf.function(step)
    for number, (x, y) in enumerate(rows):
        (in_a_graph if number % 2 else step)(x, y)
    small.assert_as_alone(made, alone)
    # One for all steps of a loop, though each step has another tape.
    assert distributed_optimizers._reducer.cache_info().currsize == 2


@check
def a_tape_does_not_reduce_local_sources():
    made = m.mlp()
    x, y = small.first_batch()
    with hvd.PartialDistributedGradientTape(
        tf.GradientTape(persistent=True),
        local_layers=made.layers[1],
        scale_local_gradients=False,
    ) as tape:
        value = m.cross_entropy()(y, made(x))
    local, reduced = tape.get_local_and_global_gradients(
        value, made.trainable_variables
    )
    assert [variable.path for variable, _ in local + reduced] == [
        v.path for v in made.layers[1].weights + made.layers[0].weights
    ]
    assert small.difference_between_ranks([grad for _, grad in local]) > 1e-3
    assert small.difference_between_ranks([grad for _, grad in reduced]) == 0


@check
def batch_normalization_is_that_of_the_batches_of_all_ranks():
    if hvd.rank() == 1:
        hvd.SyncBatchNormalization()  # Numbers of names differ between ranks.
    rng = np.random.default_rng(3)
    # Where mean(x^2) - mean(x)^2 cancels.
    x = rng.normal(50.0, size=(7, 4, 2)).astype("float32")
    factors = rng.normal(size=x.shape).astype("float32")
    mask = rng.random((7, 4)) < 0.6

    def normalized(make, part, mask, wrap):
        """Outputs, gradients with respect to inputs, moving statistics."""
        layer, inputs = make(momentum=0.8), tf.constant(x[part])
        layer.build(inputs.shape)

        @wrap
        def run():
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                outputs = layer(inputs, training=True, mask=mask)
                total = tf.reduce_sum(outputs * factors[part])
            return outputs, tape.gradient(total, inputs)

        return [*run(), layer.moving_mean, layer.moving_variance]

    mine = (slice(3), slice(3, 7))[hvd.rank()]
    for given in (None, mask):
        alone = normalized(
            keras.layers.BatchNormalization, slice(7), given, tf.function
        )
        wanted = [array.numpy()[mine] for array in alone[:2]] + alone[2:]
        given = None if given is None else given[mine]
        for wrap in (lambda function: function, tf.function):
            found = normalized(hvd.SyncBatchNormalization, mine, given, wrap)
            assert_all_close(found, wanted, 5e-5)


@check
def ranks_with_less_data_join():
    variable = keras.Variable([1.0, 2.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    for _ in range(3 - hvd.rank()):
        optimizer.apply([tf.constant([1.0, 4.0])], [variable])
    last = hvd.join()
    assert hvd.allgather_object(last) == [last, last]
    # Where rank 1 had nothing more to give, rank 0 had half of its gradient.
    expected = ([-1.5, -8.0], [-1.0, -6.0])[hvd.rank()]
    assert_close(variable, expected)


@check
def ranks_with_other_gradients_are_told():
    made = m.mlp()
    x, y = small.first_batch()

    def step(optimizer, count):
        variables = made.trainable_variables[:count]
        optimizer.apply(small.gradients(made, x, y)[:count], variables)

    words = r"Only on rank 0: \S+/bias \[3\] float32; .* rank 1: none"
    for wrap in (lambda function: function, tf.function):
        optimizer = hvd.DistributedOptimizer(m.momentum())
        one = wrap(lambda o=optimizer: step(o, 4 - hvd.rank()))
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            one()
    variable = keras.Variable(np.zeros(3 + hvd.rank()), name="odd")
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"rank 0: odd \[3\] float32; .* rank 1: odd \[4\] float32",
    ):
        hvd.DistributedOptimizer(m.momentum()).apply(
            [tf.ones(3 + hvd.rank())], [variable]
        )
    # Nothing is left over.
    step(hvd.DistributedOptimizer(m.momentum()), 4)
    assert small.difference_between_ranks(made.weights) == 0
