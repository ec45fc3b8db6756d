"""BytePS's callbacks for Keras, under the same names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import byteps.tensorflow as bps
import numpy as np

from keras_towers.byteps.functions import (
    broadcast_variables,
    push_pull,
    transport,
)
from keras_towers.dropin import metrics, rates, start
from keras_towers.dropin.engine import Engine
from keras_towers.dropin.rates import LearningRateScheduleCallback

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class _Engine:
    """BytePS, as callbacks use it."""

    def rank(self) -> int:
        return bps.rank()

    def size(self) -> int:
        return bps.size()

    def mean(self, values: np.ndarray) -> np.ndarray:
        return push_pull(values, name="MetricAverageCallback").numpy()

    def gather_objects(self, value: Any) -> list[Any]:
        return transport().gather_objects(value)

    def broadcast_variables(
        self, variables: Sequence[Any], root_rank: int
    ) -> None:
        broadcast_variables(variables, root_rank)


class BroadcastGlobalVariablesCallback(start.BroadcastGlobalVariablesCallback):
    """Broadcasts weights and optimizer state from one rank before training.

    As in ``keras_towers.dropin.start``, over BytePS.
    """

    engine: Engine = _Engine()


class MetricAverageCallback(metrics.MetricAverageCallback):
    """Replaces an epoch's logs with their mean over the ranks.

    As in ``keras_towers.dropin.metrics``, over BytePS.
    """

    engine: Engine = _Engine()


class LearningRateWarmupCallback(rates.LearningRateWarmupCallback):
    """Warms the learning rate up to ``initial_lr``.

    As in ``keras_towers.dropin.rates``, over BytePS.
    """

    engine: Engine = _Engine()
