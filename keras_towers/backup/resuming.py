"""Callbacks that make ``fit`` resume where an earlier run stopped."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers.errors import EXIT_AGAIN, TowerError
from keras_towers.fit import contract
from keras_towers.fit.calls import call as call_lib
from keras_towers.fit.calls.callback_roles import NEVER_STOPS, ResumesFit
from keras_towers.fit.contract import Start
from keras_towers.fit.weights import model_state as state_lib
from keras_towers.fit.weights.adoption import Adoption
from keras_towers.reduction import sum_over_ranks
from keras_towers.rendezvous import check
from keras_towers.rendezvous.check import Peers
from keras_towers.system import handle_signals
from keras_towers.transport import Transport

logger: logging.Logger = logging.getLogger("keras_towers")

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class FitPosition:
    """A position of ``fit`` in its epochs, with the weights at that point.

    Attributes:
        outlives_process: whether it is still available after the process ends.
            SIGTERM and SIGUSR1 then end ``fit`` after the next batch, with exit
            code 75.
    """

    epoch: int
    batch: int
    seed: int
    epochs: list[int]
    history: dict[str, list[Any]]
    metrics: list[np.ndarray]
    outlives_process: bool = False

    def commit(self) -> None:
        """Save the position, and the state of the model."""
        raise NotImplementedError


class ResumingCallback(ResumesFit):
    """Saves the position of ``fit``, and makes ``fit`` resume from there."""

    def __init__(self, position: FitPosition, every: int | None):
        super().__init__()
        if every is not None and every < 1:
            raise TowerError(f"every={every} batches: give 1 or more.")
        self.position = position
        self._every = every
        self._skipped = 0
        self._signals: list[int] = []

    def begin(self, peers: Peers) -> Start:
        position = self.position
        return Start(position.epoch, position.batch, position.seed)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        self._signals.clear()
        numbers = _SIGNALS if self.position.outlives_process else ()
        with handle_signals(
            numbers, lambda number, _: self._signals.append(number)
        ):
            yield

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._skipped = self.position.batch
        if self.position.batch and self._counts_for_all():
            saved = self.position.metrics
            for variable, value in zip(self._metrics(), saved, strict=True):
                variable.assign(value)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        done = self._skipped + batch + 1
        if done == self.params.get("steps"):
            return  # The epoch's end is next.
        ends = self._should_end()
        due = self._every and done - self.position.batch >= self._every
        if ends or due:
            call = call_lib.current()
            if call is not None:
                # Asynchronous towers may still train on earlier batches.
                call.settle(trains=True)
            self.position.batch = done
            self.position.metrics = self._gather_metrics()
            self.position.commit()
        if ends:
            self._end(f"after batch {done} of epoch {self.position.epoch + 1}")

    setattr(on_train_batch_end, NEVER_STOPS, True)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        position = self.position
        position.epoch, position.batch, position.metrics = epoch + 1, 0, []
        position.epochs = [*position.epochs, epoch]
        position.history = {
            name: [*position.history.get(name, []), value]
            for name, value in (logs or {}).items()
        }
        position.commit()
        if self._should_end():
            self._end(f"after epoch {epoch + 1}")

    def on_train_end(self, logs: Any = None) -> None:
        history = self.model.history or keras.callbacks.History()
        history.epoch = list(self.position.epochs)
        history.history = {k: list(v) for k, v in self.position.history.items()}
        self.model.history = history

    def _metrics(self) -> list[keras.Variable]:
        return state_lib.collect(self.model).metrics

    def _ranks_train_separately(self) -> bool:
        """Whether each rank counts its own examples, as with ``sync_every``."""
        adoption = _adoption()
        return adoption is not None and adoption.ranks_diverge

    def _counts_for_all(self) -> bool:
        """Whether this rank continues with the metrics of all ranks."""
        transport = _transport()
        first = transport is None or transport.rank == 0
        return first or not self._ranks_train_separately()

    def _gather_metrics(self) -> list[np.ndarray]:
        """Return the metrics of all ranks, and gather the model (collective).

        With ``sync_every``, ranks end their round and continue with rank 0's
        optimizer, as they do after reading the backup.
        """
        adoption = _adoption()
        if adoption is not None:
            adoption.gather_slots()
        local = [v.numpy() for v in self._metrics()]
        if adoption is None or not self._ranks_train_separately():
            return local
        adoption.broadcast(self.model)
        adoption.sum_metrics(self.model)
        total = [v.numpy() for v in self._metrics()]
        for variable, value in zip(self._metrics(), local, strict=True):
            variable.assign(value)
        return total

    def _should_end(self) -> bool:
        """Whether any rank has received a signal."""
        if not self.position.outlives_process:
            return False
        signals = len(self._signals)
        transport = _transport()
        if transport is not None:
            transport.mark("the end of a batch")
            (total,) = sum_over_ranks(transport, [tf.constant(signals)])
            signals = int(total)
        return signals > 0

    def _end(self, where: str) -> None:
        transport = _transport()
        if transport is not None:
            # The launcher ends all ranks as soon as one has ended.
            check.gather(transport, None, "waits for rank 0 to commit")
        logger.warning(
            "fit of model %r ends %s, because of a signal. Start it again to "
            "resume from there; the exit code is %d.",
            self.model.name,
            where,
            EXIT_AGAIN,
        )
        raise SystemExit(EXIT_AGAIN)


def _adoption() -> Adoption | None:
    """The adoption of the current strategy's models, if there is one."""
    strategy = contract.active_strategy()
    return None if strategy is None else strategy._components.adoption


def _transport() -> Transport | None:
    """The transport to other ranks; None if there are none."""
    strategy = contract.active_strategy()
    if strategy is None:
        return None
    transport = strategy._components.config.transport
    return transport if transport.size > 1 else None
