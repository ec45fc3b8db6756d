"""BytePS's callbacks for Keras, under the same names."""

from __future__ import annotations

from keras_towers.engines.byteps.byteps_transport import transport
from keras_towers.engines.dropin import common_callbacks
from keras_towers.engines.dropin.common_callbacks import (
    LearningRateScheduleCallback as LearningRateScheduleCallback,
)


class BroadcastGlobalVariablesCallback(
    common_callbacks.BroadcastGlobalVariablesCallback
):
    _transport = staticmethod(transport)


class MetricAverageCallback(common_callbacks.MetricAverageCallback):
    _transport = staticmethod(transport)


class LearningRateWarmupCallback(common_callbacks.LearningRateWarmupCallback):
    _transport = staticmethod(transport)
