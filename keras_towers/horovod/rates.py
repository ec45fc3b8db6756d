"""Learning rates that change with the epoch, with momentum corrected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to ``initial_lr * multiplier`` in some epochs.

    Momentum is corrected as Goyal et al. describe ("Accurate, Large Minibatch
    SGD", 2017): a momentum of Keras holds earlier gradients times the learning
    rate of their time, so when that changes the momentum is multiplied by new
    over old. Horovod scales the factor ``optimizer.momentum`` for a batch, to
    the same effect; Keras 3 has it as a constant in the compiled step.

    Args:
        initial_lr: the learning rate that is multiplied.
        multiplier: a function of the epoch, or a number: the learning rate is
            then multiplied by it every epoch.
        start_epoch: the first epoch that is changed.
        end_epoch: the first epoch that no longer is; None: all are.
        staircase: change at the beginning of an epoch. Otherwise at every
            batch, and the multiplier gets fractions of epochs.
        momentum_correction: correct the momentum of an optimizer that has one.
        steps_per_epoch: the batches of an epoch; None asks Keras.

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
        super().__init__()
        if initial_lr is None:
            raise TowerError(
                "initial_lr is None: give the learning rate that is to be "
                "multiplied."
            )
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch or 0
        self.current_epoch = start_epoch
        # As one function it is a call for a batch, not two for a variable.
        self._scale = tf.function(_scale, autograph=False)
        self.multiplier = (
            multiplier
            if callable(multiplier)
            else lambda epoch: multiplier ** (epoch - start_epoch)
        )

    def on_train_begin(self, logs: Any = None) -> None:
        """See that the learning rate can be set, and count the batches.

        Raises:
            TowerError: it cannot, or the number of batches is not known.
        """
        optimizer = _inner(self.model.optimizer)
        if not isinstance(optimizer.learning_rate, keras.Variable):
            raise TowerError(
                f"{type(self).__name__} sets the learning rate, which "
                f"{optimizer.name!r} has as a schedule or a function: make the "
                "optimizer with a number."
            )
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps") or 0
            if not self.steps_per_epoch:
                raise TowerError(
                    "the number of batches of an epoch is not known: give "
                    f"{type(self).__name__} steps_per_epoch."
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate where it changes."""
        if self.current_epoch < self.start_epoch:
            return
        if self.end_epoch is not None and self.current_epoch >= self.end_epoch:
            return
        if not self.staircase:
            self._set(self.current_epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Put the learning rate into the logs, as ``lr``."""
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return float(_inner(self.model.optimizer).learning_rate.numpy())

    def _set(self, epoch: float) -> None:
        old = self._rate()
        _inner(self.model.optimizer).learning_rate = (
            self.initial_lr * self.multiplier(epoch)
        )
        new = self._rate()
        if self.momentum_correction and old != new and old != 0:
            momenta = _momenta(self.model.optimizer)
            if momenta:
                self._scale(momenta, tf.constant(new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / hvd.size()`` to itself.

    It grows by the same amount every batch, and at the end of the last of the
    warm-up epochs is ``initial_lr``.

    Args:
        initial_lr: the learning rate after the warm-up.
        warmup_epochs: how many epochs it takes.
        momentum_correction: as of ``LearningRateScheduleCallback``.
        steps_per_epoch: the batches of an epoch; None asks Keras.
        verbose: 1 to say on rank 0 when it is over.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ):
        def multiplier(epoch: float) -> float:
            # One batch ahead, so that an epoch ends on a round number.
            part = (epoch + 1 / self.steps_per_epoch) / warmup_epochs
            return (1 - part) / hvd.size() + part

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Say when the warm-up is over."""
        super().on_epoch_end(epoch, logs)
        if epoch + 1 == self.end_epoch and self.verbose and hvd.rank() == 0:
            print(
                f"\nEpoch {epoch + 1}: warm-up is over, the learning rate is "
                f"{self._rate():g}."
            )


def _inner(optimizer: Any) -> Any:
    """The optimizer inside those that scale the loss."""
    while getattr(optimizer, "inner_optimizer", None) is not None:
        optimizer = optimizer.inner_optimizer
    return optimizer


def _momenta(optimizer: Any) -> list[tf.Variable]:
    """The slots in which an optimizer keeps gradients times learning rates."""
    optimizer = _inner(optimizer)
    slots: list[Any] = []
    if optimizer.built and isinstance(optimizer, keras.optimizers.SGD):
        slots = optimizer.momentums
    elif optimizer.built and isinstance(optimizer, keras.optimizers.RMSprop):
        slots = compat.momenta_of_rmsprop(optimizer)
    return [slot.value for slot in slots if slot is not None]


def _scale(variables: list[tf.Variable], factor: tf.Tensor) -> None:
    for variable in variables:
        variable.assign(variable * tf.cast(factor, variable.dtype))
