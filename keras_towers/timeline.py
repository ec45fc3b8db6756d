"""A timeline of ``fit``: a trace, a table of phases, and a line of advice.

Each rank records its steps. At the end of ``fit`` the recordings of all ranks
are put on one clock, and written in the format of ``chrome://tracing`` and
ui.perfetto.dev.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from keras_towers import compat
from keras_towers.devices import short_name
from keras_towers.errors import TowerError
from keras_towers.fit.calls.callback_effects import NEVER_STOPS
from keras_towers.fit.calls.callback_roles import ObservesFit
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.step import marks
from keras_towers.fit.weights.model_state import eager_cause, runs_eagerly
from keras_towers.rendezvous import rank_checks
from keras_towers.system import check_writable, make_writable

logger: logging.Logger = logging.getLogger("keras_towers")

# Steps of an epoch between two reads of TensorFlow's queues of times.
_READ_EVERY = 1000
# The number of last steps that the table covers.
_KEPT = 10_000
# The row of a rank's loop; the rows of towers start at 1.
_LOOP = 0
# Columns of a call in ``LoopClock``.
_RETURNED, _ENDED = 1, 2
# The phases of a tower's step, in order.
TOWER_PHASES = ("compute", "wait", "reduction", "update")

Phases = Mapping[str, np.ndarray]
"""Seconds of each step, by phase."""


class LoopClock(keras.callbacks.Callback):
    """Records when Keras's loop makes calls, in seconds since 1970.

    It runs before all other callbacks. ``Timeline`` runs after them, and calls
    ``begin_call``.
    """

    # Let Keras call the callbacks after a batch later, in a thread.
    async_safe: bool = True

    def __init__(self) -> None:
        super().__init__()
        self.restart(1)

    def restart(self, kept: int) -> None:
        """Begin another ``fit``; keep only the last ``kept`` calls."""
        self._calls: deque[list[float]] = deque(maxlen=kept)
        self._thread = threading.get_ident()

    def begin_call(self, traces: int) -> None:
        """Record that the train function is called, and traces before it."""
        self.end()
        self._calls.append([time.time(), np.nan, np.nan, traces])

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Record that the train function has returned."""
        if threading.get_ident() == self._thread:
            self._calls[-1][_RETURNED] = time.time()

    def end(self, *_: Any) -> None:
        """Record the end of the callbacks that follow a call."""
        if self._calls and np.isnan(self._calls[-1][_ENDED]):
            self._calls[-1][_ENDED] = time.time()

    on_test_begin = on_epoch_end = end

    def calls(self, traces: int) -> np.ndarray:
        """Return the fields of ``StepTimes`` for the kept calls, after ``fit``.

        Args:
            traces: how often the step was traced.
        """
        self.end()
        calls = np.array(self._calls, np.float64).reshape(-1, 4).T
        calls[3] = np.diff(calls[3], append=traces) > 0
        return calls


