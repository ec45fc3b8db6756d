"""Horovod's callbacks for Keras, under the same names."""

from keras_towers.engines.dropin.common_callbacks import (
    BestModelCheckpoint as BestModelCheckpoint,
    BroadcastGlobalVariablesCallback as BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback as LearningRateScheduleCallback,
    LearningRateWarmupCallback as LearningRateWarmupCallback,
    MetricAverageCallback as MetricAverageCallback,
)
