"""The program of a deep network and its gradients, and what every one keeps."""

import functools

import tensorflow as tf

from keras_towers.partition.ir.layouts import REPLICATED
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.timeline.kept_results import KEEP_ALL
from keras_towers.partition.timeline.memory_estimate import MemoryEstimate
from keras_towers.partition.timeline.schedule import BatchSplit, schedule
from tests.partition.kit import laid_out, replicated, sharded

ROWS, TOWERS, WIDTH, LAYERS = 2048, 2, 256, 12
SPLIT = BatchSplit(TOWERS, ROWS)


def gradients(x, *weights):
    """Return those of the weights of a deep network."""
    with tf.GradientTape() as tape:
        tape.watch(weights)
        for weight in weights:
            x = tf.nn.gelu(x @ weight)
        loss = tf.reduce_sum(x)
    found = tape.gradient(loss, weights)
    return tf.raw_ops.IdentityN(input=found, name="handed")


@functools.cache
def deep(xla=False, remat=KEEP_ALL, parts=1):
    """Return the timeline of a deep network and its gradients."""
    given = sharded(-1, WIDTH), *[replicated(WIDTH, WIDTH)] * LAYERS
    handed = {"handed": [REPLICATED] * LAYERS}
    program = laid_out(gradients, *given, handed=handed)
    return schedule(program, BatchSplit(TOWERS, ROWS, parts), remat, xla=xla)


def peak_bytes(timeline):
    """Return the most bytes that a tower has at a time."""
    sizes = TensorSizes(timeline.program, TOWERS, ROWS)
    return MemoryEstimate(timeline, sizes).peak_bytes()
