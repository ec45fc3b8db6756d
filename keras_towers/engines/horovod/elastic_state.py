"""Training that continues when workers die or join.

``keras-towers run --min-np 2 --max-np 4 --host-discovery-script hosts.sh
train.py`` starts the workers; ``train.py`` declares the state to keep:

    state = kt.elastic.State(model)

    @kt.elastic.run
    def train(state):
        with kt.HorovodStrategy():
            model.fit(x, y, epochs=10, callbacks=[kt.elastic.Commit(state)])

    train(state)

Every worker keeps the last commit in its memory. If a worker dies, the
remaining ones go back to that commit, reconnect, and go on training from its
epoch and batch; a worker that joins gets the commit from rank 0. Since a global
batch does not depend on the number of ranks, the final weights are the same as
without the loss.

The mechanism is Horovod's elastic mode (``horovod.common.elastic``), whose own
state for Keras does not work with Keras 3.
"""

from __future__ import annotations

import contextlib
import functools
import random
import secrets
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

import keras
import numpy as np

from keras_towers.backup import FitPosition, ResumingCallback
from keras_towers.engines import HOROVOD
from keras_towers.engines.dropin import tf_variable
from keras_towers.engines.horovod.horovod_strategy import HorovodTransport
from keras_towers.errors import TowerError
from keras_towers.fit import rank_agreement
from keras_towers.fit.weights import model_state as state_lib
from keras_towers.rendezvous import store
from keras_towers.transport.engine_transport import MAYBE_LOST

_hvd = HOROVOD.import_module()

from horovod.common import elastic as _elastic  # noqa: E402
from horovod.common.exceptions import (  # noqa: E402
    HorovodInternalError,
    HostsUpdatedInterrupt,
)

