"""The callback that measures where the time of ``fit`` goes."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
from rich.console import Console

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit.calls.callback_roles import NEVER_STOPS, ObservesFit
from keras_towers.fit.context import marks
from keras_towers.fit.contract import TowerConfig
from keras_towers.rendezvous import check
from keras_towers.system import check_writable, make_writable
from keras_towers.timeline import phases as phases_lib
from keras_towers.timeline import trace_file
from keras_towers.timeline.recording import (
    LoopClock,
    RankRecording,
    align,
    tower_names,
)

logger: logging.Logger = logging.getLogger("keras_towers")

# After so many steps of an epoch, times are read from TensorFlow's queues.
_READ_EVERY = 1000
# The table is of the last steps.
_KEPT = 10_000


class Timeline(ObservesFit):
    """Measures where the time of ``fit`` goes, and says what to change.

    When ``fit`` ends or fails, the callback writes a file that
    https://ui.perfetto.dev and ``chrome://tracing`` show: a process for each
    rank, in it a row for the input and the callbacks and one for each tower.
    A tower's step has these phases:

    * compute: from when it begins with its part of the batch to when all of its
      gradients are there;
    * wait: until the last tower of all ranks has computed its own;
    * reduction: until their sums are there. What was summed while gradients
      were still computed does not count;
    * update: until the weights are updated, and copied to other towers. If one
      tower updates them for all, only that tower has this phase.

    A table of the phases is printed, with their means and medians, and a line
    that says what to change first, where a phase stands out: a mean far above
    its median comes from a few long steps. Calls in which TensorFlow traced the
    step are left out of it. The times of the last 10,000 steps are kept, or of
    as many as are written: memory does not grow.
    Towers of ``AsyncTowerStrategy`` and ``SyncReplicasStrategy`` have no common
    step: each has its own steps in its row. ``fit`` traces its step anew, and
    so does the next ``fit``: an operation that draws without a seed of its own,
    such as ``tf.random.normal``, starts its stream again.

    On accelerators, where TensorFlow only queues work, a phase ends when a
    value that was queued after it has reached the host. The marks' operations
    run in all steps, and the weights are the same as without.

    Args:
        path: the file to write, for all ranks. If ``fit`` fails, or ranks have
            no common step, each writes one of its own, ``trace.rank1.json``
            for ``trace.json``.
        steps: how many steps to write: the last ones.

    Attributes:
        phases: mean milliseconds that each phase takes of a step, of the last
            ``fit``, on rank 0.
        advice: what to change first; empty if nothing stands out.

    Raises:
        TowerError: ``path`` is none, or ``steps`` is not positive; in ``fit``:
            the file cannot be written when it begins, it runs outside of a
            strategy's block, or TensorFlow's determinism is enabled, which
            forbids to read the clock. A file that cannot be written when it
            ends is a warning.

    Example:
        >>> with kt.TowerStrategy():
        ...     model.fit(x, y, callbacks=[kt.Timeline("trace.json")])
    """

    def __init__(self, path: str | os.PathLike[str], steps: int = 1000):
        super().__init__()
        if not isinstance(path, str | os.PathLike):
            raise TowerError(f"path={path!r} is not allowed: give a path.")
        if not isinstance(steps, int) or steps < 1:
            raise TowerError(f"steps={steps!r} is not allowed: give 1 or more.")
        self.path: Path = Path(path)
        self.phases: dict[str, float] = {}
        self.advice: str = ""
        self.first: LoopClock = LoopClock()
        self._written_steps = steps
        self._recorder: marks.Recorder | None = None

    @contextlib.contextmanager
    def around(
        self, model: keras.Model, config: TowerConfig | None, x: Any
    ) -> Iterator[None]:
        """Measure the ``fit`` in this block, and write what was measured."""
        if compat.is_op_determinism_enabled():
            raise TowerError(
                "Timeline reads the clock within a step, which TensorFlow "
                "refuses after enable_op_determinism(): measure without it."
            )
        rank = 0 if config is None else config.peers.rank
        make_writable(
            self.path.absolute().parent, "give Timeline another path."
        )
        check_writable(self._path_of(rank), "Timeline")
        self.phases, self.advice = {}, ""
        kept = max(self._written_steps, _KEPT)
        self._recorder = recorder = marks.Recorder(model, kept)

        def recorded() -> RankRecording:
            devices = [] if config is None else config.devices
            return RankRecording.of(rank, devices, recorder, self.first)

        self.first.restart(kept, recorder)
        if config is not None:
            # What is traced now must not stay, and what is there has no marks.
            model.train_function = None
        try:
            with marks.recording(recorder):
                yield
        except BaseException:
            # The error of fit is the one to see.
            with contextlib.suppress(Exception):
                self._write(self._path_of(rank), [recorded()])
            raise
        else:
            self._report(model, config, recorded())
        finally:
            self._recorder = None
            if config is not None:
                model.train_function = None

    def _path_of(self, rank: int) -> Path:
        suffix = f".rank{rank}{self.path.suffix}"
        return self.path.with_suffix(suffix) if rank else self.path

    def _report(
        self,
        model: keras.Model,
        config: TowerConfig | None,
        here: RankRecording,
    ) -> None:
        """Bring together what all ranks have measured, on rank 0."""
        ranks = [here]
        # Processes without a common step may come and go.
        if config is not None and config.transport.size > 1:
            where = "brings together the timelines of all ranks"
            gathered = check.gather(config.transport, vars(here), where)
            if here.rank > 0:
                return
            ranks = [RankRecording(**values) for values in gathered]
        align(ranks)
        self._write(self._path_of(here.rank), ranks)
        phases, compute = phases_lib.measured_phases(ranks)
        self.phases = {
            name: 1e3 * float(seconds.mean())
            for name, seconds in phases.items()
        }
        self.advice = phases_lib.advise(
            self.phases, tower_names(ranks), compute, model.run_eagerly
        )
        title = f"fit of {model.name!r}, {self.path}"
        phases_lib.show(Console(), title, phases, self.advice)

    def _write(self, path: Path, ranks: Sequence[RankRecording]) -> None:
        try:
            trace_file.write(path, ranks, self._written_steps)
        except OSError as error:
            logger.warning(
                "Timeline cannot write %r any more (%s): what it has measured "
                "is lost, but for what it prints. The training is not.",
                str(path),
                error.strerror or error,
            )

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuse to be used where no ``fit`` is measured."""
        if self._recorder is None:
            raise TowerError(
                "Timeline measures fit, not evaluate or predict, inside a "
                "strategy's block, such as `with kt.TowerStrategy():`."
            )

    on_test_begin = on_predict_begin = on_train_begin

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Note where the train function is called."""
        assert self._recorder is not None
        self.first.begin_call()
        if batch % _READ_EVERY == 0:
            self._recorder.read()

    setattr(on_train_batch_begin, NEVER_STOPS, True)
