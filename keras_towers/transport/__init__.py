"""The protocol of engines that connect processes.

The other modules here are shared by all transports.

``engine_transport``
  The base class of all engines' transports.
``messages``
  Encodes tensors for ranks to send, in few messages.
``nccl_trial``
  Tries a first sum over NCCL, to find out whether it works here.
``plain_values``
  Encodes Python values as text that ranks gather, with only data in it.
``exchange_counts``
  Counts the exchanges of a process for the watch over its ranks.
``memory_turns``
  Lets the exchanges of a graph share memory, one after another.
``devices``
  The devices of the towers, and a rank's share of its machine.
``absent_ranks``
  Ranks that do not exist, for steps that are planned and never run.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.foundation.object_types import Plain
from keras_towers.jobs.rendezvous.failed_calls import Abortable
from keras_towers.jobs.rendezvous.separate_training import NoRankError


@runtime_checkable
class Transport(Abortable, Protocol):
    """Connects the processes of a job.

    Every method with a ``key`` is a collective: each rank must make the same
    call with the same key, and calls with one key must never overlap. The
    methods work eagerly and inside a ``tf.function``.

    Attributes:
        name: the display name of the engine.
        sums_float16: whether it sums float16 as fast as it can send it.
    """

    name: str

    @property
    def sums_float16(self) -> bool: ...

    @property
    def kept_bytes(self) -> int:
        """The bytes of the messages that the engine keeps from step to step."""
        ...

    def message_bytes(self, kind: str, sizes: Sequence[int]) -> int:
        """Return the memory of exchanges besides what ranks give and get.

        Args:
            kind: ``"sum"``, ``"scatter"``: of sums, or ``"gather"``.
            sizes: the bytes of each whole that is summed or gathered at a time.
        """
        ...

    def note_wait(self, what: str) -> None:
        """Record why this rank is about to wait for others; empty: it does not.

        Reports of stalls name the ranks that wait, and this reason.
        """
        ...

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        """Sum each of N dense tensors over the ranks as soon as it is ready."""
        ...

    def reduce_scatter(
        self, tensor: tf.Tensor, counts: Sequence[int], key: str
    ) -> tf.Tensor:
        """Sum a dense tensor over the ranks; return this rank's rows.

        Args:
            tensor: ``sum(counts)`` rows, in the order of the ranks.
            counts: the number of rows of each rank, possibly 0.
            key: as for all collectives.
        """
        ...

    def all_gather(
        self, tensor: tf.Tensor, key: str, counts: Sequence[int] | None = None
    ) -> tf.Tensor:
        """Concatenate the ranks' tensors, in rank order, on the first axis.

        The first dimensions may differ. Strings can be gathered, too.

        Args:
            tensor: this rank's rows.
            key: as for all collectives.
            counts: the number of rows of each rank, if all ranks know it: an
                engine may send less then.
        """
        ...

    def all_to_all(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        """Split the rows into ``size`` equal parts and send part r to rank r.

        Returns:
            The parts received, concatenated in rank order.
        """
        ...

    def broadcast(
        self, tensors: Sequence[tf.Tensor], key: str, root: int = 0
    ) -> list[tf.Tensor]:
        """Send the tensors of rank ``root`` to all ranks."""
        ...

    def ended_ranks(self) -> str:
        """Describe the ranks that have ended; empty if none is known."""
        ...

    def cause_of(self, error: Any) -> Exception:
        """Return what a TensorFlow error in a collective stands for, or it."""
        ...


class SingleProcess:
    """A ``Transport`` for a single process: every sum is its input."""

    name = "one process"
    loses_exchanges = False
    sums_float16 = True
    kept_bytes = 0
    rank = 0
    size = 1
    local_rank = 0
    local_size = 1

    def note_wait(self, what: str) -> None:
        pass

    def message_bytes(self, kind: str, sizes: Sequence[int]) -> int:
        return 0

    def abort(self) -> None:
        pass

    def leave(self) -> None:
        pass

    def renew(self) -> None:
        pass

    def reconnect(self) -> None:
        pass

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        return list(tensors)

    def reduce_scatter(
        self, tensor: tf.Tensor, counts: Sequence[int], key: str
    ) -> tf.Tensor:
        return tensor

    def all_gather(
        self, tensor: tf.Tensor, key: str, counts: Sequence[int] | None = None
    ) -> tf.Tensor:
        return tensor

    def all_to_all(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        return tensor

    def broadcast(
        self, tensors: Sequence[tf.Tensor], key: str, root: int = 0
    ) -> list[tf.Tensor]:
        return list(tensors)

    def gather_objects(self, value: Plain) -> list[Plain]:
        return [value]

    def ended_ranks(self) -> str:
        return ""

    def cause_of(self, error: Any) -> Exception:
        return error


class NoRank(SingleProcess):
    """The transport of a process that a rank has started: it refuses any use.

    Args:
        error: what exchanges raise; it has the place of the rank.
    """

    name = "no engine"

    def __init__(self, error: NoRankError):
        self._error = error
        vars(self).update(error.place)

    def _refuse(self, *_: object, **__: object) -> Any:
        raise self._error

    all_reduce = reduce_scatter = all_gather = all_to_all = _refuse
    broadcast = gather_objects = _refuse


_used: weakref.WeakKeyDictionary[tf.Graph, collections.Counter[str]] = (
    weakref.WeakKeyDictionary()
)


def next_key(purpose: str) -> str:
    """Return a key for the next collective of the function being traced.

    Numbering restarts in every traced function, so that a rank that retraces
    one, for another batch shape, uses the same keys as the other ranks. Eager
    collectives block until they are done, so they need no number.
    """
    if tf.executing_eagerly():
        return f"kt.{purpose}.eager"
    # Functions inside the outermost graph may run concurrently.
    graph = compat.get_default_graph()
    outer: Any = getattr(graph, "outer_graph", None)
    while getattr(outer, "building_function", False):
        graph, outer = outer, getattr(outer, "outer_graph", None)
    counter = _used.setdefault(graph, collections.Counter())
    counter[purpose] += 1
    return f"kt.{purpose}.{counter[purpose]}"