class Timeline(ObservesFit):
    """Measures where the time of ``fit`` goes, and says what to change.

    When ``fit`` ends or fails, the callback writes a file that
    https://ui.perfetto.dev and ``chrome://tracing`` show: each rank is a
    process with one row for input and callbacks, and one row per tower. A
    tower's step has these phases:

    * compute: from the start of its part of the batch until all of its
      gradients are computed;
    * wait: until the last tower of all ranks has computed its gradients;
    * reduction: until the gradients are summed. Sums that overlap with the
      computation of gradients do not count;
    * update: until the weights are updated, and copied to other towers. If one
      tower updates them for all, only that tower has this phase.

    A table of the phases is printed, with means and medians (a mean far above
    the median comes from a few long steps), and, if a phase stands out, advice
    on what to change first. Calls in which TensorFlow traced the step are left
    out. Times are kept for the last 10,000 steps, or for ``steps`` if that is
    more, so memory does not grow.

    Towers of ``AsyncTowerStrategy`` and ``SyncReplicasStrategy`` have no common
    step: each has its own steps in its row. ``fit`` traces its step again, and
    so does the next ``fit``: an operation that draws without an explicit seed,
    such as ``tf.random.normal``, restarts its stream.

    On accelerators, where TensorFlow only queues work, a phase ends when a
    value that was queued after it has reached the host. The operations that
    take the times do not change the weights.

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
            ``fit``: the file cannot be written when it begins, it runs outside
            of a strategy's block, or TensorFlow's determinism is enabled, which
            forbids reading the clock. A file that cannot be written when it
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
        self._recorder: marks.StepRecorder | None = None

    @contextlib.contextmanager
    def around(
        self, model: keras.Model, config: TowerConfig | None
    ) -> Iterator[None]:
        """Measure the ``fit`` in this block, and write the measurements."""
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
        self._recorder = marks.StepRecorder(model, kept)
        self.first.restart(kept)
        if config is not None:
            # Trace the step with marks, and drop the marked trace afterwards.
            model.train_function = None
        try:
            with marks.recording(self._recorder):
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
        computed = stamps[..., marks.POINTS.index("computed")]
        if np.isnan(computed).all() or not calls.size:
            # The gradients of these steps do not pass the marks.
            stamps = stamps[:0]
        devices = [] if config is None else config.devices
        return RankRecording(
            0 if config is None else config.peers.rank,
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
        print_table(Console(), title, phases, self.advice)

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

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuse a call that is not measured."""
        if self._recorder is None:
            raise TowerError(
                "Timeline measures fit, not evaluate or predict, inside a "
                "strategy's block, such as `with kt.TowerStrategy():`."
            )

    on_test_begin = on_predict_begin = on_train_begin

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Record that the train function is about to be called."""
        assert self._recorder is not None
        self.first.begin_call(self._recorder.traces)
        if batch % _READ_EVERY == 0:
            self._recorder.read()

    setattr(on_train_batch_begin, NEVER_STOPS, True)


def write_trace(path: Path, ranks: Sequence[RankRecording], last: int) -> None:
    """Write the events of the last steps, or calls, of aligned ranks."""
    places = [(r.rank, 1 + k) for r in ranks for k in range(len(r.devices))]
    rows = {(r.rank, _LOOP): "input and callbacks" for r in ranks}
    rows |= zip(places, tower_names(ranks), strict=True)
    events = list(_tower_events(ranks, places, last))
    for rank in ranks:
        events += _loop_events(rank, last)
    events.sort(key=lambda event: event["ts"])
    start = events[0]["ts"] if events else 0.0
    for event in events:
        event["ts"] = round(1e6 * (event["ts"] - start), 1)
        event["dur"] = round(1e6 * event["dur"], 1)
    named = [
        {"name": key, "ph": "M", "pid": rank, "tid": row, "args": {kind: value}}
        for (rank, row), name in sorted(rows.items())
        for key, kind, value in (
            ("process_name", "name", f"rank {rank}"),
            ("thread_name", "name", name),
            ("thread_sort_index", "sort_index", row),
        )
    ]
    document = {
        "traceEvents": [*named, *events],
        "displayTimeUnit": "ms",
        "otherData": {"machines": [rank.machine for rank in ranks]},
    }
    path.write_text(json.dumps(document))


def _event(
    name: str, place: tuple[int, int], begin: float, end: float, **facts: int
) -> dict[str, Any]:
    """Make an event from seconds, in a row of a rank."""
    return {
        "name": name,
        "ph": "X",
        "pid": place[0],
        "tid": place[1],
        "ts": float(begin),
        "dur": float(end - begin),
        "args": facts,
    }


def _tower_events(
    ranks: Sequence[RankRecording], places: Sequence[tuple[int, int]], last: int
) -> Iterator[dict[str, Any]]:
    """Yield the phases of the towers' last steps."""
    stamps = join_stamps(ranks)
    first = ranks[0].first_step + max(0, len(stamps) - last)
    for name, bounds in tower_phases(stamps[-last:]).items():
        for (step, tower), begin in np.ndenumerate(bounds[..., 0]):
            end = float(bounds[step, tower, 1])
            # If the tower skipped a phase, its times are NaN: comparisons fail.
            if end > begin or (name != "wait" and end == begin):
                yield _event(name, places[tower], begin, end, step=first + step)
    for rank in ranks:
        for tower, begin, end in rank.spans[-last:]:
            yield _event("step", (rank.rank, 1 + int(tower)), begin, end)


