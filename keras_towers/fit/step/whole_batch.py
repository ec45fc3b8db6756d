"""Keras's own computations from several examples of a batch at once.

Some losses and image layers of Keras compare, mix or count the examples of a
batch. With ``exact=True`` every tower computes them from the global batch, as
one device does, and goes on with its own rows; otherwise the user is told.

A tower's loss is weighted by its share of the examples. That is exact if the
loss divides by a multiple of the number of examples, but not for a sum, a mean
over sample weights or a mean over unmasked entries. Their denominators are
those of the global batch, so that the weighted mean of the towers' losses is
its loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit import contract, told
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.context.rows import Rows

# Over all axes, unless they are given others.
_OVER_AXES = (keras.losses.dice, keras.losses.tversky)

_LAYERS = {
    keras.layers.AugMix: "may equalize the histogram of a batch",
    keras.layers.CutMix: "mixes the images of a batch",
    keras.layers.Equalization: "equalizes the histogram of a batch",
    keras.layers.MixUp: "mixes the images of a batch",
    keras.layers.RandAugment: "may equalize the histogram of a batch",
    keras.layers.RandomElasticTransform: (
        "gives the first image's transformation to all images of a batch"
    ),
}


def loss(
    original: Callable[..., Any], loss: Any, y_true: Any, y_pred: Any
) -> Any:
    """Replace ``call`` of Keras's losses on a tower."""
    obstacle = None
    if loss.fn is keras.losses.circle:
        why = "compares the examples of a batch"
    elif loss.fn in _OVER_AXES:
        why = "is a ratio of sums over a batch"
        rank, axis = len(y_pred.shape), loss._fn_kwargs.get("axis")
        if axis is not None:
            axes = {place % rank for place in tf.nest.flatten(axis)}
            if 0 not in axes:
                return original(loss, y_true, y_pred)
            if len(axes) < rank:
                # Its values are neither of one example each nor one in all.
                obstacle = "exact=True changes that only without axis"
    else:
        return original(loss, y_true, y_pred)

    def compute(values: Any) -> Any:
        return original(loss, *values)

    what = f"loss {loss.name!r}"
    return _computed(compute, (y_true, y_pred), what, why, obstacle)


def image_layer(
    original: Callable[..., Any], layer: Any, data: Any, training: Any = True
) -> Any:
    """Replace ``call`` of Keras's layers that augment images on a tower."""
    images = data["images"] if isinstance(data, dict) else data
    kinds = [kind for kind in _LAYERS if isinstance(layer, kind)]
    why = _LAYERS[kinds[0]] if kinds else None
    if why is None or not training or not layer._is_batched(images):
        return original(layer, data, training=training)

    def compute(values: Any) -> Any:
        return original(layer, values, training=training)

    what = f"layer {layer.name!r}"
    if isinstance(layer, keras.layers.AugMix) and tower_lib.with_a_share():
        told.differs(
            "random",
            what,
            f"{what} chooses with Python's random numbers while the step is "
            "traced. All towers of a process choose alike, but perhaps not as "
            "one device, and ranks not as one another.",
            once=("random", what),
        )
    return _computed(compute, data, what, why)


def text_layer(original: Callable[..., Any], layer: Any, inputs: Any) -> Any:
    """Replace ``call`` of ``TextVectorization`` on a tower."""
    pads = layer._output_mode == "int" and layer._output_sequence_length is None
    if not pads or layer._ragged:
        return original(layer, inputs)

    def compute(values: Any) -> Any:
        return original(layer, values)

    why = (
        "pads all examples of a batch to the longest of them, as it has no "
        "output_sequence_length"
    )
    return _computed(compute, inputs, f"layer {layer.name!r}", why)


def _computed(
    compute: Callable[[Any], Any],
    values: Any,
    what: str,
    why: str,
    obstacle: str | None = None,
) -> Any:
    """Compute a tower's rows from the global batch, or tell why not."""
    strategy, tower = contract.in_force(), tower_lib.with_a_share()
    if strategy is None or tower is None:
        return compute(values)
    config = strategy._components.config
    obstacle = _obstacle(config, values) or obstacle
    if obstacle is not None:
        told.differs(
            "couples",
            what,
            f"{what} {why}, and each tower has only its share of the global "
            "batch: the results differ from those of one device. "
            f"{obstacle}.",
            # Models of another strategy may have one of the same name.
            once=("couples", what, id(strategy)),
        )
        return compute(values)
    from keras_towers.fit.step import gather as gather_lib

    context, rows = gather_lib.replica_context(what), tower.rows
    if context is None or rows is None:
        return compute(values)
    whole = gather_lib.gather(context, values, what)
    whole = tf.nest.map_structure(rows.of_all, whole)
    # What it draws is drawn for the global batch, the same on all towers.
    tower.rows = None
    try:
        results = compute(whole)
    finally:
        tower.rows = rows
    return tf.nest.map_structure(lambda leaf: _own(leaf, rows), results)