__all__ = ["Commit", "ObjectState", "State", "run"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_S = TypeVar("_S", bound=_elastic.State)


class ObjectState(_elastic.ObjectState):
    """Objects that survive the loss of workers.

    Args:
        bcast_object: sends an object of rank 0 to all ranks.
        get_rank: returns the rank.
        **objects: objects that can be pickled; each becomes an attribute, which
            is committed, restored and sent to new workers.

    Example:
        >>> state = kt.elastic.ObjectState(epoch=0)
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] = _hvd.broadcast_object,
        get_rank: Callable[[], int] = _hvd.rank,
        **objects: Any,
    ):
        # None under Horovod's own launcher, which notifies workers itself.
        self._store = store.from_environment()
        super().__init__(bcast_object, get_rank, **objects)

    def check_host_updates(self) -> None:
        """Interrupt training on all ranks if hosts were added or removed."""
        if self._store and self._rank() == 0:
            with contextlib.suppress(OSError):
                update = self._store.get(store.HOSTS_UPDATED)
                if update:
                    self.on_hosts_updated(*update)
        super().check_host_updates()


class VariablesState(ObjectState):
    """Variables and objects that survive the loss of workers."""

    _saved: list[tuple[Any, np.ndarray]]

    def __init__(self, **objects: Any):
        self._transport = HorovodTransport()
        self._saved = []
        super().__init__(**objects)

    def _variables(self) -> list[keras.Variable]:
        """Return the variables that are committed."""
        raise NotImplementedError

    def _broadcast(self, variables: list[keras.Variable]) -> None:
        """Give all ranks the values of rank 0."""
        values = list(map(tf_variable, variables))
        rank_agreement.broadcast(self._transport, values)

    def save(self) -> None:
        """Keep the current values in this worker's memory."""
        self._saved = [(v, v.numpy()) for v in self._variables()]
        super().save()

    def restore(self) -> None:
        """Go back to the last commit."""
        for variable, value in self._saved:
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Give every worker the commit of rank 0."""
        self._broadcast(self._variables())
        super().sync()
        self.save()


class ModelState(VariablesState):
    """A model, its optimizer and objects that survive the loss of workers."""

    def __init__(
        self, model: keras.Model, optimizer: Any = None, **objects: Any
    ):
        optimizer = optimizer or getattr(model, "optimizer", None)
        if not model.built or optimizer is None:
            raise TowerError(
                f"model {model.name!r} has to be built and have an optimizer "
                "before its state can be kept: give it an Input or call "
                "build(), then compile()."
            )
        if not optimizer.built:
            state_lib.build_optimizer(optimizer, model.trainable_variables)
        self._model = model
        self._optimizer = optimizer
        super().__init__(**objects)
        self.save()

    def _optimizers(self) -> list[Any]:
        optimizers = (
            *state_lib.collect(self._model).optimizers,
            *state_lib.optimizers_in(self._optimizer),
        )
        return list({id(o): o for o in optimizers}.values())

    def _variables(self) -> list[keras.Variable]:
        state = state_lib.collect(self._model)
        slots = (v for o in self._optimizers() for v in o.variables)
        variables = (*state.seeds, *state.weights, *slots)
        return list({id(v): v for v in variables}.values())

    def _broadcast(self, variables: list[keras.Variable]) -> None:
        if not rank_agreement.compare_variables(self._transport, variables):
            super()._broadcast(variables)


class State(ModelState, FitPosition):
    """The state of a training, which survives the loss of workers.

    Args:
        model: a built and compiled Keras model. Its optimizer's state and the
            states of its random generators are kept, too.
        **extra: other objects that can be pickled; each becomes an attribute,
            which is committed, restored and sent to new workers.

    Attributes:
        epoch: the epoch of the last commit, from 0.
        batch: the number of global batches of this epoch before the commit.

    Raises:
        TowerError: the model is not built or not compiled.

    Example:
        >>> state = kt.elastic.State(model, best=float("inf"))
    """

    def __init__(self, model: keras.Model, **extra: Any):
        super().__init__(
            model,
            epoch=0,
            batch=0,
            seed=secrets.randbits(31),
            random_state=random.getstate(),
            epochs=[],
            history={},
            metrics=[],
            **extra,
        )


def run(
    function: Callable[Concatenate[_S, _P], _R],
) -> Callable[Concatenate[_S, _P], _R]:
    """Rerun a function, from the last commit, when workers die or join.

    Args:
        function: takes a state first. It makes its strategy itself, since
            the number of ranks may differ each time.

    Returns:
        A function that returns what the last run of ``function`` returned.
    """

    @functools.wraps(function)
    def run_to_end(state: _S, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        synced = reconnected = False
        with _notify_of_hosts(state):
            while True:
                try:
                    with _detect_loss():
                        if reconnected:
                            state.on_reset()
                        if not synced:
                            state.sync()
                        return function(state, *args, **kwargs)
                except HorovodInternalError:
                    state.restore()
                    synced = False
                except HostsUpdatedInterrupt as update:
                    synced = update.skip_sync
                HorovodTransport().disconnect()
                HorovodTransport()
                reconnected = True

    return run_to_end


@contextlib.contextmanager
def _detect_loss() -> Iterator[None]:
    """Turn an error of the block into Horovod's if the job lost a worker."""
    transport = HorovodTransport()
    try:
        yield
    except MAYBE_LOST as error:
        # The message proves nothing: it depends on where in a collective the
        # peer was lost, and other errors have the same.
        if transport.is_intact():
            raise
        raise HorovodInternalError(str(error)) from error


@contextlib.contextmanager
def _notify_of_hosts(state: _elastic.State) -> Iterator[None]:
    """Notify a state of added and removed hosts inside the block.

    Under our launcher the state polls the store. Horovod's launcher notifies it
    through a service of each worker, which listens on all addresses.
    """
    if getattr(state, "_store", None):
        yield
        return
    manager = _elastic.notification_manager
    manager.init()
    manager.register_listener(state)
    try:
        yield
    finally:
        manager.remove_listener(state)


class Commit(ResumingCallback):
    """Commits a ``State`` in ``fit``, and makes ``fit`` resume from it.

    ``fit`` starts in the state's epoch, after the batches that were done.
    ``History`` has all epochs, including epochs before a worker was lost.
    Callbacks whose work at the end of an epoch belongs to the commit have to
    come before it.

    Args:
        state: the state.
        every: commit after this many batches, and at each epoch's end. A
            commit copies all weights and the optimizer's state in memory.

    Raises:
        TowerError: ``every`` is not positive.

    Example:
        >>> model.fit(x, y, callbacks=[kt.elastic.Commit(state, every=50)])
    """

    def __init__(self, state: State, every: int = 100):
        super().__init__(state, every)
