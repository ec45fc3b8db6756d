"""``kt.Timeline``: the callback that measures."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

import keras
import numpy as np
from rich.console import Console

from keras_towers.fit.calls.callback_effects import NEVER_STOPS
from keras_towers.fit.calls.callback_roles import ObservesFit
from keras_towers.fit.components import TowerConfig
from keras_towers.fit.given_values import check_arguments
from keras_towers.fit.step.graph import step_clock
from keras_towers.fit.weights.model_state import eager_cause, runs_eagerly
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.notices import logger
from keras_towers.foundation.object_types import Logs
from keras_towers.foundation.system import (
    absolute,
    check_writable,
    make_writable,
)
from keras_towers.inspection.recording.advice import advise, print_table
from keras_towers.inspection.recording.phases import (
    StepTimes,
    between_epochs,
    compute_phases,
)
from keras_towers.inspection.recording.recording import (
    LoopClock,
    RankRecording,
    align_clocks,
    tower_names,
)
from keras_towers.inspection.recording.trace_file import write_trace
from keras_towers.jobs.rendezvous import rank_checks
from keras_towers.transport.devices import short_name

# Steps of an epoch between two reads of TensorFlow's queues of times.
_READ_EVERY = 1000
# The number of last steps that the table covers.
_KEPT = 10_000


class Timeline(ObservesFit):
    """Measures where the time of ``fit`` goes, and says what to change.

    When ``fit`` ends or fails, the callback writes a file that
    https://ui.perfetto.dev and ``chrome://tracing`` show: each rank is a
    process with one track for input and callbacks, and one for each tower. A
    tower's step has these phases:

    * compute: from the start of its part of the batch until all of its
      gradients are computed;
    * wait: until the last tower of all ranks has computed its gradients;
    * reduction: until the gradients are summed. Sums that overlap with the
      computation of gradients do not count;
    * update: until the weights are updated, and copied to other towers. If one
      tower updates them for all, only that tower has this phase.

    The callback prints a table of the phases, with means and medians. If a mean
    is far above the median, a few steps were long. If a phase stands out, the
    callback also prints advice on what to change first. Work between epochs,
    such as a validation, is on a separate line. The table leaves out calls in
    which TensorFlow traced the step. The callback keeps the times of the last
    10,000 steps, or of ``steps`` if that is more, so memory does not grow.

    Towers of ``AsyncTowerStrategy`` and ``SyncReplicasStrategy`` have no common
    step: the track of each shows its own steps. With this callback, ``fit``
    traces its step again, and so does the next ``fit`` without it. Operations
    that draw without an explicit seed, such as ``tf.random.normal``, then
    restart their streams.

    On accelerators, TensorFlow only queues work. A phase ends when a value that
    was queued after it has reached the CPU. Measuring does not change the
    weights.

    Args:
        path: the file to write, for all ranks. If ``fit`` fails, or ranks have
            no common step, each rank writes a separate file, such as
            ``trace.rank1.json`` instead of ``trace.json``.
        steps: the number of last steps to write.

    Attributes:
        phases: mean milliseconds of each phase of a step in the last ``fit``;
            on rank 0.
        advice: what to change first; empty if nothing stands out.

    Raises:
        TowerError: ``path`` is not a path, or ``steps`` is not positive; in
            ``fit``: the file cannot be written at the start, ``fit`` runs
            outside of a strategy's block, or TensorFlow's determinism is
            enabled, which forbids reading the clock. If the file cannot be
            written at the end, that is a warning.

    Example:
        >>> with kt.TowerStrategy():
        ...     model.fit(x, y, callbacks=[kt.Timeline("trace.json")])
    """

    def __init__(self, path: str | os.PathLike[str], steps: int = 1000):
        super().__init__()
        check_arguments(Timeline, path=path, steps=steps)
        if steps < 1:
            raise TowerError(f"steps={steps} is not allowed: give 1 or more.")
        self.path: Path = Path(path)
        self.phases: dict[str, float] = {}
        self.advice: str = ""
        self.first: LoopClock = LoopClock()
        self._written_steps = steps
        self._recorder: step_clock.StepRecorder | None = None

    @contextlib.contextmanager
    def around(
        self, model: keras.Model, config: TowerConfig | None
    ) -> Iterator[None]:
        """Measure the ``fit`` in this block, and write the measurements."""
        if compat.is_op_determinism_enabled():
            raise TowerError(
                "Timeline reads the clock within a step, and TensorFlow "
                "refuses that after enable_op_determinism(): measure without "
                "it."
            )
        rank = 0 if config is None else config.job.rank
        make_writable(absolute(self.path).parent, "give Timeline another path.")
        check_writable(self._path_of(rank), "Timeline")
        self.phases, self.advice = {}, ""
        kept = max(self._written_steps, _KEPT)
        self._recorder = step_clock.StepRecorder(model, kept)
        self.first.restart(kept)
        if config is not None:
            # Trace the step with marks, and drop the marked trace afterwards.
            model.train_function = None
        try:
            with step_clock.recording(self._recorder):
                yield
        except BaseException:
            # Do not hide the error of fit.
            with contextlib.suppress(Exception):
                self._write(self._path_of(rank), [self._recording(config)])
            raise
        else:
            self._report(model, config, self._recording(config))
        finally:
            self._recorder = None
            if config is not None:
                model.train_function = None

    def _recording(self, config: TowerConfig | None) -> RankRecording:
        """Collect the records of this rank."""
        assert self._recorder is not None
        stamps = self._recorder.read()
        calls = self.first.calls(self._recorder.traces)
        computed = stamps[..., step_clock.POINTS.index("computed")]
        if np.isnan(computed).all() or not calls.size:
            # The gradients of these steps do not pass the marks.
            stamps = stamps[:0]
        devices = [] if config is None else config.devices
        return RankRecording(
            0 if config is None else config.job.rank,
            platform.node(),
            [short_name(device) for device in devices],
            self._recorder.count - len(stamps),
            stamps,
            np.array(self._recorder.spans, np.float64).reshape(-1, 3),
            calls,
        )

    def _path_of(self, rank: int) -> Path:
        suffix = f".rank{rank}{self.path.suffix}"
        return self.path.with_suffix(suffix) if rank else self.path

    def _report(
        self,
        model: keras.Model,
        config: TowerConfig | None,
        here: RankRecording,
    ) -> None:
        """Combine the measurements of all ranks, on rank 0."""
        ranks = [here]
        # Ranks without a common step may come and go: nothing is gathered.
        if config is not None and config.transport.size > 1:
            where = "gathers the timelines of all ranks"
            gathered = rank_checks.gather(config.transport, vars(here), where)
            if here.rank > 0:
                return
            ranks = [RankRecording(**values) for values in gathered]
        align_clocks(ranks)
        self._write(self._path_of(here.rank), ranks)
        phases, compute = compute_phases(ranks)
        self.phases = {
            name: 1e3 * float(seconds.mean())
            for name, seconds in phases.items()
        }
        self.advice = advise(
            self.phases,
            tower_names(ranks),
            compute,
            eager_cause(model) if runs_eagerly(model) else "",
        )
        title = f"fit of {model.name!r}, {self.path}"
        between = between_epochs(StepTimes(*here.calls))
        print_table(Console(), title, phases, between, self.advice)

    def _write(self, path: Path, ranks: Sequence[RankRecording]) -> None:
        try:
            write_trace(path, ranks, self._written_steps)
        except OSError as error:
            logger.warning(
                "Timeline can no longer write %r (%s): its measurements are "
                "lost, except for the printed table. Training is not affected.",
                str(path),
                error.strerror or error,
            )

    def on_train_begin(self, logs: Logs = None) -> None:
        """Refuse a call that is not measured."""
        if self._recorder is None:
            raise TowerError(
                "Timeline measures the work of a strategy, but this fit "
                "has none: call it inside a block, such as `with "
                "kt.TowerStrategy():`."
            )

    def on_test_begin(self, logs: Logs = None) -> None:
        """Refuse a call that is not measured."""
        if self._recorder is None:
            raise TowerError(
                "Timeline measures fit, not evaluate or predict: leave it out "
                "here."
            )

    on_predict_begin = on_test_begin

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Record that the train function is about to be called."""
        assert self._recorder is not None
        self.first.begin_call(self._recorder.traces)
        if batch % _READ_EVERY == 0:
            self._recorder.read()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Record that all other callbacks have returned."""
        self.first.end_callbacks()

    setattr(on_train_batch_begin, NEVER_STOPS, True)
    setattr(on_train_batch_end, NEVER_STOPS, True)
