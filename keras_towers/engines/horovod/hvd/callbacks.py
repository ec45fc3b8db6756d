"""Horovod's callbacks for Keras, under the same names."""

from __future__ import annotations

from typing import Any

import keras

from keras_towers.engines.dropin.learning_rate_callbacks import (
    LearningRateScheduleCallback as LearningRateScheduleCallback,
    LearningRateWarmupCallback as LearningRateWarmupCallback,
)
from keras_towers.engines.dropin.sync_callbacks import (
    BroadcastGlobalVariablesCallback as BroadcastGlobalVariablesCallback,
    MetricAverageCallback as MetricAverageCallback,
)


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keeps the best model so far in one file.

    As in Horovod, the file name is optional and may be set later
    (``callback.filepath = "best.keras"``). Use it on rank 0 only.

    Args:
        monitor: the name in the logs to monitor.
        verbose: 1: print a message when a model is saved.
        mode: ``"min"``, ``"max"`` or ``"auto"``.
        save_freq: ``"epoch"``, or a number of batches.
        filepath: where the model is saved, a ``.keras`` or ``.h5`` file.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: Any = "best_model.keras",
    ):
        super().__init__(
            filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=False,
            mode=mode,
            save_freq=save_freq,
        )
