"""What Keras itself computes from several examples of a batch at once.

Some losses and image layers of Keras compare, mix or count the examples of a
batch. With ``exact=True`` every tower computes them from the global batch, as
one device does, and goes on with its own rows; otherwise the user is told.
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
from keras_towers.fit.step import gather as gather_lib

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
    if loss.fn is keras.losses.circle:
        why = "compares the examples of a batch"
    elif loss.fn in _OVER_AXES and _has_rows(
        loss._fn_kwargs.get("axis"), y_pred
    ):
        why = "is a ratio of sums over a batch"
    else:
        return original(loss, y_true, y_pred)

    def compute(values: Any) -> Any:
        return original(loss, *values)

    return _computed(compute, (y_true, y_pred), f"loss {loss.name!r}", why)


def image_layer(
    original: Callable[..., Any], layer: Any, data: Any, training: Any = True
) -> Any:
    """Replace ``call`` of Keras's layers that augment images on a tower."""
    images = data["images"] if isinstance(data, dict) else data
    why = _LAYERS.get(type(layer))
    if why is None or not training or not layer._is_batched(images):
        return original(layer, data, training=training)

    def compute(values: Any) -> Any:
        return original(layer, values, training=training)

    what = f"layer {layer.name!r}"
    if type(layer) is keras.layers.AugMix and tower_lib.with_a_share():
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

    why = "pads all examples of a batch to the longest of them"
    remedy = "Give it output_sequence_length"
    return _computed(compute, inputs, f"layer {layer.name!r}", why, remedy)


def _has_rows(axis: Any, y_pred: Any) -> bool:
    """Whether the axes of a loss include that of the examples."""
    rank = len(y_pred.shape)
    return axis is None or 0 in {a % rank for a in tf.nest.flatten(axis)}


def _computed(
    compute: Callable[[Any], Any],
    values: Any,
    what: str,
    why: str,
    remedy: str = "",
) -> Any:
    """Compute a tower's rows from the global batch, or tell that it is not.

    Args:
        compute: takes what ``values`` are, of any number of examples.
        values: a structure of the tower's tensors of shape [rows, ...].
        what: what is computed, for messages.
        why: what couples examples, for messages.
        remedy: what else the user can do about it.
    """
    strategy, tower = contract.in_force(), tower_lib.with_a_share()
    if strategy is None or tower is None:
        return compute(values)
    config = strategy._components.config
    obstacle = _obstacle(config, values)
    if obstacle is not None:
        told.differs(
            "couples",
            what,
            f"{what} {why}, and each tower has only its share of the global "
            "batch: the results differ from those of one device. "
            f"{'. '.join(filter(None, (obstacle, remedy)))}.",
            once=("couples", what),
        )
        return compute(values)
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
    strings = any(leaf.dtype == tf.string for leaf in tf.nest.flatten(values))
    if strings and config.transport.size > 1:
        return "exact=True cannot change that, as ranks exchange no strings"
    return None


def _own(result: Any, rows: Rows) -> Any:
    """A tower's rows of what was computed from the global batch."""
    if not result.shape.rank:
        return result
    own = rows.own(result)
    mask = compat.get_keras_mask(result)
    if mask is not None:
        compat.set_keras_mask(own, rows.own(mask))
    return own
