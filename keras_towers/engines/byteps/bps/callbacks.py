"""BytePS's callbacks for Keras, under the same names."""

from keras_towers.engines.dropin.learning_rate_callbacks import (
    LearningRateScheduleCallback as LearningRateScheduleCallback,
    LearningRateWarmupCallback as LearningRateWarmupCallback,
)
from keras_towers.engines.dropin.sync_callbacks import (
    BroadcastGlobalVariablesCallback as BroadcastGlobalVariablesCallback,
    MetricAverageCallback as MetricAverageCallback,
)
