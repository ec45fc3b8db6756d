"""Values of the global batch, for layers, losses and training steps.

On towers such code sees the tower's share of the batch. What it computes from
several examples at once, these functions compute from the global batch. On one
device, and while Keras builds a model, the batch is whole and they do the same
without communication, so code that uses them runs anywhere.

Inside a step every tower has to call them, in the same order, and not inside a
``tf.cond``, a ``tf.while_loop`` or a ``tf.function`` of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.context.tower import is_differentiable
from keras_towers.fit.contract import check_on_all_towers
from keras_towers.fit.step import gather as gather_lib
from keras_towers.reduction import scaled


def gather(values: Any) -> Any:
    """Return the rows of the global batch, in order, on every tower.

    For losses that compare the examples of a batch with each other. Gradients
    are those of one device: a loss that every tower computes from the whole
    gathered batch, and the mean of a tower's own rows compared with all rows,
    both give the loss of the global batch.

    Where the losses of all towers are added up (``average=False``, a Keras loss
    with ``reduction="sum"``), give only those of the tower's own rows: a loss
    of the whole batch would count once for each tower.

    Args:
        values: structure of tensors of shape [rows, ...]. Towers may have
            different numbers of rows; those without examples give none.

    Returns:
        The same structure of tensors of shape [rows of all towers, ...]; what
        is the same on all towers, such as what was gathered before, as it is;
        ``values`` itself on one device.

    Raises:
        TowerError: a value is a scalar, sparse or ragged, it is not known
            whether its rows are the tower's own, or the strategy is not one of
            keras_towers.

    Example:
        >>> def contrastive(images, texts):
        ...     images, texts = kt.gather((images, texts))
        ...     logits = tf.matmul(images, texts, transpose_b=True)
        ...     losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
        ...         tf.range(tf.shape(logits)[0]), logits
        ...     )
        ...     return tf.reduce_mean(losses)
    """
    context = gather_lib.replica_context("kt.gather")
    if context is None:
        return values
    return gather_lib.gather(context, values, "kt.gather")


def mean(values: Any, mask: Any = None, axis: Any = None) -> tf.Tensor:
    """Return the mean over the global batch, the same on every tower.

    With ``average=False`` the losses of all towers are added up, so a term of
    the loss that is the same on all of them counts once for each.

    Args:
        values: a tensor of shape [rows, ...].
        mask: weights of the values, such as a mask of booleans: a tensor of
            their shape, or of their leading dimensions. None: all weigh 1.
        axis: the axes to average over, which include the first; None for all.

    Returns:
        The sum of the weighted values, divided by the sum of the weights, over
        all towers; 0 if all weights are 0. A scalar, or a tensor of the
        remaining dimensions.

    Raises:
        TowerError: ``values`` is a scalar, ``axis`` leaves out the first axis,
            or ``mask`` has too many dimensions.

    Example:
        >>> usage = kt.mean(gates, axis=0)  # of each expert, [experts]
        >>> self.add_loss(tf.reduce_sum(usage * usage))
    """
    values = tf.convert_to_tensor(values)
    kind = values.dtype
    if not is_differentiable(values):
        kind = tf.float32
    # Half precision cannot count that far.
    values = tf.cast(values, tf.float32 if kind.size < 4 else kind)
    axes = _axes(values, axis)
    if mask is None:
        weights = tf.ones((), values.dtype)
    else:
        weights = _weights(mask, values)
        values = tf.where(weights != 0, values, 0) * weights
    total = tf.reduce_sum(values, axes)
    count = tf.reduce_sum(tf.broadcast_to(weights, tf.shape(values)), axes)
    context = gather_lib.replica_context("kt.mean")
    if context is not None:
        total, count = gather_lib.all_reduce_sum(context, [total, count])
    return tf.cast(tf.math.divide_no_nan(total, count), kind)


def _axes(values: tf.Tensor, axis: Any) -> list[int]:
    rank = values.shape.rank
    if not rank:
        raise TowerError(
            "kt.mean takes a tensor of shape [rows, ...] of a known number of "
            f"dimensions, but was given one of shape {values.shape}."
        )
    axes = list(range(rank)) if axis is None else tf.nest.flatten(axis)
    if 0 not in axes and -rank not in axes:
        raise TowerError(
            f"kt.mean was given axis={axis!r}, but a mean over the global "
            "batch is one over axis 0, too. Use tf.reduce_mean for other axes."
        )
    return axes


def _weights(mask: Any, values: tf.Tensor) -> tf.Tensor:
    mask = tf.cast(mask, values.dtype)
    missing = values.shape.rank - mask.shape.rank
    if missing < 0:
        raise TowerError(
            f"kt.mean was given a mask of shape {mask.shape} for values of "
            f"shape {values.shape}: give one of the same shape, or of their "
            "leading dimensions."
        )
    return tf.reshape(mask, tf.concat([tf.shape(mask), [1] * missing], 0))


def reduce_gradients(
    gradients: Sequence[tf.Tensor | tf.IndexedSlices | None],
) -> list[tf.Tensor | tf.IndexedSlices | None]:
    """Return the gradients of the global batch, the same on every tower.

    For a custom ``train_step`` that computes something from its gradients
    before it calls the optimizer (adaptive clipping, sharpness-aware
    minimization). The optimizer may be given these gradients, or any computed
    from them, as on one device.

    Args:
        gradients: N gradients of this tower; None for a missing one.

    Returns:
        N gradients; ``gradients`` as a list on one device.

    Raises:
        TowerError: the strategy adds up what the towers give the optimizer
            (``average=False``, or a custom training loop), or the towers do not
            have the same gradients.

    Example:
        >>> gradients = tape.gradient(loss, variables)
        >>> gradients = kt.reduce_gradients(gradients)
        >>> gradients = [tf.sign(gradient) for gradient in gradients]
        >>> self.optimizer.apply(gradients, variables)
    """
    context = gather_lib.replica_context("kt.reduce_gradients")
    if context is None:
        return list(gradients)
    tower = tower_lib.current()
    if tower is None or not tower.average:
        where = "with average=False" if tower else "in a custom training loop"
        raise TowerError(
            f"kt.reduce_gradients is not possible {where}, where the optimizer "
            "adds up what the towers give it: each of them would count the "
            "gradients of the global batch once. Use a loss that is a mean and "
            "fit(), or, to clip gradients, kt.clip_by_global_norm."
        )
    return _reduced(context, gradients)


def clip_by_global_norm(
    gradients: Sequence[tf.Tensor | tf.IndexedSlices | None], norm: Any
) -> tuple[list[tf.Tensor | tf.IndexedSlices | None], tf.Tensor]:
    """Clip the gradients of the global batch by their global norm.

    Takes the place of ``tf.clip_by_global_norm`` in a custom ``train_step``.
    Keras's own ``global_clipnorm`` is exact without it.

    Args:
        gradients: N gradients of this tower; None for a missing one.
        norm: the largest norm.

    Returns:
        N gradients to give to the optimizer, and the global norm before
        clipping, of the global batch. Where the strategy adds up what the
        towers give the optimizer (``average=False``, custom training loops),
        each tower gets its part of the clipped gradients.

    Example:
        >>> gradients = tape.gradient(loss, variables)
        >>> gradients, norm = kt.clip_by_global_norm(gradients, 1.0)
        >>> self.optimizer.apply(gradients, variables)
    """
    context = gather_lib.replica_context("kt.clip_by_global_norm")
    if context is None:
        return tf.clip_by_global_norm(gradients, norm)
    clipped, before = tf.clip_by_global_norm(_reduced(context, gradients), norm)
    tower = tower_lib.current()
    if tower is None:
        part = 1 / context.num_replicas_in_sync
    else:
        part = 1 if tower.average else tower.share
    return [None if g is None else scaled(g, part) for g in clipped], before


def _reduced(context: Any, gradients: Sequence[Any]) -> list[Any]:
    """Sum the weighted gradients of all towers."""
    check_on_all_towers(context, gradients)
    tower = tower_lib.current()
    weight = 1 if tower is None else tower.gradient_weight
    present = [scaled(g, weight) for g in gradients if g is not None]
    sums = iter(gather_lib.all_reduce_sum(context, present) if present else [])
    return [None if g is None else next(sums) for g in gradients]
