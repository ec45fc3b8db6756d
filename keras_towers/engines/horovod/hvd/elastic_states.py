"""``hvd.elastic``: training that goes on when processes are lost or join.

In a script written for ``horovod.keras.elastic``, change only names that differ
in Keras 3 (``optimizer.lr``: ``optimizer.learning_rate``):

>>> state = hvd.elastic.KerasState(model, batch=0, epoch=0)
>>> @hvd.elastic.run
... def train(state):
...     model.fit(data, epochs=10 - state.epoch, callbacks=[
...         hvd.elastic.CommitStateCallback(state, batches_per_commit=50),
...         hvd.elastic.UpdateBatchStateCallback(state),
...         hvd.elastic.UpdateEpochStateCallback(state)])

Horovod's own states are in the memory of processes that go on. Here rank 0
commits to a file, and ``keras-towers run`` starts all processes again, as for
``keras_towers.elastic``.

As in Horovod, every rank reads its own data, so that the weights depend on the
number of ranks over time. With ``keras_towers.elastic`` and ``HorovodStrategy``
they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# ``as`` marks names that this module exports.
from horovod.common.exceptions import (
    HorovodInternalError as HorovodInternalError,
)
from horovod.tensorflow import rank as rank

from keras_towers.backups import elastic
from keras_towers.backups.elastic import run as run
from keras_towers.engines.dropin.gradient_reducer import reducer_of
from keras_towers.engines.horovod.horovod_transport import HorovodTransport
from keras_towers.engines.horovod.hvd.operations import (
    broadcast_object as broadcast_object,
    broadcast_variables as broadcast_variables,
    init as init,
    shutdown as shutdown,
)
from keras_towers.fit.weights import agreement, model_state
from keras_towers.fit.weights.copies import native
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Logs, Variable
from keras_towers.reduction.rank_sum import sum_over_ranks

# A value of ``model.stop_training`` that no other callback sets. It ends an
# epoch early, not the training.
_END_EPOCH = object()
# The values of variables among the objects of a commit.
_VALUES = "_values"


class ObjectState(elastic.ObjectState):
    """Objects that survive the loss of processes.

    Args:
        bcast_object: sends an object of rank 0 to all ranks.
        get_rank: returns the rank.
        **objects: objects that can be pickled; each becomes an attribute, which
            is committed, restored and sent to all ranks.

    Example:
        >>> state = hvd.elastic.ObjectState(epoch=0)
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] = broadcast_object,
        get_rank: Callable[[], int] = rank,
        **objects: object,
    ):
        self._transport = HorovodTransport()
        self._bcast_object, self._get_rank = bcast_object, get_rank
        super().__init__(**objects)

    @property
    def _is_rank_0(self) -> bool:
        return self._get_rank() == 0

    def _of_rank_0(self, content: bytes) -> bytes:
        received: bytes = self._bcast_object(content)
        return received

    def _should_end(self) -> bool:
        (told,) = sum_over_ranks(
            self._transport, [tf.constant(int(self._told))]
        )
        return int(told) > 0


class VariablesState(ObjectState):
    """Variables and objects that survive the loss of processes."""

    def _variables(self) -> list[Variable]:
        """Return the variables that are committed."""
        raise NotImplementedError

    def _broadcast(self) -> None:
        """Give all ranks the values of rank 0."""
        values = list(map(native, self._variables()))
        agreement.broadcast(self._transport, values)

    def sync(self) -> None:
        """Give all ranks what rank 0 has."""
        self._broadcast()
        super().sync()

    def _everything(self) -> dict[str, object]:
        values = [native(v).numpy() for v in self._variables()]
        return {**super()._everything(), _VALUES: values}

    def _take(self, contents: dict[str, Any]) -> None:
        objects = dict(contents)
        values = objects.pop(_VALUES, None)
        if values is not None:
            self._assign(values)
        super()._take(objects)

    def _assign(self, values: list[np.ndarray]) -> None:
        variables = self._variables()
        shapes = [list(v.shape) for v in variables]
        if shapes != [list(v.shape) for v in values]:
            raise TowerError(
                "the last commit of this job has other variables: a script "
                "that starts again must make the same model."
            )
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


