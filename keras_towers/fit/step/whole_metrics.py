"""Metrics that are no sums, updated from the global batch on every tower.

The state of most metrics is a sum, to which each tower adds its part. Others
are no sums, such as the largest error, a moving average or the mean of a
batch's F1. The analysis of a step finds them, and the step is traced again:
every tower updates them with the rows of all towers, in order, and so has their
state on one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat, settings
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.context.tower import MetricUpdate
from keras_towers.fit.weights import variables as variables_lib

_CONTAINERS = (compat.CompileMetrics, compat.MetricsList)


def method(metric: keras.metrics.Metric, update: Callable[..., Any]) -> Any:
    """Replace ``update_state`` of a metric on a tower."""
    tower = tower_lib.with_a_share()
    if tower is None or tower.updates_metric or isinstance(metric, _CONTAINERS):
        return update

    @functools.wraps(update)
    def updated(*args: Any, **kwargs: Any) -> Any:
        given = args, kwargs
        leaves = tf.nest.flatten(given, expand_composites=True)
        tensors = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]
        tower.metric_updates.append(MetricUpdate(metric, tensors))
        share, rows, tower.updates_metric = tower.share, tower.rows, True
        try:
            if is_whole(metric):
                given = _gathered(given, f"metric {metric.name!r}")
                # The batch is that of one device now.
                tower.share = tower.rows = None
            return update(*given[0], **given[1])
        finally:
            tower.share, tower.rows, tower.updates_metric = share, rows, False

    return updated


def is_whole(metric: keras.metrics.Metric) -> bool:
    """Whether towers update a metric from the global batch."""
    owners = [variable._value for variable in metric.variables]
    return bool(owners) and all(
        isinstance(owner, variables_lib.TowerVariable)
        and owner.merge == variables_lib.WHOLE
        for owner in owners
    )


def can_be_gathered(update: MetricUpdate, ranks: int) -> bool:
    """Whether towers of so many ranks can gather a metric's update."""
    if not update.tensors:
        return False
    size = 0
    for tensor in update.tensors:
        each = tensor.shape[1:].num_elements() if tensor.shape.rank else None
        if each is None or tensor.dtype in (tf.resource, tf.variant):
            return False
        if tensor.dtype == tf.string and ranks > 1:
            return False
        size += each * tensor.dtype.size
    return size <= settings.METRIC_BYTES


def set_merge(
    metrics: Iterable[keras.metrics.Metric], merge: str, anew: bool
) -> None:
    """Let the towers hold sums of metrics, or each the whole, maybe anew."""
    with tf.init_scope():
        for metric in metrics:
            for variable in metric.variables:
                variable._value.merge_as(merge)
            if anew:
                metric.reset_state()


def _gathered(given: Any, what: str) -> Any:
    from keras_towers.fit.step import gather as gather_lib

    context = gather_lib.replica_context(what)
    if context is None:
        return given
    leaves = tf.nest.flatten(given)
    of_batch = [leaf for leaf in leaves if _has_rows(leaf)]
    masks = [compat.get_keras_mask(leaf) for leaf in of_batch]
    present = [mask for mask in masks if mask is not None]
    wholes = gather_lib.gather(context, [*of_batch, *present], what)
    of_masks = iter(wholes[len(of_batch) :])
    found = {}
    for leaf, mask, whole in zip(of_batch, masks, wholes, strict=False):
        found[id(leaf)] = whole
        if mask is not None:
            compat.set_keras_mask(whole, next(of_masks))
    return tf.nest.map_structure(lambda leaf: found.get(id(leaf), leaf), given)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and bool(leaf.shape.rank)
