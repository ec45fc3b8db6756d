"""BytePS's callbacks for Keras, under the same names.

The learning rate comes last, and may be left out.
"""

from __future__ import annotations

from collections.abc import Callable

from keras_towers.engines.dropin import horovod_callbacks as shared
from keras_towers.engines.dropin.horovod_callbacks import (
    BroadcastGlobalVariablesCallback as BroadcastGlobalVariablesCallback,
    MetricAverageCallback as MetricAverageCallback,
)


class LearningRateScheduleCallback(shared.LearningRateScheduleCallback):
    """Sets the learning rate to ``initial_lr * multiplier`` in some epochs.

    Args:
        multiplier: a function of the epoch, or a number, which is the same in
            all of these epochs.
        start_epoch: the first epoch whose rate is set.
        end_epoch: the first later epoch whose rate is not set; None: never.
        staircase: set the rate only at the beginning of an epoch, as for a
            number. Otherwise set it at every batch, and pass fractional epochs
            to the multiplier.
        momentum_correction: correct the optimizer's momentum, if it has any.
        steps_per_epoch: the number of batches per epoch; None: as in ``fit``.
        initial_lr: the learning rate to multiply; None: the optimizer's when
            training first begins.
    """

    _rate_is_optional = True

    def __init__(
        self,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        initial_lr: float | None = None,
    ):
        super().__init__(
            initial_lr,
            multiplier if callable(multiplier) else lambda epoch: multiplier,
            start_epoch,
            end_epoch,
            staircase or not callable(multiplier),
            momentum_correction,
            steps_per_epoch,
        )


class LearningRateWarmupCallback(shared.LearningRateWarmupCallback):
    """Warms the learning rate up to ``initial_lr``.

    It grows linearly with every batch, from ``initial_lr / size()`` to
    ``initial_lr`` at the end of the last warm-up epoch.

    Args:
        warmup_epochs: the number of warm-up epochs.
        momentum_correction: as for ``LearningRateScheduleCallback``.
        steps_per_epoch: the number of batches per epoch; None: as in ``fit``.
        verbose: 1: print a message on rank 0 when the warm-up is over.
        initial_lr: the learning rate after the warm-up; None: the optimizer's
            when training first begins.
    """

    _rate_is_optional = True

    def __init__(
        self,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
        initial_lr: float | None = None,
    ):
        super().__init__(
            initial_lr,
            warmup_epochs,
            momentum_correction,
            steps_per_epoch,
            verbose,
        )
