"""``Mean`` and ``Sum`` metrics of one scalar per batch, such as a loss.

On one device such a scalar counts once per batch. A tower's scalar describes
its part of the batch, so it is weighted by the tower's share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_towers.fit.context import tower as tower_lib


def update_state(
    original: Callable,
    metric: Any,
    values: Any,
    sample_weight: Any | None = None,
) -> Any:
    """Replace ``update_state`` of ``Mean`` and ``Sum`` on a tower."""
    tower = tower_lib.with_a_share()
    if tower is not None and sample_weight is None:
        values = tf.convert_to_tensor(values)
        if values.shape.rank == 0:
            values = tf.cast(values, metric.dtype)
            sample_weight = share = tf.cast(tower.share, metric.dtype)
            if not tower.average:
                values = tf.math.divide_no_nan(values, share)
    return original(metric, values, sample_weight=sample_weight)
