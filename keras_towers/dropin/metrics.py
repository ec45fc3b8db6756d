"""Metrics of an epoch, averaged over the ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers.dropin.engine import Engine
from keras_towers.errors import TowerError


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces an epoch's logs with their mean over the ranks.

    Put it before callbacks that read the logs, such as ``ReduceLROnPlateau``
    and ``TensorBoard``; the history and the progress bar are always later.
    Every rank has the same weight, so this is the mean over all examples only
    if every rank has equally many.

    Args:
        device: the device on which the values are reduced.
    """

    engine: Engine

    def __init__(self, device: str = ""):
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average the logs in place.

        Raises:
            TowerError: the names in the logs differ between ranks.
        """
        if not logs or self.engine.size() == 1:
            return
        names = sorted(logs)
        self._check(names)
        values = [np.asarray(logs[name], "float64") for name in names]
        with tf.device(self.device):
            means = self.engine.mean(
                np.concatenate([value.reshape(-1) for value in values])
            )
        for name, value in zip(names, values, strict=True):
            mean, means = means[: value.size], means[value.size :]
            logs[name] = (
                float(mean[0]) if value.ndim == 0 else mean.reshape(value.shape)
            )

    def _check(self, names: list[str]) -> None:
        everyone = self.engine.gather_objects(names)
        for rank, others in enumerate(everyone):
            if others != everyone[0]:
                odd = ", ".join(sorted({*others} ^ {*everyone[0]}))
                raise TowerError(
                    f"ranks 0 and {rank} do not have the same logs to average: "
                    f"they differ in {odd}. Use the same metrics, validation "
                    "and logging callbacks on every rank, or put callbacks of "
                    "a single rank after MetricAverageCallback."
                )
