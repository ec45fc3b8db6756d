"""Horovod's callbacks for Keras, under the same names."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np

from keras_towers.dropin import metrics, rates, start
from keras_towers.dropin.engine import Engine
from keras_towers.dropin.rates import LearningRateScheduleCallback
from keras_towers.horovod.functions import (
    allgather_object,
    allreduce,
    broadcast_variables,
)

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class _Engine:
    """Horovod, as callbacks use it."""

    rank = staticmethod(hvd.rank)
    size = staticmethod(hvd.size)
    broadcast_variables = staticmethod(broadcast_variables)

    def gather_objects(self, value: Any) -> list[Any]:
        return allgather_object(value)

    def mean(self, values: np.ndarray) -> np.ndarray:
        return allreduce(
            values, op=hvd.Average, name="MetricAverageCallback"
        ).numpy()


class BroadcastGlobalVariablesCallback(start.BroadcastGlobalVariablesCallback):
    """Broadcasts weights and optimizer state from one rank before training.

    As in ``keras_towers.dropin.start``, over Horovod.
    """

    engine: Engine = _Engine()


class MetricAverageCallback(metrics.MetricAverageCallback):
    """Replaces an epoch's logs with their mean over the ranks.

    As in ``keras_towers.dropin.metrics``, over Horovod.
    """

    engine: Engine = _Engine()


class LearningRateWarmupCallback(rates.LearningRateWarmupCallback):
    """Warms the learning rate up to ``initial_lr``.

    As in ``keras_towers.dropin.rates``, over Horovod.
    """

    engine: Engine = _Engine()


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
