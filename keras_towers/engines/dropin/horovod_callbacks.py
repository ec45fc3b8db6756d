"""Horovod's callbacks for Keras, and the broadcast of scripts without one.

They give ranks the same initial state and the same logs, schedule the learning
rate, and keep the best model. ``byteps.bps.callbacks`` has those of BytePS that
differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from keras_towers.engines.dropin import connection, variable_key
from keras_towers.engines.dropin.gradient_reducer import reducer_of
from keras_towers.fit.calls import model_building
from keras_towers.fit.calls.callback_effects import (
    SyncedCallbacks,
    refusing_ends,
)
from keras_towers.fit.calls.callback_roles import listed, with_added
from keras_towers.fit.context.identity_dict import IdentityKey
from keras_towers.fit.weights import agreement, model_state as state_lib
from keras_towers.fit.weights.copies import native
from keras_towers.fit.weights.model_state import optimizers_in
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.notices import logger
from keras_towers.foundation.object_types import Logs, Structure, Variable
from keras_towers.jobs.rendezvous import rank_checks


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcasts weights and optimizer state from one rank before training.

    Horovod's own callback broadcasts after the first batch. Here that happens
    only with ``run_eagerly``, to a model that is not built or has its own
    ``train_step``: any other model is built before training, by tracing a step
    if necessary. Seeds of random layers are not broadcast.

    Args:
        root_rank: the rank whose values are used.
        device: the device on which values are broadcast.
        local_variables: a variable or variables that are not broadcast.

    Raises:
        TowerError: ``local_variables`` are not variables.
    """

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: Variable | Iterable[Variable] | None = None,
    ):
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self._local: set[IdentityKey[tf.Variable]] = set()
        self._done = False
        excluded = [] if local_variables is None else local_variables
        for variable in keras.tree.flatten(excluded):
            if not isinstance(variable, tf.Variable | keras.Variable):
                raise TowerError(
                    "local_variables takes a Keras or TensorFlow variable, or "
                    f"a list of them, but got {variable!r}."
                )
            self.register_local_var(variable)

    def register_local_var(self, var: Variable) -> None:
        """Exclude a variable from the broadcast."""
        self._local.add(variable_key(var))

    def on_train_begin(self, logs: Logs = None) -> None:
        model = self.model
        if self._done or connection().size == 1:
            return
        optimizer = model.optimizer
        if optimizer is not None and model_building.uses_optimizer(
            model, "fit"
        ):
            if not optimizer.built:
                state_lib.build_optimizer(optimizer, model.trainable_variables)
            self._broadcast()
        elif not model.run_eagerly:
            self._broadcast_at_first_batch(model.train_function)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if not self._done and connection().size > 1:
            self._broadcast()

    def _broadcast_at_first_batch(self, train_function: Callable) -> None:
        model = self.model

        def first(iterator: tf.data.Iterator) -> Structure:
            model.train_function = train_function
            model_building.make_variables(model, "fit", iterator.element_spec)
            self._broadcast()
            return train_function(iterator)

        model.train_function = first

    def _broadcast(self) -> None:
        variables = [
            native(variable)
            for variable in _trained_state(self.model)
            if variable_key(variable) not in self._local
        ]
        transport = connection()
        transport.note_wait("the broadcast of initial state")
        with tf.device(self.device):
            agreement.broadcast(transport, variables, self.root_rank)
        transport.note_wait("")
        self._done = True


class _SameStart(BroadcastGlobalVariablesCallback):
    """Gives ranks the variables of rank 0 if they begin with other weights.

    Each would go on to train a model of its own, with the gradients of all.
    """

    def __init__(self):
        super().__init__(0)

    def on_train_begin(self, logs: Logs = None) -> None:
        if model_building.layers_are_built(self.model):
            self._broadcast()
        else:
            super().on_train_begin(logs)

    def _broadcast(self) -> None:
        transport, model = connection(), self.model
        for reducer in map(reducer_of, optimizers_in(model.optimizer)):
            if reducer:
                self._local |= reducer.all_local_keys()
        digests = [
            agreement.digest_of(weight)
            for weight in model.trainable_variables
            if variable_key(weight) not in self._local
        ]
        ranks = rank_checks.gather(transport, digests, "compares its weights")
        self._done = all(others == digests for others in ranks)
        if self._done:
            return
        if transport.rank == 0:
            logger.warning(
                "the ranks begin with different weights of model "
                f"{model.name!r}: all use the weights of rank 0. To begin "
                "alike, give fit BroadcastGlobalVariablesCallback(0), or seed "
                "all ranks alike."
            )
        super()._broadcast()


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces an epoch's logs with their mean over the ranks.

    Put it before callbacks that read the logs, such as ``ReduceLROnPlateau``
    and ``TensorBoard``; the history and the progress bar always come later.
    Every rank has the same weight, so this is the mean over all examples only
    if all ranks have the same number of examples.

    Args:
        device: ignored: the CPU computes the mean.
    """

    def __init__(self, device: str = ""):
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Average the logs in place; ``TowerError`` if names differ."""
        transport = connection()
        if transport.size == 1:
            return
        logs = {} if logs is None else logs
        values = {name: np.asarray(logs[name], "float64") for name in logs}
        transport.note_wait("the mean of an epoch's logs")
        ranks = rank_checks.gather(transport, values, "averages its logs")
        transport.note_wait("")
        for rank, rank_logs in enumerate(ranks):
            odd = ", ".join(sorted(rank_logs.keys() ^ ranks[0].keys()))
            if odd:
                raise TowerError(
                    f"ranks 0 and {rank} do not have the same logs to average: "
                    f"they differ in {odd}. Use the same metrics, validation "
                    "and logging callbacks on every rank, or put callbacks of "
                    "a single rank after MetricAverageCallback."
                )
        for name in logs:
            mean = np.mean([rank_logs[name] for rank_logs in ranks], axis=0)
            logs[name] = mean if mean.ndim else float(mean)


