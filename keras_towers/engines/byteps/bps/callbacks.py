"""BytePS's callbacks for Keras, under the same names."""

from __future__ import annotations

from keras_towers.engines.byteps.bps.functions import transport
from keras_towers.engines.dropin import callbacks, rates
from keras_towers.engines.dropin.rates import LearningRateScheduleCallback

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(
    callbacks.BroadcastGlobalVariablesCallback
):
    _transport = staticmethod(transport)


class MetricAverageCallback(callbacks.MetricAverageCallback):
    _transport = staticmethod(transport)


class LearningRateWarmupCallback(rates.LearningRateWarmupCallback):
    _transport = staticmethod(transport)