def _loop_events(rank: RankRecording, last: int) -> Iterator[dict[str, Any]]:
    """Yield the input and callbacks around the last steps."""
    calls, place = StepTimes(*rank.calls), (rank.rank, _LOOP)
    steps = find_steps(tower_phases(rank.stamps), calls)
    goes_on = np.diff(steps.call, prepend=-1) == 0
    for step in range(len(steps.call))[-last:]:
        call = steps.call[step]
        if call >= 0:
            traced = calls.traced[call] and not goes_on[step]
            name = "tracing" if traced else "input"
            begin, end = steps.ready[step], steps.begins[step]
            yield _event(name, place, begin, end, step=rank.first_step + step)
    is_divided = len(steps.call) or len(rank.spans)
    for begin, end, ended in zip(
        calls.begins[-last:],
        calls.returns[-last:],
        calls.ended[-last:],
        strict=True,
    ):
        if not is_divided:
            yield _event("step", place, begin, end)
        if ended > end:
            yield _event("callbacks", place, end, ended)


@dataclasses.dataclass
class RankRecording:
    """Measurements of one rank; all times are in seconds since 1970.

    Attributes:
        rank: the rank.
        machine: its name.
        devices: short names of its towers' devices.
        first_step: the number of the first step in ``stamps``.
        stamps: times of steps, as ``marks.StepRecorder.read`` returns them.
        spans: tower, begin and end of each step, if towers have no common one.
        calls: the four arrays of ``StepTimes``.
    """

    rank: int
    machine: str
    devices: list[str]
    first_step: int
    stamps: np.ndarray
    spans: np.ndarray
    calls: np.ndarray


def align_clocks(ranks: Sequence[RankRecording]) -> None:
    """Cut ranks to their common steps, and shift them to rank 0's clock."""
    begin = max(rank.first_step for rank in ranks)
    end = min(rank.first_step + len(rank.stamps) for rank in ranks)
    for rank in ranks:
        kept = slice(begin - rank.first_step, max(begin, end) - rank.first_step)
        rank.stamps = rank.stamps[kept]
        rank.first_step = begin
    # The clocks of machines differ by more than a step takes. But gradients are
    # summed on all ranks at nearly the same moment.
    point = marks.POINTS.index("reduced")
    sums = [latest(rank.stamps[..., point], axis=1) for rank in ranks]
    for rank, summed in zip(ranks, sums, strict=True):
        if rank.machine != ranks[0].machine and len(summed):
            fast_s = float(np.median(summed - sums[0]))
            rank.stamps = rank.stamps - fast_s
            rank.spans = rank.spans - [0, fast_s, fast_s]
            # The last row is not a time.
            rank.calls = rank.calls - [[fast_s], [fast_s], [fast_s], [0]]


def join_stamps(ranks: Sequence[RankRecording]) -> np.ndarray:
    """Join the stamps of the towers of aligned ranks."""
    return np.concatenate([rank.stamps for rank in ranks], axis=1)


def tower_names(ranks: Sequence[RankRecording]) -> list[str]:
    """Return the names of the towers of all ranks."""
    devices = [device for rank in ranks for device in rank.devices]
    return [f"tower {k} ({device})" for k, device in enumerate(devices)]


def latest(times: np.ndarray, **axes: Any) -> np.ndarray:
    """The maximum without NaN; NaN where there is nothing else."""
    return np.fmax.reduce(times, initial=np.nan, **axes)


def compute_phases(ranks: Sequence[RankRecording]) -> tuple[Phases, np.ndarray]:
    """Return the phases of a step on aligned ranks.

    Returns:
        The phases, and the mean seconds that each tower of all ranks computes;
        empty if steps are not divided.
    """
    stamps, calls = join_stamps(ranks), StepTimes(*ranks[0].calls)
    spans = np.concatenate([rank.spans for rank in ranks])
    if len(spans):
        return span_seconds(spans), np.empty(0)
    if not len(stamps):
        return call_seconds(calls), np.empty(0)
    bounds = tower_phases(stamps)
    # The towers of this rank also waited for towers of other ranks.
    local = {n: b[:, : len(ranks[0].devices)] for n, b in bounds.items()}
    counts = find_steps(local, calls).counts
    compute = np.diff(bounds["compute"])[counts, :, 0]
    compute = np.nan_to_num(compute).mean(axis=0)
    return step_seconds(local, calls), compute


class StepTimes(NamedTuple):
    """The times of calls of the train function, in seconds since 1970.

    Attributes:
        begins: when each began.
        returned: when it returned; NaN where callbacks run in another thread.
        ended: when Keras went on to the next call, or to the epoch's end.
        traced: 1 if it traced the step, else 0.
    """

    begins: np.ndarray
    returned: np.ndarray
    ended: np.ndarray
    traced: np.ndarray

    @property
    def returns(self) -> np.ndarray:
        """When the train function returned; if unknown, when ``ended``."""
        return np.where(np.isnan(self.returned), self.ended, self.returned)


