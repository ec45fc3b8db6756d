"""Callbacks that give ranks the same initial state and the same logs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers import compat
from keras_towers.engines.dropin import connection, tf_variable, variable_key
from keras_towers.errors import TowerError
from keras_towers.fit import rank_agreement
from keras_towers.fit.calls.callback_roles import (
    SyncedCallbacks,
    listed,
    with_added,
)
from keras_towers.fit.context.identity_dict import IdentityKey
from keras_towers.fit.weights import model_state as state_lib
from keras_towers.rendezvous import check


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
        self, root_rank: int, device: str = "", local_variables: Any = None
    ):
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self._local: set[IdentityKey[Any]] = set()
        self._done = False
        excluded = [] if local_variables is None else local_variables
        for variable in keras.tree.flatten(excluded):
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
        if self._done or connection().size == 1:
            return
        optimizer = model.optimizer
        layers_built = all(layer.built for layer in model._flatten_layers())
        # A custom step may not train these variables with this optimizer.
        uses_default_train_step = (
            type(model).train_step is compat.TensorFlowTrainer.train_step
        )
        if optimizer is not None and layers_built and uses_default_train_step:
            if not optimizer.built:
                optimizer.build(model.trainable_variables)
            self._broadcast()
        elif not model.run_eagerly:
            self._broadcast_at_first_batch(model.train_function)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self._done and connection().size > 1:
            self._broadcast()

    def _broadcast_at_first_batch(self, train_function: Callable) -> None:
        model = self.model

        @tf.autograph.experimental.do_not_convert
        def step(batch: Any) -> Any:
            # Keras passes inputs that are None as optionals.
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
        variables = [
            tf_variable(variable)
            for variable in _trained_state(self.model)
            if variable_key(variable) not in self._local
        ]
        transport = connection()
        transport.mark("the broadcast of initial state")
        with tf.device(self.device):
            rank_agreement.broadcast(transport, variables, self.root_rank)
        transport.mark("")
        self._done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces an epoch's logs with their mean over the ranks.

    Put it before callbacks that read the logs, such as ``ReduceLROnPlateau``
    and ``TensorBoard``; the history and the progress bar always come later.
    Every rank has the same weight, so this is the mean over all examples only
    if all ranks have the same number of examples.

    Args:
        device: ignored: the mean is computed on the host.
    """

    def __init__(self, device: str = ""):
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average the logs in place; ``TowerError`` if names differ."""
        transport = connection()
        if transport.size == 1:
            return
        logs = {} if logs is None else logs
        values = {name: np.asarray(logs[name], "float64") for name in logs}
        transport.mark("the mean of an epoch's logs")
        ranks = check.gather(transport, values, "averages its logs")
        transport.mark("")
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
    ranks = check.gather(transport, names, "is at the beginning of fit")
    odd = [
        callback
        for callback, name in zip(callbacks, names, strict=True)
        if len({rank_names.count(name) for rank_names in ranks}) > 1
    ]
    last = SyncedCallbacks(transport, odd, _trained_state)
    arguments["callbacks"] = with_added(arguments.get("callbacks"), last)
    with last.watching():
        yield


def _trained_state(model: keras.Model) -> list[keras.Variable]:
    """The weights of a model and the state of its optimizers."""
    state = state_lib.collect(model)
    return [*state.weights, *state.optimizer_variables]
