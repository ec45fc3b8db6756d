"""A worker of two ranks, whose weights have to equal one process's."""

import functools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import keras_towers as kt
from keras_towers import horovod as hvd
from keras_towers.inspection.conformance import case_models as m
from tests.engines.horovod import small
from tests.kit import untuned
from tests.kit.ranks import check, main

STEPS = 4
SHAPES = [(3, 2), (5, 2), (4,)]
# Options, backward passes per update, and what the sum of the gradients of all
# ranks and passes is multiplied with.
WAYS = {
    "plain": ({}, 1, 1 / 2),
    "sparse as dense": ({"sparse_as_dense": True}, 1, 1 / 2),
    "summed": ({"op": hvd.Sum}, 1, 1),
    "divided before": ({"gradient_predivide_factor": 4.0}, 1, 1 / 2),
    "groups by number": ({"groups": 2}, 1, 1 / 2),
    "groups by variables": ({}, 1, 1 / 2),
    "in half precision": ({"compression": hvd.Compression.fp16}, 1, 1 / 2),
    "passes summed": ({"backward_passes_per_step": 2}, 2, 1 / 2),
    "passes averaged": (
        {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
        2,
        1 / 4,
    ),
}


def _variables():
    return [keras.Variable(np.ones(shape)) for shape in SHAPES]


def _gradients(step, rank):
    """Gradients of a rank, of which the second is sparse."""
    rng = np.random.default_rng([step, rank])
    grads = [tf.constant(rng.normal(size=s), tf.float32) for s in SHAPES]
    rows = tf.constant(rng.integers(0, 5, 2 + rank))
    grads[1] = tf.IndexedSlices(grads[1][: 2 + rank], rows, tf.constant([5, 2]))
    return grads


@functools.cache
def _alone(passes, factor):
    """The variables of one process that has the gradients of all."""
    variables, optimizer = _variables(), m.momentum()
    for first in range(0, STEPS, passes):
        everyone = [
            map(tf.convert_to_tensor, _gradients(step, rank))
            for step in range(first, first + passes)
            for rank in range(2)
        ]
        totals = [tf.add_n(grads) for grads in zip(*everyone, strict=True)]
        optimizer.apply([total * factor for total in totals], variables)
    return variables


@check
def every_way_to_reduce():
    def by_hand(step):
        return step

    for name, wrap in (
        *((name, by_hand) for name in WAYS),
        ("plain", tf.function),
        ("passes summed", tf.function),
    ):
        options, passes, factor = WAYS[name]
        variables = _variables()
        if name == "groups by variables":
            options = {"groups": [variables[::2]]}
        optimizer = hvd.DistributedOptimizer(m.momentum(), **options)
        step = wrap(functools.partial(_apply, optimizer, variables))
        for number in range(STEPS):
            step(_gradients(number, hvd.rank()))
        off = small.difference(variables, _alone(passes, factor))
        if name == "in half precision":
            assert small.ROUNDING < off < 1e-2
        else:
            assert off < small.ROUNDING, (name, wrap)
        assert small.difference_between_ranks(variables) == 0, (name, wrap)
        assert int(optimizer.iterations) == STEPS // passes, (name, wrap)


def _apply(optimizer, variables, grads):
    optimizer.apply(grads, variables)


@check
def clipping_accumulation_decay_and_averages():
    # A rank that has made more models than the other calls layers otherwise.
    if hvd.rank() == 1:
        keras.layers.Dense(1)
        m.mlp()
        m.momentum()

    def make():
        return keras.optimizers.AdamW(
            0.01,
            use_ema=True,
            ema_overwrite_frequency=2,
            global_clipnorm=0.05,
            gradient_accumulation_steps=2,
        )

    ours = small.train(
        hvd.DistributedOptimizer(make()),
        small.WORDS,
        steps_per_execution=4,
        epochs=2,
    )
    alone = small.train(make(), small.WORDS, alone=True, epochs=2)
    small.assert_as_alone(ours, alone)


@check
def passes_loss_scale_and_batch_normalization():
    def make(**options):
        return keras.optimizers.LossScaleOptimizer(m.momentum(**options))

    def normalized(layer):
        keras.utils.set_random_seed(3)
        hidden = keras.layers.Dense(8), layer()
        return keras.Sequential(
            [keras.Input((6,)), *hidden, keras.layers.Dense(3)]
        )

    optimizer = hvd.DistributedOptimizer(
        make(), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    ours = normalized(hvd.SyncBatchNormalization)
    small.train(optimizer, made=ours)
    alone = small.train(
        make(gradient_accumulation_steps=2),
        alone=True,
        made=normalized(keras.layers.BatchNormalization),
    )
    small.assert_as_alone(ours, alone, tolerance=1e-5)


@check
def two_optimizers_in_a_step_and_a_gradient_that_is_none():
    one, other = (hvd.DistributedOptimizer(m.momentum()) for _ in range(2))
    variables, unused = _variables(), keras.Variable([1.0])

    @tf.function
    def step(grads):
        one.apply([grads[0], None], [variables[0], unused])
        other.apply(grads[1:], variables[1:])

    for number in range(STEPS):
        step(_gradients(number, hvd.rank()))
    assert small.difference(variables, _alone(1, 1 / 2)) < small.ROUNDING
    assert unused.numpy() == [1.0]


@check
def a_gradient_that_is_constant_on_one_rank():
    """Which TensorFlow would send by itself, before a step."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    variable = keras.Variable([4.0])

    @tf.function
    def step(given):
        grad = tf.constant([1.0]) if hvd.rank() else given
        optimizer.apply([grad], [variable])

    untuned.do_not_optimize_graphs(False)
    try:
        for _ in range(2):
            step(tf.constant([1.0]))
    finally:
        untuned.do_not_optimize_graphs()
    assert variable.numpy() == [2.0]


@check
def an_overflow_of_one_rank_skips_the_step_of_all():
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(m.momentum(), initial_scale=2.0**14)
    )
    variable = keras.Variable([1.0])
    optimizer.apply([tf.constant([[1.0], [np.inf]][hvd.rank()])], [variable])
    assert variable.numpy() == [1.0]
    assert float(optimizer.dynamic_scale) == 2.0**13
    optimizer.apply([tf.constant([2.0**13])], [variable])
    assert variable.numpy() == np.float32(0.9)


@check
def all_begin_with_the_weights_of_rank_0():
    """Without a callback that broadcasts; local ones stay each rank's own."""
    for eager in (False, True):
        keras.utils.set_random_seed(hvd.rank())
        made = keras.Sequential(
            [keras.layers.Dense(4), keras.layers.Dense(3, name="own")]
        )
        optimizer = hvd.PartialDistributedOptimizer(
            m.momentum(), local_layers=made.layers[1:]
        )
        small.train(optimizer, made=made, run_eagerly=eager)
        shared, own = (layer.weights for layer in made.layers)
        assert small.difference_between_ranks(shared) == 0
        assert small.difference_between_ranks(own) > 0.1


@check
def what_horovods_own_names_give():
    import horovod.keras as own
    import horovod.tensorflow as of_tensors
    from horovod.tensorflow.keras import callbacks as their_callbacks
    from horovod.tensorflow.keras.elastic import KerasState

    assert own.init is hvd.init
    for module in (own, of_tensors):
        alone, made = m.mlp(), m.mlp()
        # Of tensors, Horovod's own function asks its module for Keras.
        optimizer = module.DistributedOptimizer(m.momentum())
        small.train(optimizer, made=made)
        small.train(m.momentum(), alone=True, made=alone)
        small.assert_as_alone(made, alone)
    assert their_callbacks is hvd.callbacks
    assert KerasState is hvd.elastic.KerasState
    # What is not for Keras stays Horovod's.
    tape = of_tensors.DistributedGradientTape
    assert tape is not hvd.DistributedGradientTape
    assert tape.__module__ == "horovod.tensorflow"


if __name__ == "__main__":
    kt.virtual_towers(2)
    hvd.init()
    from tests.engines.horovod import callbacks, tapes  # noqa: F401

    main()
