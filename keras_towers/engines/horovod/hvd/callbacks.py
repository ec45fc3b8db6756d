"""Horovod's callbacks for Keras, under the same names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from keras_towers.engines.dropin.learning_rate_callbacks import (
    RateSchedule,
    WarmUp,
)
from keras_towers.engines.dropin.sync_callbacks import (
    BroadcastGlobalVariablesCallback as BroadcastGlobalVariablesCallback,
    MetricAverageCallback as MetricAverageCallback,
)
from keras_towers.errors import TowerError


class LearningRateScheduleCallback(RateSchedule):
    """Sets the learning rate to ``initial_lr * multiplier`` in some epochs.

    Args:
        initial_lr: the learning rate to multiply.
        multiplier: a function of the epoch, or a number by which the learning
            rate is multiplied every epoch.
        start_epoch: the first epoch whose rate is set.
        end_epoch: the first later epoch whose rate is not set; None: never.
        staircase: set the rate only at the beginning of an epoch. Otherwise
            set it at every batch, and pass fractional epochs to the multiplier.
        momentum_correction: correct the optimizer's momentum, if it has any.
        steps_per_epoch: the number of batches per epoch; None: as in ``fit``.

    Raises:
        TowerError: ``initial_lr`` is missing.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ):
        _check_rate(initial_lr)
        super().__init__(
            multiplier
            if callable(multiplier)
            else lambda epoch: multiplier ** (epoch - start_epoch),
            initial_lr,
            start_epoch,
            end_epoch,
            staircase,
            momentum_correction,
            steps_per_epoch,
        )


class LearningRateWarmupCallback(WarmUp):
    """Warms the learning rate up to ``initial_lr``.

    It grows linearly with every batch, from ``initial_lr / size()`` to
    ``initial_lr`` at the end of the last warm-up epoch.

    Args:
        initial_lr: the learning rate after the warm-up.
        warmup_epochs: the number of warm-up epochs.
        momentum_correction: as for ``LearningRateScheduleCallback``.
        steps_per_epoch: the number of batches per epoch; None: as in ``fit``.
        verbose: 1: print a message on rank 0 when the warm-up is over.

    Raises:
        TowerError: ``initial_lr`` is missing.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ):
        _check_rate(initial_lr)
        super().__init__(
            initial_lr,
            warmup_epochs,
            momentum_correction,
            steps_per_epoch,
            verbose,
        )


def _check_rate(initial_lr: float | None) -> None:
    if initial_lr is None:
        raise TowerError(
            "initial_lr is None: give the learning rate to be multiplied."
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
