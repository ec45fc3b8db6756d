"""Values of the global batch on every tower, with the gradients of one device.

Tower k's loss counts with its weight w_k in the loss of the global batch, and
its gradients are multiplied by w_k when they are applied. Where every tower
uses a value x_j of tower j, the gradient of x_j is therefore
1/w_j * sum over k of w_k * dL_k/dx_j: what ``Tower.mixed`` and
``Tower.weigh_gradient`` make of a plain sum.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.context.replica_context import check_exchange
from keras_towers.fit.contract import KerasStrategy
from keras_towers.fit.data import batches as data_lib
from keras_towers.fit.step import exchange, gathered
from keras_towers.transport import Transport


def replica_context(what: str) -> Any:
    """Return the replica context of a tower, or None for a whole batch."""
    # A batch is whole outside of the towers, while Keras builds a model, and on
    # towers that train on batches of their own.
    context = tf.distribute.get_replica_context()
    if context is None or compat.in_stateless_scope():
        return None
    tower = tower_lib.current()
    if tower is None:
        if context.num_replicas_in_sync == 1:
            return None
        if not isinstance(context.strategy, KerasStrategy):
            raise TowerError(
                f"{what} knows the towers of keras_towers only, but "
                f"{type(context.strategy).__name__} is in force: use one of "
                "keras_towers' strategies."
            )
        return context
    if tower.share is None:
        return None
    if tower.apart:
        raise TowerError(
            f"{what} is not possible in predict() of several processes with "
            'batches="each": each of them predicts its own data at its own '
            'pace. Use batches="split", or predict outside of the block.'
        )
    return context


def all_reduce_sum(context: Any, values: Any) -> Any:
    """Sum a structure of tensors over the towers, with gradients."""
    return context.all_reduce(tf.distribute.ReduceOp.SUM, values)


def gather(context: Any, values: Any, what: str) -> Any:
    """Concatenate the rows of all towers, in order, on every tower."""
    # Values are a structure of [rows, ...]; those that are the same on all
    # towers stay as they are.
    transport = context.strategy._components.config.transport
    tower = tower_lib.current()
    if tower is not None:
        # In the trace of another graph its data would not be found.
        check_exchange(tower)
    found = [
        _with_rows(leaf, transport, what) for leaf in tf.nest.flatten(values)
    ]
    blocks = [gathered.blocks_of(context, tower, t, what) for t in found]
    own = [
        part
        for tensor, each in zip(found, blocks, strict=True)
        for part in _blocks(tensor, each, tower)
    ]
    if own:
        if tower is not None:
            own = tower.mixed(own)
        own = exchange.gather(context, tower and tower.live, transport, own)
        if tower is not None:
            own = tower.weigh_gradient(own)
    parts = iter(own)
    for index, each in enumerate(blocks):
        if each is not None:
            of_block = [next(parts) for _ in each]
            found[index] = (
                tf.concat(of_block, 0) if len(each) > 1 else of_block[0]
            )
    gathered.note(context, found)
    return tf.nest.pack_sequence_as(values, found)


def _blocks(
    tensor: tf.Tensor, blocks: tuple[int, ...] | None, tower: Any
) -> list[tf.Tensor]:
    """Return the blocks of rows, each with rows of all examples of a tower."""
    if blocks is None:
        return []
    if len(blocks) == 1:
        return [tensor]
    examples = data_lib.batch_size_of(tower.data)
    return tf.split(tensor, [examples * block for block in blocks], 0)


def _with_rows(leaf: Any, transport: Transport, what: str) -> tf.Tensor:
    if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)):
        problem = f"a {type(leaf).__name__}: make it dense"
    else:
        leaf = tf.convert_to_tensor(leaf)
        if not leaf.shape.rank:
            problem = (
                f"one of shape {leaf.shape}: give it a known number of "
                "dimensions, of which the first is that of the examples"
            )
        elif leaf.dtype == tf.string and transport.size > 1:
            problem = (
                "one of strings, which processes cannot exchange: encode "
                "them as numbers"
            )
        else:
            return leaf
    raise TowerError(
        f"{what} takes tensors of shape [rows, ...], but was given {problem}."
    )
