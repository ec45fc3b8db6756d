"""What survives the loss of workers, whatever it is made of."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_towers.fit.weights import agreement
from keras_towers.meeting import store
from keras_towers.transport import horovod as horovod_lib

_hvd = horovod_lib.load()

from horovod.common import elastic as _elastic  # noqa: E402


class ObjectState(_elastic.ObjectState):
    """Objects that survive the loss of workers.

    Args:
        bcast_object: sends an object of rank 0 to all ranks.
        get_rank: returns the rank.
        **objects: what can be pickled; each becomes an attribute, which is
            committed, restored and sent to new workers.

    Example:
        >>> state = kt.elastic.ObjectState(epoch=0)
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] = _hvd.broadcast_object,
        get_rank: Callable[[], int] = _hvd.rank,
        **objects: Any,
    ):
        server = store.from_environment()
        # None under Horovod's own launcher, which has no news for us.
        self._launcher = server if server and server.signed else None
        super().__init__(bcast_object, get_rank, **objects)

    def check_host_updates(self) -> None:
        """Interrupt training on all ranks if hosts have come or gone."""
        if self._launcher and self._rank() == 0:
            with contextlib.suppress(OSError):
                news = self._launcher.get(store.NEWS)
                if news:
                    self.on_hosts_updated(*news)
        super().check_host_updates()


class VariablesState(ObjectState):
    """Variables and objects that survive the loss of workers.

    Args:
        **objects: as for ``ObjectState``.
    """

    _saved: list[tuple[Any, np.ndarray]]

    def __init__(self, **objects: Any):
        self._transport = horovod_lib.HorovodTransport()
        self._saved = []
        super().__init__(**objects)

    def _variables(self) -> list[keras.Variable]:
        """All that is committed."""
        raise NotImplementedError

    def _shared(self) -> list[keras.Variable]:
        """Those of them that are the same on all ranks."""
        return self._variables()

    def save(self) -> None:
        """Keep the values of now in this worker's memory."""
        self._saved = [(v, v.numpy()) for v in self._variables()]
        super().save()

    def restore(self) -> None:
        """Go back to the last commit."""
        for variable, value in self._saved:
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Give every worker the commit of rank 0."""
        self._broadcast()
        super().sync()
        self.save()

    def _broadcast(self) -> None:
        variables = self._shared()
        agreement.check_same(self._transport, variables)
        agreement.broadcast(self._transport, [v._value for v in variables])