@contextlib.contextmanager
def sync_callbacks(arguments: dict[str, Any]) -> Iterator[None]:
    """Make callbacks that some ranks lack act for all ranks in this block.

    A callback that all ranks have acts on each rank, as in Horovod: the ranks
    need not be at the same batch of their epochs.

    Args:
        arguments: the arguments of ``fit``, which are changed.
    """
    transport = connection()
    callbacks = listed(arguments.get("callbacks"))
    names = [type(callback).__name__ for callback in callbacks]
    broadcasts = any(
        isinstance(callback, BroadcastGlobalVariablesCallback)
        for callback in callbacks
    )
    gathered = rank_checks.gather(
        transport, (names, broadcasts), "is at the beginning of fit"
    )
    ranks = [names for names, _ in gathered]
    odd = [
        callback
        for callback, name in zip(callbacks, names, strict=True)
        if len({rank_names.count(name) for rank_names in ranks}) > 1
    ]
    # Each rank validates separately, and maybe only some ranks do.
    moved = {"on_test.*": "on_epoch_end"}
    last = SyncedCallbacks(
        transport, odd, _trained_state, moved=moved, leave_together=False
    )
    arguments["callbacks"] = with_added(arguments.get("callbacks"), last)
    if not any(broadcasts for _, broadcasts in gathered):
        added = with_added(arguments["callbacks"], _SameStart())
        arguments["callbacks"] = added
    with refusing_ends(callbacks), last.watching():
        yield


def _trained_state(model: keras.Model) -> list[keras.Variable]:
    """The weights of a model and the state of its optimizers."""
    state = state_lib.collect(model)
    return [*state.weights, *state.optimizer_variables]


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to ``initial_lr * multiplier`` in some epochs.

    Momentum is corrected as described by Goyal et al. ("Accurate, Large
    Minibatch SGD", 2017): the momentum slots hold earlier gradients times the
    learning rate, and are scaled with it when it changes.

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

    # Whether None stands for the optimizer's rate when training begins.
    _rate_is_optional = False

    def __init__(
        self,
        initial_lr: float | None,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ):
        if initial_lr is None and not self._rate_is_optional:
            raise TowerError(
                "initial_lr is None: give the learning rate that the callback "
                "multiplies."
            )
        super().__init__()
        self.multiplier: Callable[[float], float] = (
            multiplier
            if callable(multiplier)
            else lambda epoch: multiplier ** (epoch - start_epoch)
        )
        self._given_lr = initial_lr
        self.initial_lr: float = initial_lr or 0.0
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch: int = steps_per_epoch or 0
        self.current_epoch: int = start_epoch
        # One call per batch instead of two per variable.
        self._scale = tf.function(_scale, autograph=False)

    def on_train_begin(self, logs: Logs = None) -> None:
        optimizer = _inner(self.model.optimizer)
        if not isinstance(optimizer.learning_rate, keras.Variable):
            raise TowerError(
                f"{type(self).__name__} cannot set the learning rate of "
                f"{optimizer.name!r}, which is a schedule or a function: "
                "create the optimizer with a number."
            )
        if self._given_lr is None:  # A later fit begins with another rate.
            self._given_lr = self._rate()
        self.initial_lr = self._given_lr
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps") or 0
            if not self.steps_per_epoch:
                raise TowerError(
                    "the number of batches per epoch is unknown: give "
                    f"{type(self).__name__} steps_per_epoch."
                )

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        if self.current_epoch < self.start_epoch:
            return
        if self.end_epoch is not None and self.current_epoch >= self.end_epoch:
            return
        if not self.staircase:
            self._set(self.current_epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
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
        initial_lr: float | None,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ):
        def multiplier(epoch: float) -> float:
            # One batch ahead, so that an epoch ends on a round number.
            done = (epoch + 1 / self.steps_per_epoch) / warmup_epochs
            return (1 - done) / connection().size + done

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        has_ended = epoch + 1 == self.end_epoch
        if has_ended and self.verbose and connection().rank == 0:
            print(
                f"\nEpoch {epoch + 1}: warm-up is over, the learning rate is "
                f"{self._rate():g}."
            )


def _inner(optimizer: keras.Optimizer) -> keras.Optimizer:
    """The innermost optimizer, without loss-scaling wrappers."""
    return list(optimizers_in(optimizer))[-1]


def _momenta(optimizer: keras.Optimizer) -> list[tf.Variable]:
    """The slots that hold gradients times learning rates."""
    optimizer = _inner(optimizer)
    slots: list[Variable] = []
    if optimizer.built and isinstance(optimizer, keras.optimizers.SGD):
        slots = optimizer.momentums
    elif optimizer.built and isinstance(optimizer, keras.optimizers.RMSprop):
        slots = optimizer._momentums
    return [slot.value for slot in slots if slot is not None]


def _scale(variables: list[tf.Variable], factor: tf.Tensor) -> None:
    for variable in variables:
        variable.assign(variable * tf.cast(factor, variable.dtype))


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
        save_freq: int | Literal["epoch"] = "epoch",
        filepath: object = "best_model.keras",
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