def _obstacle(config: contract.TowerConfig, values: Any) -> str | None:
    """Say why towers do not compute from the global batch, if so."""
    if not config.exact:
        return "exact=True computes it from the global batch"
    if not config.average:
        return "exact=True cannot change that with average=False"
    tensors = map(tf.convert_to_tensor, tf.nest.flatten(values))
    strings = any(tensor.dtype == tf.string for tensor in tensors)
    if strings and config.transport.size > 1:
        return "exact=True cannot change that, as ranks exchange no strings"
    return None


def _own(result: Any, rows: Rows) -> Any:
    """Return a tower's rows of a result for the global batch."""
    if not result.shape.rank:
        return result
    own = rows.own(result)
    mask = compat.get_keras_mask(result)
    if mask is not None:
        compat.set_keras_mask(own, rows.own(mask))
    return own


_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def reduce_values(
    original: Callable,
    values: tf.Tensor,
    sample_weight: tf.Tensor | None = None,
    reduction: str | None = "sum_over_batch_size",
) -> tf.Tensor:
    """Replace Keras's ``reduce_values`` on a tower."""
    tower = tower_lib.with_a_share()
    if (
        tower is None
        or not tower.average
        or reduction not in (*_MEANS, "sum")
        or values.shape.rank == 0
    ):
        return original(values, sample_weight, reduction)
    if reduction == "sum":
        total = tf.ones((), values.dtype)
    elif reduction == "mean_with_sample_weight" and sample_weight is not None:
        total = _over_towers(tf.reduce_sum(sample_weight))
    elif values.shape[1:].is_fully_defined():
        return original(values, sample_weight, reduction)
    else:
        total = _over_towers(tf.cast(tf.size(values), values.dtype))
    share = tf.cast(tower.share, values.dtype)
    return tf.math.divide_no_nan(
        tf.reduce_sum(values), tf.cast(total, values.dtype) * share
    )


def additional_loss(
    original: Callable[[Any, Any], Any], model: Any, loss: Any
) -> Any:
    """Replace Keras's sum of the losses of ``add_loss``, on a tower."""
    total = original(model, loss)
    tower = tower_lib.with_a_share()
    if tower is None or not tower.average:
        return total
    if tower.values.value_of(loss).rows is None:
        return total
    # The tower's rows are a part of the sum.
    return tf.math.divide_no_nan(total, tf.cast(tower.share, total.dtype))


def scaled_loss(original: Callable[[Any], Any], value: Any) -> Any:
    """Replace how Keras divides a loss by the replicas, and multiplies it."""
    # A part of the batch is only what a replica has: in a custom loop, since
    # within a step of ``fit`` the strategy reports one replica.
    across = tf.distribute.in_cross_replica_context()
    if across and contract.in_force() is not None:
        return value
    return original(value)


def apply_mask(
    original: Callable,
    sample_weight: tf.Tensor | None,
    mask: tf.Tensor | None,
    dtype: Any,
    reduction: str | None,
) -> tf.Tensor | None:
    """Replace ``apply_mask``, by which Keras weights samples, on a tower."""
    tower = tower_lib.with_a_share()
    if (
        tower is None
        or not tower.average
        or mask is None
        or reduction not in ("mean", "sum_over_batch_size")
    ):
        return original(sample_weight, mask, dtype=dtype, reduction=reduction)
    # Keras weights valid entries by total / valid, so that the mean over all
    # entries becomes the mean over the valid ones. On a tower both numbers have
    # to be those of the global batch.
    weights = original(sample_weight, mask, dtype=dtype, reduction="sum")
    total = _over_towers(tf.cast(tf.size(mask), dtype))
    valid = _over_towers(tf.reduce_sum(tf.cast(mask, dtype)))
    return weights * tf.math.divide_no_nan(total, valid)


def values_of_metric(
    original: Callable,
    values: Any,
    sample_weight: Any,
    reduce_fn: Callable,
    dtype: Any,
) -> Any:
    """Replace how ``Mean`` and ``Sum`` reduce their values on a tower."""
    # On one device a scalar, such as a loss, counts once per batch. That of a
    # tower describes its part of the batch, so the tower's share weights it.
    tower = tower_lib.with_a_share()
    if tower is not None:
        values = tf.convert_to_tensor(values)
        if values.shape.rank == 0:
            values = tower.note_loss(values)
        if values.shape.rank == 0 and sample_weight is None:
            values = tf.cast(values, dtype)
            sample_weight = share = tf.cast(tower.share, dtype)
            if not tower.average:
                values = tf.math.divide_no_nan(values, share)
    return original(values, sample_weight, reduce_fn, dtype)


def _over_towers(count: tf.Tensor) -> tf.Tensor:
    return tf.distribute.get_replica_context().sum_counts(count)