def tower_phases(stamps: np.ndarray) -> dict[str, np.ndarray]:
    """Return begin and end of each phase: [steps, towers, 2].

    NaN: the tower skipped this phase.
    """
    begun, computed, reduced, updated = np.moveaxis(stamps, -1, 0)
    last = latest(computed, axis=1, keepdims=True)
    # If only one tower reads the sums, its time counts for all towers.
    sums = latest(reduced, axis=1, keepdims=True)
    sums = np.maximum(np.where(np.isnan(reduced), sums, reduced), last)
    bounds = {
        "compute": (begun, computed),
        "wait": (computed, last),
        "reduction": (last, sums),
        "update": (np.where(np.isnan(updated), np.nan, sums), updated),
    }
    return {
        name: np.stack(
            np.broadcast_arrays(begin, np.maximum(begin, end)), axis=-1
        )
        for name, (begin, end) in bounds.items()
    }


class Steps(NamedTuple):
    """Steps of towers, in the calls of the train function.

    Attributes:
        call: the index of each step's call; -1: outside of all calls.
        ready: when Keras's loop was ready for it.
        begins: when the first tower began.
        ends: when the last one ended.
        counts: whether the step counts: it does unless its call traced, or if
            all calls traced.
    """

    call: np.ndarray
    ready: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    counts: np.ndarray


def find_steps(phases: dict[str, np.ndarray], calls: StepTimes) -> Steps:
    """Find the call of each step, from the phases of this rank's towers."""
    bounds = np.stack([phases[name] for name in TOWER_PHASES])
    begins = -latest(-bounds[..., 0], axis=(0, 2))
    ends = latest(bounds[..., 1], axis=(0, 2))
    call = np.searchsorted(calls.begins, begins, side="right") - 1
    # A callback may train a step, too.
    call = np.where(begins <= calls.returns[call], call, -1)
    same_call = np.diff(call, prepend=-2) == 0
    # Within a call, the next step is ready when the one before ends.
    before = np.roll(ends, 1)
    ready = np.minimum(np.where(same_call, before, calls.begins[call]), begins)
    inside = call >= 0
    counts = inside & (calls.traced[call] == 0)
    counts = counts if counts.any() else inside
    return Steps(call, ready, begins, ends, counts)


def step_seconds(
    phases: dict[str, np.ndarray], calls: StepTimes
) -> dict[str, np.ndarray]:
    """Return the seconds of each phase, for every step that counts.

    Computing and waiting (including for a free core) are averaged over this
    rank's towers; for other phases the slowest tower counts. Time after the
    last step of a call is divided equally among the call's steps.
    """
    steps = find_steps(phases, calls)
    call, begins = steps.call[steps.counts], steps.begins[steps.counts]
    if not len(call):
        return {}
    numbers = np.maximum(np.bincount(call, minlength=len(calls.begins)), 1)
    last = np.zeros(len(calls.begins))
    np.maximum.at(last, call, steps.ends[steps.counts])
    seconds = {"input": begins - steps.ready[steps.counts]}
    for name in TOWER_PHASES:
        spans = np.nan_to_num(np.diff(phases[name])[steps.counts, :, 0])
        if name == "wait":
            spans += phases["compute"][steps.counts, :, 0] - begins[:, None]
        is_mean = name in ("compute", "wait")
        seconds[name] = spans.mean(axis=1) if is_mean else spans.max(axis=1)
    rest = np.maximum(calls.returns - last, 0)
    seconds["rest"] = (rest / numbers)[call]
    callbacks = calls.ended - calls.returns
    seconds["callbacks"] = (callbacks / numbers)[call]
    return seconds


def call_seconds(calls: StepTimes) -> dict[str, np.ndarray]:
    """Return the seconds of calls and callbacks, if no step is divided."""
    if not len(calls.begins):
        return {}
    # A call that finds the end of the data does not return, and the first call
    # includes preparations.
    done = ~np.isnan(calls.returned)
    later = np.arange(len(done)) > 0
    for count in (done & later, later):
        if count.any():
            calls = StepTimes(*(values[count] for values in calls))
            break
    return {
        "step": calls.returns - calls.begins,
        "callbacks": calls.ended - calls.returns,
    }


