"""BytePS's callbacks for Keras, under the same names."""

from keras_towers.engines.dropin.common_callbacks import (
    BroadcastGlobalVariablesCallback as BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback as LearningRateScheduleCallback,
    LearningRateWarmupCallback as LearningRateWarmupCallback,
    MetricAverageCallback as MetricAverageCallback,
)
