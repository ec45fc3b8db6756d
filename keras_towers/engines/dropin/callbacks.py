"""Callbacks that start the ranks alike and average their logs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers import compat
from keras_towers.engines.dropin import plain, variable_key
from keras_towers.errors import TowerError
from keras_towers.fit.calls.callbacks import listed, with_added
from keras_towers.fit.calls.rank_callbacks import SyncedCallbacks
from keras_towers.fit.weights import model_state as state_lib
from keras_towers.fit.weights import rank_state
from keras_towers.rendezvous import check
from keras_towers.transport import Transport


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcasts weights and optimizer state from one rank before training.

    Horovod's own callback broadcasts after the first batch. Here only unbuilt
    models with ``run_eagerly`` are: whatever is not built yet is built by
    tracing the first step. Seeds of random layers are not broadcast.

    Args:
        root_rank: the rank whose values are used.
        device: the device on which they are broadcast.
        local_variables: a variable or variables that are not broadcast.

    Raises:
        TowerError: ``local_variables`` are not variables.
    """

    _transport: Callable[[], Transport]

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Any = None
    ):
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self._local: set[Any] = set()
        self._done: set[Any] = set()
        self._finished = False
        given = [] if local_variables is None else local_variables
        for variable in keras.tree.flatten(given):
            if not isinstance(variable, tf.Variable | keras.Variable):
                raise TowerError(
                    "local_variables takes a Keras or TensorFlow variable or a "
                    "list of them."
                )
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Exclude a variable from the broadcast."""
        self._local.add(variable_key(var))

    def on_train_begin(self, logs: Any = None) -> None:
        model = self.model
        if self._finished or self._transport().size == 1:
            return
        optimizer = model.optimizer
        layers_built = all(layer.built for layer in compat.layers_of(model))
        # A custom step may train other variables with it, or none.
        its_step = type(model).train_step is compat.TensorFlowTrainer.train_step
        if optimizer is not None and layers_built and its_step:
            if not optimizer.built:
                optimizer.build(model.trainable_variables)
            self._broadcast()
        elif not model.run_eagerly:
            self._broadcast_at_first_batch(model.train_function)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self._finished and self._transport().size > 1:
            self._broadcast()
        self._finished = True

    def _broadcast_at_first_batch(self, train_function: Callable) -> None:
        model = self.model

        @tf.autograph.experimental.do_not_convert
        def step(batch: Any) -> Any:
            # Keras uses these for inputs that are None.
            return model.train_step(
                keras.tree.map_structure(
                    lambda leaf: (
                        None
                        if isinstance(leaf, tf.experimental.Optional)
                        else leaf
                    ),
                    batch,
                )
            )

        def first(iterator: Any) -> Any:
            model.train_function = train_function
            # Creates and initializes all variables without running the step.
            tf.function(step).get_concrete_function(iterator.element_spec)
            self._broadcast()
            return train_function(iterator)

        model.train_function = first

    def _broadcast(self) -> None:
        variables = {variable_key(v): v for v in _trained(self.model)}
        new = [
            variable
            for key, variable in variables.items()
            if key not in self._done and key not in self._local
        ]
        self._done.update(variables)
        if not new:
            return
        transport = self._transport()
        transport.mark("the broadcast of initial state")
        with tf.device(self.device):
            rank_state.broadcast(
                transport, list(map(plain, new)), self.root_rank
            )
        transport.mark("")


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces an epoch's logs with their mean over the ranks.

    Put it before callbacks that read the logs, such as ``ReduceLROnPlateau``
    and ``TensorBoard``; the history and the progress bar are always later.
    Every rank has the same weight, so this is the mean over all examples only
    if every rank has equally many.

    Args:
        device: the device on which the values are reduced.
    """

    _transport: Callable[[], Transport]

    def __init__(self, device: str = ""):
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average the logs in place; ``TowerError`` if names differ."""
        transport = self._transport()
        if not logs or transport.size == 1:
            return
        names = sorted(logs)
        transport.mark("the mean of an epoch's logs")
        told = check.gather(transport, names, "averages its logs")
        for rank, others in enumerate(told):
            if others != told[0]:
                odd = ", ".join(sorted({*others} ^ {*told[0]}))
                raise TowerError(
                    f"ranks 0 and {rank} do not have the same logs to average: "
                    f"they differ in {odd}. Use the same metrics, validation "
                    "and logging callbacks on every rank, or put callbacks of "
                    "a single rank after MetricAverageCallback."
                )
        values = [np.asarray(logs[name], "float64") for name in names]
        flat = np.concatenate([value.reshape(-1) for value in values])
        with tf.device(self.device):
            (total,) = transport.all_reduce([tf.constant(flat)], "kt.logs")
        transport.mark("")
        means = total.numpy() / transport.size
        for name, value in zip(names, values, strict=True):
            mean, means = means[: value.size], means[value.size :]
            logs[name] = (
                float(mean[0]) if value.ndim == 0 else mean.reshape(value.shape)
            )


@contextlib.contextmanager
def synced(transport: Transport, given: dict[str, Any]) -> Iterator[None]:
    """Let callbacks that some ranks lack act for all, in a block."""
    # Those that all have act on each rank, as in Horovod, which need not be at
    # the same place in its epochs.
    callbacks = listed(given.get("callbacks"))
    mine = [type(callback).__name__ for callback in callbacks]
    ranks = check.gather(transport, mine, "is at the beginning of fit")
    odd = [
        callback
        for callback, name in zip(callbacks, mine, strict=True)
        if len({names.count(name) for names in ranks}) > 1
    ]
    last = SyncedCallbacks(transport, odd, _trained)
    given["callbacks"] = with_added(given.get("callbacks"), last)
    with last.watching():
        yield


def _trained(model: keras.Model) -> list[keras.Variable]:
    state = state_lib.collect(model)
    return [*state.weights, *state.optimizer_variables]
