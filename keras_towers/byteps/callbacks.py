"""BytePS's callbacks for Keras, under the same names."""

from __future__ import annotations

from keras_towers.byteps.functions import transport
from keras_towers.dropin import callbacks, rates
from keras_towers.dropin.rates import LearningRateScheduleCallback

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(
    callbacks.BroadcastGlobalVariablesCallback
):
    __doc__ = callbacks.BroadcastGlobalVariablesCallback.__doc__
    _transport = staticmethod(transport)


class MetricAverageCallback(callbacks.MetricAverageCallback):
    __doc__ = callbacks.MetricAverageCallback.__doc__
    _transport = staticmethod(transport)


class LearningRateWarmupCallback(rates.LearningRateWarmupCallback):
    __doc__ = rates.LearningRateWarmupCallback.__doc__
    _transport = staticmethod(transport)
