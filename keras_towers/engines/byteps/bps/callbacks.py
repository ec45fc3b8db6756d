"""BytePS's callbacks for Keras, under the same names."""

from __future__ import annotations

from keras_towers.engines.byteps.byteps_transport import transport
from keras_towers.engines.dropin import callbacks
from keras_towers.engines.dropin.callbacks import LearningRateScheduleCallback

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


class LearningRateWarmupCallback(callbacks.LearningRateWarmupCallback):
    _transport = staticmethod(transport)