def span_seconds(spans: np.ndarray) -> dict[str, np.ndarray]:
    """Return the seconds of steps if towers have no common step.

    A tower's first step may be traced, and counts only if there are no more.
    """
    later = []
    for tower in np.unique(spans[:, 0]):
        _, begins, ends = spans[spans[:, 0] == tower].T
        seconds = ends - begins
        later.append(seconds[1:] if len(seconds) > 1 else seconds)
    return {"a tower's step": np.concatenate(later)}


def print_table(
    console: Console, title: str, phases: Phases, advice: str
) -> None:
    """Print the phases of a step, and advice."""
    console.print(title, highlight=False, markup=False, soft_wrap=True)
    if phases:
        table = Table("phase", box=box.SIMPLE)
        for heading in ("mean ms", "median ms", "share"):
            table.add_column(heading, justify="right")
        total = sum(seconds.mean() for seconds in phases.values())
        for name, seconds in phases.items():
            mean, median = 1e3 * seconds.mean(), 1e3 * np.median(seconds)
            share = f"{seconds.mean() / (total or 1):.0%}"
            table.add_row(name, f"{mean:.2f}", f"{median:.2f}", share)
        table.add_section()
        table.add_row("a step", f"{1e3 * total:.2f}")
        console.print(table)
    line = advice or "nothing stands out."
    console.print(line, highlight=False, markup=False)


# The fraction of a step from which a phase stands out.
_STANDS_OUT = {
    "input": 0.2,
    "callbacks": 0.1,
    "wait": 0.15,
    "reduction": 0.3,
    "update": 0.3,
}
# A slow tower computes longer than the median by this factor.
_SLOW = 1.25
# On a busy machine a tower may seem to compute in no time at all.
_TICK_S = 1e-6
_ADVICE = {
    "input": "a step waits for its input for {}: read ahead, by "
    ".prefetch(tf.data.AUTOTUNE) at the end of a dataset or workers=4 of a "
    "keras.utils.PyDataset, or start 16 steps at once by compile(..., "
    "steps_per_execution=16).",
    "callbacks": "callbacks take {}: do their work at the end of an epoch, "
    "show progress with verbose=2, or run them less often by compile(..., "
    "steps_per_execution=16).",
    "reduction": "the reduction of gradients takes {}: a larger batch_size "
    "computes longer for each of them.",
    "update": "the optimizer's update takes {}: a larger batch_size updates "
    "less often.",
}


def advise(
    phases_ms: Mapping[str, float],
    towers: Sequence[str],
    compute: np.ndarray,
    eager: str,
) -> str:
    """Return what to change first; empty if nothing stands out.

    Args:
        phases_ms: mean milliseconds of each phase.
        towers: names of the towers of all ranks.
        compute: mean seconds that each tower computes; empty if unknown.
        eager: what makes the model run eagerly; empty: nothing does.
    """
    if "step" in phases_ms and eager:
        return (
            "the steps are not divided into phases, because they run eagerly: "
            f"leave out {eager}."
        )
    total = sum(phases_ms.values()) or 1
    high = {
        phase: phases_ms[phase]
        for phase, least in _STANDS_OUT.items()
        if phases_ms.get(phase, 0) >= least * total
    }
    if high:
        phase = max(high, key=high.__getitem__)
        share = f"{high[phase] / total:.0%} of a step ({high[phase]:.2f} ms)"
        if phase == "wait":
            return _advise_on_waiting(towers, compute, share)
        return _ADVICE[phase].format(share)
    if "step" in phases_ms and len(towers) <= 1:
        return (
            "the steps are not divided into phases, because they do not run "
            "on several towers: TowerStrategy takes all visible devices, and "
            "keras_towers.virtual_towers(n) makes n of a CPU."
        )
    return ""


def _advise_on_waiting(
    towers: Sequence[str], compute: np.ndarray, share: str
) -> str:
    waiting = f"towers wait for one another for {share}"
    if len(compute) > 1:
        slow = int(np.argmax(compute))
        median = max(float(np.median(np.delete(compute, slow))), _TICK_S)
        if compute[slow] >= _SLOW * median:
            return (
                f"{waiting}: {towers[slow]} computes "
                f"{compute[slow] / median:.1f} times as long as the others. "
                "Leave it out, if its device is slower or has other work; with "
                "AsyncTowerStrategy no tower waits."
            )
    return (
        f"{waiting}, now for one, now for another: parts of one batch take "
        "different times, or towers share cores and compute in turn. Take no "
        "more towers than cores, put examples of equal length into a batch, or "
        "use AsyncTowerStrategy, where no tower waits."
    )
