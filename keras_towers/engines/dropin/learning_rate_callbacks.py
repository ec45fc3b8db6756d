"""Callbacks that schedule the learning rate, and correct momentum with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_towers.engines.dropin import connection
from keras_towers.errors import TowerError
from keras_towers.fit.weights.model_state import optimizers_in


class RateSchedule(keras.callbacks.Callback):
    """Sets the learning rate to ``initial_lr * multiplier(epoch)``.

    Horovod's and BytePS's callbacks differ in the order of their arguments, and
    in what a multiplier means that is a number.

    Momentum is corrected as described by Goyal et al. ("Accurate, Large
    Minibatch SGD", 2017): the momentum slots hold earlier gradients times the
    learning rate, and are scaled with it when it changes.

    Args:
        multiplier: a function of the epoch.
        initial_lr: the learning rate to multiply; None: the optimizer's when
            training begins.
        start_epoch: the first epoch whose rate is set.
        end_epoch: the first later epoch whose rate is not set; None: never.
        staircase: set the rate only at the beginning of an epoch. Otherwise
            set it at every batch, and pass fractional epochs to the multiplier.
        momentum_correction: correct the optimizer's momentum, if it has any.
        steps_per_epoch: the number of batches per epoch; None: as in ``fit``.
    """

    def __init__(
        self,
        multiplier: Callable[[float], float],
        initial_lr: float | None,
        start_epoch: int,
        end_epoch: int | None,
        staircase: bool,
        momentum_correction: bool,
        steps_per_epoch: int | None,
    ):
        super().__init__()
        self.multiplier = multiplier
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch: int = steps_per_epoch or 0
        self.current_epoch: int = start_epoch
        # One call per batch instead of two per variable.
        self._scale = tf.function(_scale, autograph=False)

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = _inner(self.model.optimizer)
        if not isinstance(optimizer.learning_rate, keras.Variable):
            raise TowerError(
                f"{type(self).__name__} cannot set the learning rate of "
                f"{optimizer.name!r}, which is a schedule or a function: "
                "create the optimizer with a number."
            )
        if self.initial_lr is None:
            self.initial_lr = self._rate()
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps") or 0
            if not self.steps_per_epoch:
                raise TowerError(
                    "the number of batches per epoch is unknown: give "
                    f"{type(self).__name__} steps_per_epoch."
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.current_epoch < self.start_epoch:
            return
        if self.end_epoch is not None and self.current_epoch >= self.end_epoch:
            return
        if not self.staircase:
            self._set(self.current_epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return float(_inner(self.model.optimizer).learning_rate.numpy())

    def _set(self, epoch: float) -> None:
        assert self.initial_lr is not None
        old = self._rate()
        _inner(self.model.optimizer).learning_rate = (
            self.initial_lr * self.multiplier(epoch)
        )
        new = self._rate()
        if self.momentum_correction and old != new and old != 0:
            momenta = _momenta(self.model.optimizer)
            if momenta:
                self._scale(momenta, tf.constant(new / old))


class WarmUp(RateSchedule):
    """Warms the learning rate up to ``initial_lr``.

    It grows linearly with every batch, from ``initial_lr / size()`` to
    ``initial_lr`` at the end of the last warm-up epoch.

    Args:
        initial_lr: as for ``RateSchedule``: the learning rate after the
            warm-up.
        warmup_epochs: the number of warm-up epochs.
        momentum_correction: as for ``RateSchedule``.
        steps_per_epoch: the number of batches per epoch; None: as in ``fit``.
        verbose: 1: print a message on rank 0 when the warm-up is over.
    """

    def __init__(
        self,
        initial_lr: float | None,
        warmup_epochs: int,
        momentum_correction: bool,
        steps_per_epoch: int | None,
        verbose: int,
    ):
        def multiplier(epoch: float) -> float:
            # One batch ahead, so that an epoch ends on a round number.
            done = (epoch + 1 / self.steps_per_epoch) / warmup_epochs
            return (1 - done) / connection().size + done

        super().__init__(
            multiplier,
            initial_lr,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        over = epoch + 1 == self.end_epoch
        if over and self.verbose and connection().rank == 0:
            print(
                f"\nEpoch {epoch + 1}: warm-up is over, the learning rate is "
                f"{self._rate():g}."
            )


def _inner(optimizer: Any) -> Any:
    """The innermost optimizer, without loss-scaling wrappers."""
    return list(optimizers_in(optimizer))[-1]


def _momenta(optimizer: Any) -> list[tf.Variable]:
    """The slots that hold gradients times learning rates."""
    optimizer = _inner(optimizer)
    slots: list[Any] = []
    if optimizer.built and isinstance(optimizer, keras.optimizers.SGD):
        slots = optimizer.momentums
    elif optimizer.built and isinstance(optimizer, keras.optimizers.RMSprop):
        slots = optimizer._momentums
    return [slot.value for slot in slots if slot is not None]


def _scale(variables: list[tf.Variable], factor: tf.Tensor) -> None:
    for variable in variables:
        variable.assign(variable * tf.cast(factor, variable.dtype))
