"""The step of every tower of this process, traced as seldom as possible.

A step is traced on the first tower up to where its optimizer begins, as a
function whose captured variables are inputs. Every tower calls the function
with its own variables; then their gradients are reduced. Where the trace of
another tower might differ, every tower traces the step by itself.

With ``jit_compile`` XLA compiles this function, which uses one device only:
towers call one of their own where they cannot share it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import devices, settings
from keras_towers._notices import announce
from keras_towers.errors import TowerError
from keras_towers.fit import told
from keras_towers.fit.capture import checks
from keras_towers.fit.capture.capture import capture
from keras_towers.fit.capture.checks import CannotShare, CannotSplit
from keras_towers.fit.capture.function import Uncompilable, Way
from keras_towers.fit.capture.judging import Judge
from keras_towers.fit.capture.own_traces import OwnTraces
from keras_towers.fit.capture.trace import TracedStep
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.context.attributes import Attributes
from keras_towers.fit.contract import TakesGradients, TowerConfig
from keras_towers.fit.step.hidden import hide_rows
from keras_towers.fit.weights import trainers

logger = logging.getLogger("keras_towers")

# What holds for the first trace of a step only: another follows.
_FOR_NOW = frozenset(
    ("writes a variable that the towers had in common", "builds an optimizer")
)


class StepTraces:
    """The traces of one step for the towers of this process."""

    def __init__(
        self,
        config: TowerConfig,
        update: TakesGradients,
        model: keras.Model,
        attributes: Attributes,
        pieces: Sequence[Any],
        shares: Sequence[Any],
        judge: Judge,
    ):
        self._config = config
        self._update = update
        self._model = model
        # Values that the step may keep in Python attributes.
        self._attributes = attributes
        # The K towers' parts of the batch, and these parts' fractions of it.
        self._pieces = pieces
        self._shares = shares
        self._shared: TracedStep | None = None
        self._compiles: bool = bool(model.jit_compile)
        self._judge = judge
        self._own_traces = OwnTraces(judge.tell_another_trace)
        self._own_because = ""
        self._begun = time.monotonic()

    def run(
        self,
        step: Callable[[Any], Any],
        data: Any,
        tower: tower_lib.Tower,
        note: Callable[[Any, Any], None] | None = None,
    ) -> Any:
        """Run the step on the current tower; the first tower comes first."""
        first = tower.local_index == 0
        if tower.local_index == 1 and self._shared is None:
            # The first is traced, up to where it exchanges gradients.
            self._first_is_traced()
        trace = self._trace_for(step, data, tower)
        if first:
            self._judge.keep_examples(data)
        if trace is None:
            data = hide_rows(tower, data)
            run = self._own_traces.capture if self._are_alike() else capture
            captured = run(step, data, tower, self._update.apply)
            self._judge_own_trace(tower)
            if first and note is not None:
                note(captured.output, captured.results)
            return captured.output
        if first and note is not None:
            # ``note`` gets output and results of metrics as the trace has them.
            with trace.graph.as_default():
                note(trace.captured.output, trace.captured.results)
        captured = trace(data, tower)
        self._judge_own_trace(tower)
        tower.loss_is_weighted = captured.loss_is_weighted
        for call in captured.updates:
            self._update.apply(call)
        return captured.output

    def _trace_for(
        self, step: Any, data: Any, tower: tower_lib.Tower
    ) -> TracedStep | None:
        """Return the trace that a tower calls; None: it runs the step."""
        if self._shared is not None:
            return self._shared
        alone = self._config.transport.size == 1
        one_device = alone and self._config.num_towers == 1
        if tf.executing_eagerly():
            if not tower.local_index and not one_device:
                self._judge.leave_open("runs eagerly", tower)
            return None
        if self._compiles:
            trace = self._compiled(step, data, tower)
            if trace is not None:
                return trace
        if tower.local_index or one_device:
            return None
        # Other ranks get gradients while the step computes others. Functions
        # that are called are optimised for the host.
        on_host = devices.all_on_host(self._config.devices)
        way: Way = "called" if alone and on_host else "inlined"
        try:
            self._shared = self._traced(tower, step, data, way=way)
        except CannotShare as error:
            self._log_own_traces(error, tower)
        return self._shared

    def _compiled(
        self, step: Any, data: Any, tower: tower_lib.Tower
    ) -> TracedStep | None:
        """Return a trace that XLA compiles, for all towers or this one."""
        try:
            if tower.local_index == 0 and self._config.num_towers > 1:
                try:
                    checks.check_parts(self._pieces, self._shares)
                    self._shared = self._traced(tower, step, data, way="xla")
                    return self._shared
                except CannotSplit:
                    raise
                except CannotShare as error:
                    self._log_own_traces(error, tower)
            return self._traced(tower, step, data, shared=False, way="xla")
        except (CannotShare, Uncompilable) as error:
            self._compiles = False
            why = str(error)
            trainers.log_without_xla(
                *(self._model, tower.training, f"the step {why}"),
                for_now=why in _FOR_NOW,
            )
            return None

    def _traced(
        self,
        tower: tower_lib.Tower,
        step: Callable[[Any], Any],
        data: Any,
        shared: bool = True,
        way: Way = "called",
    ) -> TracedStep:
        """Trace the step; if that fails, leave everything as it was."""
        before = self._attributes.take()
        try:
            given = *(tower, step, data), shared, way
            trace = self._judged_trace(*given)
            with _as_reasons():
                if not shared:
                    trace.finish()
                    return trace
                any_size = way != "xla"
                checks.check_parts(self._pieces, self._shares, any_size)
                trace.finish(checks.common_shapes(self._pieces))
        except BaseException as error:
            self._attributes.put(before)
            exchanged = self._judge.fails()
            if exchanged and isinstance(error, CannotShare):
                return self._traced(tower, step, data, shared, way)
            raise
        return trace

    def _cut(
        self,
        tower: tower_lib.Tower,
        step: Callable[[Any], Any],
        data: Any,
        shared: bool,
        way: Way,
    ) -> TracedStep:
        """Trace the step up to where its optimizer begins."""
        with _as_reasons():
            trace = TracedStep(
                *(self._config, step, tower, data),
                shared=shared,
                way=way,
                plan=self._judge.plan,
            )
            if self._attributes.hold_tensors_of(trace.graph):
                raise CannotSplit("keeps tensors in attributes")
        return trace

    def _judged_trace(
        self, tower: tower_lib.Tower, step: Any, data: Any, *how: Any
    ) -> TracedStep:
        """Trace the step as it is judged, again if metrics are no sums."""
        before = self._attributes.take()
        while True:
            try:
                trace = self._cut(tower, step, data, *how)
            except (CannotShare, TowerError) as error:
                # XLA exchanges nothing: the step is traced without it.
                split = isinstance(error, CannotShare) and "xla" in how
                if split or not self._judge.give_up():
                    raise
            else:
                if not self._judge.wants_another(trace, tower):
                    return trace
            self._attributes.put(before)

    def _are_alike(self) -> bool:
        """Whether towers that trace by themselves are to trace the same."""
        if tf.executing_eagerly() or self._config.num_towers == 1:
            return False
        try:
            checks.check_parts(self._pieces, self._shares)
        except CannotShare:
            return False
        return True

    def _judge_own_trace(self, tower: tower_lib.Tower) -> None:
        """Judge a step that is not analysed, once it is known not to fail."""
        if self._own_because:
            self._judge.leave_open(self._own_because, tower)

    def _log_own_traces(
        self, error: CannotShare, tower: tower_lib.Tower
    ) -> None:
        why = str(error)
        if told.is_news(("own traces", self._model.name, why)):
            logger.info(
                "every tower traces the step of %r by itself, because it %s",
                self._model.name,
                why,
            )
        if why not in _FOR_NOW:
            self._own_because = why

    def _first_is_traced(self) -> None:
        """Announce a long preparation, if the first tower's trace took long."""
        if tf.executing_eagerly() or self._config.peers.rank:
            return
        seconds = time.monotonic() - self._begun
        name, towers = self._model.name, self._config.num_towers
        slow = seconds * towers >= settings.TRACES_S
        if slow and told.is_news(("a slow trace", name)):
            announce(
                f"preparing {towers} towers for the first step of {name!r}: "
                f"the first of them took {seconds:.0f} s ..."
            )


@contextlib.contextmanager
def _as_reasons() -> Iterator[None]:
    """Turn errors into reasons why a step cannot be cut."""
    try:
        yield
    except (CannotShare, Uncompilable, TowerError):
        raise
    except Exception as error:
        # If it is the step's, it is raised again without the trace.
        name = type(error).__name__
        why = f"fails in a function ({name}: {error})"
        raise CannotSplit(why) from error