class TensorFlowKerasState(VariablesState):
    """A model, its optimizer and objects that survive the loss of processes.

    States of random layers are kept, separately on each rank. If an optimizer
    sums several backward passes, a partial sum is lost.

    Args:
        model: a built Keras model.
        optimizer: its optimizer; None: the one it was compiled with.
        backend: ignored; it has no meaning in Keras 3.
        **kwargs: other objects that can be pickled; each becomes an attribute,
            which is committed, restored and sent to all ranks.

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
        backend: object = None,
        **kwargs: Any,
    ):
        del backend
        optimizer = optimizer or getattr(model, "optimizer", None)
        if not model.built or optimizer is None:
            raise TowerError(
                f"model {model.name!r} must be built and have an optimizer "
                "before its state can be kept: give it an Input or call "
                "build(), then compile()."
            )
        if not optimizer.built:
            model_state.build_optimizer(optimizer, model.trainable_variables)
        self.model = model
        self.optimizer = optimizer
        # The seeds of all ranks in the last commit.
        self._seeds: list[list[list[int]]] = []
        super().__init__(**kwargs)

    def _optimizers(self) -> list[keras.Optimizer]:
        optimizers = (
            *model_state.collect(self.model).optimizers,
            *model_state.optimizers_in(self.optimizer),
        )
        return list({id(o): o for o in optimizers}.values())

    def _variables(self) -> list[keras.Variable]:
        state = model_state.collect(self.model)
        slots = (v for o in self._optimizers() for v in o.variables)
        variables = (*state.seeds, *state.weights, *slots)
        return list({id(v): v for v in variables}.values())

    def _own_seeds(self) -> list[keras.Variable]:
        return model_state.collect(self.model).seeds

    def _broadcast(self) -> None:
        seeds = {id(seed) for seed in self._own_seeds()}
        variables = [v for v in self._variables() if id(v) not in seeds]
        transport = self._transport
        differ = agreement.compare_variables(transport, variables)
        agreement.broadcast(transport, list(map(native, differ)))

    def _to_commit(self) -> dict[str, object]:
        own = [native(seed).numpy().tolist() for seed in self._own_seeds()]
        seeds = self._transport.gather_objects(own)
        return {**super()._to_commit(), "_seeds": seeds}

    def sync(self) -> None:
        """Give all ranks what rank 0 has."""
        super().sync()
        seeds_of_ranks = self._bcast_object(self._seeds)
        if self._get_rank() < len(seeds_of_ranks):
            seeds = seeds_of_ranks[self._get_rank()]
            for variable, value in zip(self._own_seeds(), seeds, strict=True):
                variable.assign(value)
        self._seeds = []
        self.save()
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
    """Variables and objects that survive the loss of processes.

    Args:
        variables: Keras or TensorFlow variables.
        session: ignored; it has no meaning in TensorFlow 2.
        **kwargs: as for ``TensorFlowKerasState``.

    Raises:
        TowerError: no variables are given: TensorFlow 2 keeps no list of them.
    """

    def __init__(
        self,
        variables: Iterable[Variable] | None = None,
        session: object = None,
        **kwargs: Any,
    ):
        del session
        if variables is None:
            raise TowerError(
                "TensorFlowState needs variables: TensorFlow 2 has no global "
                "list of variables. Give variables=model.variables + "
                "optimizer.variables, or use hvd.elastic.KerasState(model)."
            )
        self.variables = list(variables)
        super().__init__(**kwargs)

    def _variables(self) -> list[Variable]:
        return self.variables


class CommitStateCallback(keras.callbacks.Callback):
    """Commits a state after a number of batches, and at every epoch's end.

    It does so after all callbacks have seen the batch or epoch end, so that
    their order does not matter.

    Args:
        state: the state.
        batches_per_commit: the number of batches between two commits.
    """

    def __init__(self, state: ObjectState, batches_per_commit: int = 1):
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._committed = 0
        self._due = False

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._commit_if_due()
        self._committed = 0

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        self._commit_if_due()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if batch + 1 - self._committed >= self.batches_per_commit:
            self._committed = batch + 1
            self._due = True

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._due = True

    def on_train_begin(self, logs: Logs = None) -> None:
        self._due = False

    def on_train_end(self, logs: Logs = None) -> None:
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

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._initial_batch = self.state.batch

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self.state.batch = self._initial_batch + batch + 1
        steps = (self.params or {}).get("steps")
        if self._initial_batch and steps and self.state.batch >= steps:
            self.model.stop_training = self.model.stop_training or _END_EPOCH

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
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

    def on_train_begin(self, logs: Logs = None) -> None:
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.state.epoch = self.initial_epoch + epoch + 1
