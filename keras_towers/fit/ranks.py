"""What the processes of a job agree on while they run a step together."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit import data as data_lib
from keras_towers.reduction import sum_over_ranks
from keras_towers.transport import next_key


def in_turn(strategy: Any, batch: data_lib.TowerBatch) -> data_lib.TowerBatch:
    """Let a step begin once the one before has ended.

    TensorFlow may run steps of one function at the same time where no variable
    orders them; two collectives would then be under way with one key.
    """
    if strategy.transport.size == 1 or tf.executing_eagerly():
        return batch
    with tf.control_dependencies([strategy.turn.read_value()]):
        return _identity(batch)


def end_turn(strategy: Any, result: Any) -> Any:
    """Let the next step begin; give the result of this one back."""
    if strategy.transport.size == 1 or tf.executing_eagerly():
        return result
    tensors = tf.nest.flatten(result, expand_composites=True)
    with tf.control_dependencies([t for t in tensors if tf.is_tensor(t)]):
        done = strategy.turn.assign_add(1, read_value=False)
    with tf.control_dependencies([done]):
        return _identity(result)


def _identity(structure: Any) -> Any:
    return tf.nest.map_structure(
        lambda leaf: tf.identity(leaf) if tf.is_tensor(leaf) else leaf,
        structure,
        expand_composites=True,
    )


def end_together(
    strategy: Any, batch: data_lib.TowerBatch, here: Any
) -> data_lib.TowerBatch:
    """Count a step's examples on all ranks; end where nobody has any.

    A rank whose own data has ended takes part without examples until then.

    Raises:
        tf.errors.OutOfRangeError: when it runs, as an iterator at its end.
    """
    (total,) = sum_over_ranks(
        strategy.transport, [tf.convert_to_tensor(here, tf.int64)]
    )
    with tf.control_dependencies([_end_of_data_if(total <= 0)]):
        return _identity(batch)._replace(total=tf.identity(total))


def _end_of_data_if(condition: tf.Tensor) -> tf.Tensor:
    def end():
        return next(iter(tf.data.Dataset.from_tensors(0).take(0)))

    return tf.cond(condition, end, lambda: 0)


def gather(strategy: Any, outputs: Any) -> Any:
    """Put the ranks' outputs behind one another, in the order of the ranks.

    Args:
        strategy: the strategy.
        outputs: a structure of tensors with examples as rows.

    Raises:
        TowerError: an output is sparse or ragged.
    """
    if strategy.transport.size == 1:
        return outputs

    def one(tensor):
        if not isinstance(tensor, tf.Tensor):
            raise TowerError(
                f"an output of the model is a {type(tensor).__name__}, which "
                "cannot be gathered over processes: make it dense, or predict "
                'in one process (batches="each" leaves each rank its own).'
            )
        return strategy.transport.all_gather(tensor, next_key("outputs"))

    return tf.nest.map_structure(one, outputs)


def make_turn() -> tf.Variable:
    """A variable by which steps follow one another."""
    with tf.init_scope(), compat.single_device_mode(), tf.device("CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False, name="turn")
