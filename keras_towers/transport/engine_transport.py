"""The base class of all engines' transports.

``engines/`` has a subclass for each engine; ``messages.py`` encodes the
tensors.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.incomplete_classes import Extensible
from keras_towers.foundation.message_lists import describe_each
from keras_towers.foundation.notices import logger
from keras_towers.foundation.object_types import Plain
from keras_towers.jobs.rendezvous import (
    activity,
    failed_calls,
    rank_checks,
    watch,
)
from keras_towers.jobs.rendezvous.liveness import TaskState
from keras_towers.jobs.rendezvous.rank_checks import Ranked
from keras_towers.transport import (
    Transport,
    exchange_counts,
    messages,
    nccl_trial,
    plain_values,
)

MAYBE_LOST = (
    tf.errors.AbortedError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
    tf.errors.UnknownError,
)
"""Errors of a collective that has lost a rank; they have other causes, too."""


@contextlib.contextmanager
def refusing_ended(
    transport: Transport, refuse: Callable[[str], Exception]
) -> Iterator[None]:
    """Refuse what this block does if ranks that it needs have ended.

    Args:
        transport: connects the ranks.
        refuse: makes the error, given which ranks have ended.
    """
    try:
        with activity.refusing_by(refuse):
            yield
    except MAYBE_LOST:
        if failed_calls.calls.has_failed():
            raise
        ended = transport.ended_ranks()
        if not ended:
            raise
        raise refuse(ended) from None


class EngineTransport(Extensible, Transport):
    """The common part of all transports: to make one, inherit from this class.

    A subclass sets ``name``, and defines ``engine_sum`` and ``engine_gather``.
    This class builds the other collectives from these. If the engine has faster
    ones, the subclass overrides ``engine_gather_known``, ``engine_scatter``,
    ``engine_exchange`` or ``engine_broadcast``. If the engine sums float16 as
    fast as it can send it, the subclass overrides ``sums_float16``.

    These methods get N tensors and a key. They run in a ``tf.function``, and
    add operations to its graph. Operations with one key belong together: all
    ranks run them equally often, in the same order. But operations with other
    keys may run in between, in a different order on each rank.

    If a rank fails while another waits in an operation, the waiting rank should
    stop: another thread then calls its ``abort`` and ``leave``.

    Args:
        place: the place of this process among the ranks, such as what
            ``join_job`` returns. A subclass that overrides ``rank``, ``size``,
            ``local_rank`` and ``local_size`` needs none.

    Raises:
        TowerError: the class does not define these methods.
    """

    # Compared only once: later, only some ranks may create a strategy.
    _compared = False
    # Whether all ranks of the job make each exchange.
    _is_of_all_ranks = True
    # Why ranks do not sum over NCCL; empty: they do; None: it was not tried.
    _nccl_failure: str | None = None

    def __init__(self, place: Ranked | None = None):
        self._place = place
        self._functions: dict[tuple, Callable] = {}

    @property
    def _known_place(self) -> Ranked:
        if self._place is None:
            raise TowerError(
                f"{type(self).__name__} has no rank: its constructor must "
                "call super().__init__(keras_towers.extending.join_job(name))."
            )
        return self._place

    @property
    def rank(self) -> int:
        return self._known_place.rank

    @property
    def size(self) -> int:
        return self._known_place.size

    @property
    def local_rank(self) -> int:
        return self._known_place.local_rank

    @property
    def local_size(self) -> int:
        return self._known_place.local_size

    @property
    def sums_float16(self) -> bool:
        return False

    @property
    def kept_bytes(self) -> int:
        return 0

    def message_bytes(self, kind: str, sizes: Sequence[int]) -> int:
        # The parts of a sum that this rank gets of all others: it adds them up
        # while an engine, whose exchanges take turns, gets those of the next.
        return sum(sorted(sizes)[-2:]) if kind == "scatter" else 0

    @abstractmethod
    def engine_sum(
        self, tensors: Sequence[tf.Tensor], key: str
    ) -> Sequence[tf.Tensor]:
        """Sum each of N tensors over the ranks, with the same bits on all.

        Args:
            tensors: of float16, float32, float64, int32 or int64, of the same
                shapes and dtypes on all ranks.
            key: the name of these sums, the same on all ranks.
        """

    @abstractmethod
    def engine_gather(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        """Concatenate the tensors of all ranks, in the order of ranks.

        Args:
            tensor: of any dtype but strings. Only its first dimension may
                differ between ranks, and may be 0.
            key: the name of this gather, the same on all ranks.
        """

    def engine_gather_known(
        self, tensor: tf.Tensor, counts: Sequence[int], key: str
    ) -> tf.Tensor:
        """Concatenate the rows of all ranks; ``counts``: how many each has."""
        return self.engine_gather(tensor, key)

    def engine_scatter(
        self, tensor: tf.Tensor, counts: Sequence[int], key: str
    ) -> tf.Tensor:
        """Sum over the ranks, and return the rows of this rank's ``counts``.

        By default, ``engine_exchange`` sends the rows to be added up here.
        """
        padded = messages.with_rows_each(tensor, counts)
        received = self.engine_exchange(padded, key)
        own = [
            messages.summable(part[: counts[self.rank]])
            for part in tf.split(received, self.size)
        ]
        return messages.summed(tf.add_n(own), tensor.dtype)

    def engine_exchange(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        """Send part r of the rows to rank r. By default, this gathers all."""
        everything = self.engine_gather(tensor, key)
        # [from, to, rows, ...]
        inner = tf.shape(tensor)[1:]
        split = tf.reshape(
            everything, tf.concat([[self.size, self.size, -1], inner], 0)
        )
        return tf.reshape(split[:, self.rank], tf.shape(tensor))

    def engine_broadcast(
        self, tensors: Sequence[tf.Tensor], key: str, root: int
    ) -> list[tf.Tensor]:
        """Send the root's tensors to all. By default, this gathers them."""
        words = [messages.words_of(tensor) for tensor in tensors]
        whole = tf.concat(words, 0)
        sent = self.engine_gather(
            whole if self.rank == root else whole[:0], key
        )
        parts = tf.split(sent, [tf.size(w) for w in words], num=len(words))
        return [
            messages.from_words(part, tensor.dtype, tf.shape(tensor))
            for part, tensor in zip(parts, tensors, strict=True)
        ]

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        def total(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            sent = [messages.summable(t) for t in tensors]
            sums = self.engine_sum(sent, key)
            specs = [tf.TensorSpec(t.shape, t.dtype) for t in sent]
            self._check_results("engine_sum", sums, specs)
            return [
                messages.summed(value, tensor.dtype)
                for value, tensor in zip(sums, tensors, strict=True)
            ]

        return self._run(f"all_reduce.{key}", total, tensors)

    def reduce_scatter(
        self, tensor: tf.Tensor, counts: Sequence[int], key: str
    ) -> tf.Tensor:
        tensor, own = tf.convert_to_tensor(tensor), counts[self.rank]
        # An engine may reject empty messages.
        if tensor.shape.num_elements() == 0:
            return tensor[:own]
        return self._run(
            f"reduce_scatter.{key}.{_in_words(counts)}",
            lambda tensors: [self.engine_scatter(tensors[0], counts, key)],
            [tensor],
            own,
        )[0]

    def all_gather(
        self, tensor: tf.Tensor, key: str, counts: Sequence[int] | None = None
    ) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        if tensor.dtype == tf.string:
            return _gather_strings(self, tensor, key)
        if counts is not None:
            return self._run(
                f"all_gather.{key}.{_in_words(counts)}",
                lambda tensors: [
                    self.engine_gather_known(tensors[0], counts, key)
                ],
                [tensor],
                sum(counts),
            )[0]
        return self._run(
            f"all_gather.{key}",
            lambda tensors: [self.engine_gather(tensors[0], key)],
            [tensor],
            any_rows=True,
        )[0]

    def all_to_all(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        return self._run(
            f"all_to_all.{key}",
            lambda tensors: [self.engine_exchange(tensors[0], key)],
            [tensor],
        )[0]

    def broadcast(
        self, tensors: Sequence[tf.Tensor], key: str, root: int = 0
    ) -> list[tf.Tensor]:
        if root not in range(self.size):
            raise TowerError(
                f"rank {root} cannot broadcast: the job has ranks 0 to "
                f"{self.size - 1}."
            )
        key = f"{key}.from{root}"
        return self._run(
            f"broadcast.{key}",
            lambda tensors: self.engine_broadcast(tensors, key, root),
            tensors,
        )

    def _runs_eagerly(self, tensors: Sequence[tf.Tensor]) -> bool:
        """Whether to exchange eager tensors without a ``tf.function``."""
        return False

    @property
    def loses_exchanges(self) -> bool:
        return False

    def note_wait(self, what: str) -> None:
        activity.mark(what, exchanges=True)

    def abort(self) -> None:
        """End the operations in which this rank waits, with an error.

        By default, this does nothing: this rank waits until others join it.
        """

    def leave(self) -> None:
        """End the operations in which other ranks wait for this one.

        By default, this does nothing: the engine itself must notice.
        """

    def renew(self) -> None:
        """Begin again after a failed call, when all ranks have left it.

        By default, this does nothing: a failure affects only one call.
        """

    def reconnect(self) -> None:
        """Connect the ranks again; by default, they are still connected."""

    def gather_objects(self, value: Plain) -> list[Plain]:
        return watch.wait_for_ranks(
            lambda: plain_values.gather(self.all_gather, self.size, value)
        )

    def ended_ranks(self) -> str:
        gone = watch.wait_for_gone_ranks()
        has_ended = all(state == TaskState.ENDED for state in gone.values())
        return describe_each(gone) if has_ended else ""

    def cause_of(self, error: Any) -> Exception:
        return error

    def sum_on(self, gpu: str | None) -> None:
        """Sum on a GPU, over NCCL; None: in CPU memory."""
        raise NotImplementedError

    def try_nccl(self, gpu: str | None) -> None:
        """Sum over NCCL from now on, if all ranks can. Collective.

        A process tries it only once: later, only some ranks may create a
        strategy.

        Args:
            gpu: the device of this rank that sums, or None.
        """
        self.sum_on(None)
        if EngineTransport._nccl_failure is None:
            why = nccl_trial.failure_over_ranks(self, gpu, self.sum_on)
            EngineTransport._nccl_failure = why
            if why and gpu is not None and self.rank == 0:
                logger.warning(
                    "the ranks sum in CPU memory, not over NCCL: %s", why
                )
        if gpu is not None and not EngineTransport._nccl_failure:
            self.sum_on(gpu)

    def describe_nccl(self) -> str:
        """Describe whether ranks sum over NCCL; empty if it was not tried."""
        why = EngineTransport._nccl_failure
        if why:
            return f"ranks sum in CPU memory, not over NCCL: {why}"
        return "" if why is None else "ranks sum over NCCL"

    def compare_once(self, engine: str = "") -> None:
        """Compare the ranks' environments when this process first connects."""
        if EngineTransport._compared or self.size == 1:
            return
        everyone = self.gather_objects(rank_checks.process_facts(engine))
        for rank, facts in enumerate(everyone):
            # Each rank that differs from rank 0 warns about it once.
            rank_checks.compare_facts(
                f"rank {self.rank}",
                everyone[self.rank],
                f"rank {rank}",
                facts,
                warns=rank == 0,
            )
        EngineTransport._compared = True

    def _run(
        self,
        what: str,
        collective: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
        tensors: Sequence[tf.Tensor],
        rows: int | None = None,
        any_rows: bool = False,
    ) -> list[tf.Tensor]:
        """Run a collective, eagerly too, as one traced function.

        Args:
            what: identifies the collective.
            collective: the collective.
            tensors: what this rank contributes.
            rows: the first dimension of the results; None: that of the tensors.
            any_rows: whether the first dimensions differ between calls and
                ranks.
        """
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        if not tensors or self.size == 1:
            return tensors
        specs = [
            tf.TensorSpec(
                [None, *t.shape[1:]] if any_rows else t.shape, t.dtype
            )
            for t in tensors
        ]

        def run(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            results = collective(tensors)
            wanted = [
                spec
                if rows is None
                else tf.TensorSpec([rows, *spec.shape[1:]], spec.dtype)
                for spec in specs
            ]
            self._check_results(what, results, wanted)
            shapes = [spec.shape for spec in wanted]
            return list(map(tf.ensure_shape, results, shapes))

        if not tf.executing_eagerly() or self._runs_eagerly(tensors):
            return self._counted(what, run, tensors)
        # An engine may need other names after a call that has failed.
        form = failed_calls.calls.round, what, *specs
        if form not in self._functions:
            # TensorFlow would take these functions for one that is retraced
            # again and again, and warn, unless they are concrete.
            function = tf.function(run, autograph=False)
            self._functions[form] = function.get_concrete_function(specs)
        return self._counted(what, self._functions[form], tensors)

    def _check_results(
        self, what: str, results: Any, wanted: Sequence[tf.TensorSpec]
    ) -> None:
        """Refuse what a method of a subclass cannot have computed."""
        is_list = isinstance(results, (list, tuple))
        if not is_list or len(results) != len(wanted):
            raise TowerError(
                f"{what} of {type(self).__name__} returned {results!r}: it has "
                f"to return a list of {len(wanted)} tensors."
            )
        for result, spec in zip(results, wanted, strict=True):
            fits = result.shape.is_compatible_with(spec.shape)
            if result.dtype != spec.dtype or not fits:
                raise TowerError(
                    f"{what} of {type(self).__name__} returned a tensor of "
                    f"{result.dtype.name} and shape {result.shape}: it must "
                    f"return {spec.dtype.name} and shape {spec.shape}."
                )

    def _counted(
        self,
        name: str,
        collective: exchange_counts.Collective,
        tensors: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        if not self._is_of_all_ranks:
            return collective(tensors)
        return exchange_counts.counted(name, collective, tensors)


def _in_words(counts: Sequence[int]) -> str:
    """Describe numbers of rows, in few words if many ranks have the same."""
    same = f"{counts[0]} x {len(counts)}"
    return same if len({*counts}) == 1 else str([*counts])


_BYTES = [bytes([number]) for number in range(256)]


def _gather_strings(
    transport: Transport, tensor: tf.Tensor, key: str
) -> tf.Tensor:
    """Concatenate the ranks' strings; send their bytes and lengths."""
    lengths = transport.all_gather(tf.strings.length(tensor), f"{key}.lengths")
    whole = tf.strings.reduce_join(tf.reshape(tensor, [-1]))
    octets = tf.io.decode_raw(whole, tf.uint8)
    octets = transport.all_gather(octets, f"{key}.bytes")
    characters = tf.gather(_BYTES, tf.cast(octets, tf.int32))
    ragged: Any = tf.RaggedTensor
    every = ragged.from_row_lengths(
        characters, tf.reshape(lengths, [-1]), validate=False
    )
    texts = tf.strings.reduce_join(every, axis=-1)
    return tf.ensure_shape(
        tf.reshape(texts, tf.shape(lengths)), [None, *tensor.shape[1:]]
    )
