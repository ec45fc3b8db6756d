"""``hvd.elastic``: training that continues when workers die or join.

In a script written for ``horovod.keras.elastic``, change only names that differ
in Keras 3 (``optimizer.lr``: ``optimizer.learning_rate``):

>>> state = hvd.elastic.KerasState(model, batch=0, epoch=0)
>>> @hvd.elastic.run
... def train(state):
...     model.fit(data, epochs=10 - state.epoch, callbacks=[
...         hvd.elastic.CommitStateCallback(state, batches_per_commit=50),
...         hvd.elastic.UpdateBatchStateCallback(state),
...         hvd.elastic.UpdateEpochStateCallback(state)])

As in Horovod, every rank reads its own data, so that the weights depend on the
number of ranks over time. With ``keras_towers.elastic`` and ``HorovodStrategy``
they do not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

# ``as`` marks names that this module exports.
from horovod.common.exceptions import (
    HorovodInternalError as HorovodInternalError,
)
from horovod.tensorflow import rank as rank

from keras_towers.engines.dropin.distributed_optimizer import reducer_of
from keras_towers.engines.horovod.elastic_state import (
    ModelState,
    ObjectState as ObjectState,
    VariablesState,
    run as run,
)
from keras_towers.engines.horovod.hvd.operations import (
    broadcast_object as broadcast_object,
    broadcast_variables as broadcast_variables,
    init as init,
    shutdown as shutdown,
)
from keras_towers.errors import TowerError
from keras_towers.fit.weights import model_state

# A value of ``model.stop_training`` that no other callback sets. It ends an
# epoch early, not the training.
_END_EPOCH = object()


class TensorFlowKerasState(ModelState):
    """A model, its optimizer and objects that survive the loss of workers.

    States of random layers are kept, separately on each rank. If an optimizer
    sums several backward passes, a partial sum is lost.

    Args:
        model: a built Keras model.
        optimizer: its optimizer; None: the one it was compiled with.
        backend: ignored; it has no meaning in Keras 3.
        **kwargs: other objects that can be pickled; each becomes an attribute,
            which is committed, restored and sent to new workers.

    Raises:
        TowerError: the model is not built, or has no optimizer.
    """

    # Set by the callbacks, if the script passes them as ``kwargs``.
    batch: int
    epoch: int

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer | None = None,
        backend: Any = None,
        **kwargs: Any,
    ):
        del backend
        super().__init__(model, optimizer, **kwargs)
        self.model = model
        self.optimizer: Any = self._optimizer

    def _broadcast(self, variables: list[keras.Variable]) -> None:
        seeds = {id(seed) for seed in model_state.collect(self.model).seeds}
        super()._broadcast([v for v in variables if id(v) not in seeds])

    def sync(self) -> None:
        """Give every worker the commit of rank 0."""
        super().sync()
        reducers = filter(None, map(reducer_of, self._optimizers()))
        for reducer in reducers:
            if reducer.accumulator:
                reducer.accumulator.reset()


class KerasState(TensorFlowKerasState):
    """A ``TensorFlowKerasState``, as ``horovod.keras`` names it.

    Example:
        >>> state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer | None = None,
        **kwargs: Any,
    ):
        super().__init__(model, optimizer, **kwargs)


class TensorFlowState(VariablesState):
    """Variables and objects that survive the loss of workers.

    Args:
        variables: Keras or TensorFlow variables.
        session: ignored; it has no meaning in TensorFlow 2.
        **kwargs: as for ``TensorFlowKerasState``.

    Raises:
        TowerError: no variables are given: TensorFlow 2 keeps no list of them.
    """

    def __init__(
        self,
        variables: Iterable[Any] | None = None,
        session: Any = None,
        **kwargs: Any,
    ):
        del session
        if variables is None:
            raise TowerError(
                "TensorFlowState needs variables: TensorFlow 2 has no global "
                "list of variables. Give variables=model.variables + "
                "optimizer.variables, or use hvd.elastic.KerasState(model)."
            )
        self.variables: list[Any] = list(variables)
        super().__init__(**kwargs)
        self.save()

    def _variables(self) -> list[Any]:
        return self.variables


class CommitStateCallback(keras.callbacks.Callback):
    """Commits a state after a number of batches, and at every epoch's end.

    It does so after all callbacks have seen the batch or epoch end, so that
    their order does not matter.

    Args:
        state: the state.
        batches_per_commit: the number of batches between two commits.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1):
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._committed = 0
        self._due = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._commit_if_due()
        self._committed = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._commit_if_due()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch + 1 - self._committed >= self.batches_per_commit:
            self._committed = batch + 1
            self._due = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._due = True

    def on_train_begin(self, logs: Any = None) -> None:
        self._due = False

    def on_train_end(self, logs: Any = None) -> None:
        self._commit_if_due()

    def _commit_if_due(self) -> None:
        if self._due:
            self._due = False
            self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Keeps the number of finished batches of the epoch in ``state.batch``.

    If the number of steps is known, the first epoch after a loss has only the
    remaining batches. (Horovod counts from the last loss, and one less.)

    Args:
        state: the state.
    """

    def __init__(self, state: Any):
        super().__init__()
        self.state = state
        self._initial_batch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._initial_batch = self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = self._initial_batch + batch + 1
        steps = (self.params or {}).get("steps")
        if self._initial_batch and steps and self.state.batch >= steps:
            self.model.stop_training = self.model.stop_training or _END_EPOCH

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0
        if self.model.stop_training is _END_EPOCH:
            self.model.stop_training = False


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Keeps the number of finished epochs, before and after losses.

    Args:
        state: the state, whose ``epoch`` is set. Call ``fit`` with
            ``epochs - state.epoch`` epochs.
    """

    def __init__(self, state: Any):
        super().__init__()
        self.state = state
        self.initial_epoch: int = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self.initial_epoch + epoch + 1
