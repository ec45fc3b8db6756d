"""Judgement of a step, once: whether the towers do what one device does."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import keras
from keras.metrics import Metric

from keras_towers import settings
from keras_towers.fit import told
from keras_towers.fit.capture import splits, verdict
from keras_towers.fit.capture.checks import CannotSplit
from keras_towers.fit.capture.joining import Plan, extended
from keras_towers.fit.capture.trace import TracedStep
from keras_towers.fit.capture.verdict import Verdict
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.step import whole_metrics
from keras_towers.fit.weights.variables import SUM, WHOLE
from keras_towers.splitting import Analysis, Difference

if TYPE_CHECKING:
    from keras_towers.fit.capture.own_traces import Other
    from keras_towers.fit.capture.rehearsal import Rehearsal

logger = logging.getLogger("keras_towers")


class Judge:
    """Decides which verdict a step gets, and which metrics are no sums."""

    def __init__(
        self,
        config: TowerConfig,
        model: keras.Model,
        begins: bool,
        later: list[Pending],
        predicts: bool = False,
    ):
        self._config = config
        self._model = model
        # Whether all ranks know what state the metrics are in.
        self._begins = begins
        # Gets judgements that end once the step has run.
        self._later = later
        # Whether the step returns a row for each example.
        self._predicts = predicts
        self._ranks = config.transport.size
        self._is_done = False
        # Whether effects are to happen once.
        self._once = False
        # Metrics that towers update from the global batch, on trial.
        self._tried: list[Metric] | None = None
        # Exchanges, on trial; None: no more of them are tried.
        self._plan: Plan | None = {} if _may_join(config) else None
        self._rounds = 0
        self._rehearsal: Rehearsal | None = None
        # Tells of a trace that was judged.
        self._tell: Callable[[Verdict], None] | None = None

    def wants_another(self, trace: TracedStep, tower: tower_lib.Tower) -> bool:
        """Judge a trace, or return True if the step has to be traced again."""
        if not self._judges(tower):
            return False
        analysis = splits.analysed(trace, self._predicts)
        if analysis.effects and trace.way == "xla":
            # What is done without it may happen once.
            first = analysis.effects[0].operation
            raise CannotSplit(f"has effects: {first.type}")
        # Another trace updates other metrics from the global batch, or
        # exchanges other values.
        if self._tried is None:
            self._tried = self._no_sums(trace, analysis)
            self._merge(self._tried, WHOLE)
            if self._tried:
                return True
        else:
            differ = (
                metric
                for difference in analysis.differences
                for metric in _metrics_of(trace, difference, self._tried)
            )
            if self._give_up(_unique(differ)):
                return True
        if self._plan is not None and self._plans(trace, analysis):
            return True
        self._is_done = True
        for metric in self._tried:
            if told.is_news(("whole metric", self._model.name, metric.name)):
                logger.info(
                    "metric %r is no sum over examples: all towers update it "
                    "from the global batch",
                    metric.name,
                )
        if trace.do_once(analysis.effects):
            self._once = bool(analysis.effects)
            analysis = dataclasses.replace(analysis, effects=())
        found = verdict.of(
            *(self._config, analysis),
            may_overflow=splits.may_overflow(trace),
            exchanges=len(self.plan),
            losses=trace.captured.losses,
        )
        self._rehearsal = self._to_rehearse(trace, analysis)
        self._tell = tell = functools.partial(
            verdict.tell, self._config, self._model, self._kind(tower)
        )
        if self._rehearsal is None:
            tell(found)
        else:
            step = id(self._model), self._kind(tower)
            pending = Pending(
                *(self._config, step, self._rehearsal, found, tell)
            )
            self._later.append(pending)
        return False

    def tell_another_trace(self, other: Other) -> None:
        """Tell that a tower does not run the trace that was judged."""
        if self._tell is not None:
            self._tell(verdict.of_another_trace(other.text, other.operation))
            self._tell = None

    def keep_examples(self, data: Any) -> None:
        """Keep some of a tower's examples, if the step is to be rehearsed."""
        if self._rehearsal is not None:
            self._rehearsal.keep(data)
            self._rehearsal = None

    def _to_rehearse(
        self, trace: TracedStep, analysis: Analysis
    ) -> Rehearsal | None:
        differences = analysis.causes or analysis.differences
        known = any(not d.is_open for d in differences)
        if known or not analysis.differences or verdict.heard_by_another():
            return None
        if self._config.batches == "each":
            return None
        from keras_towers.fit.capture import rehearsal

        try:
            return rehearsal.Rehearsal(trace, analysis, self._predicts)
        except rehearsal.CannotRehearse as error:
            logger.debug("%s is not rehearsed: %s", self._model.name, error)
            return None

    def leave_open(self, why: str, tower: tower_lib.Tower) -> None:
        """Judge a step without an analysed trace; leave out predictions."""
        if self._judges(tower) and not self._predicts:
            self._is_done = True
            given = self._config, self._model, self._kind(tower)
            verdict.tell(*given, verdict.of_nothing(why))

    def give_up(self) -> bool:
        """Do without the last trial; return whether there was one."""
        if self._is_done:
            return False
        if self._plan:
            self._plan = None
            return True
        return self._give_up(list(self._tried or ()))

    def fails(self) -> bool:
        """Note that a judged trace fails; return if it exchanged values."""
        # Another trace will exchange none.
        exchanged = bool(self._plan)
        if exchanged or self._once:
            self._plan, self._once, self._is_done = None, False, False
        return exchanged

    def _kind(self, tower: tower_lib.Tower) -> str:
        if self._predicts:
            return "prediction"
        return "training" if tower.training else "evaluation"

    @property
    def plan(self) -> Plan:
        """The exchanges in the next trace of the step."""
        return self._plan or {}

    def _plans(self, trace: TracedStep, analysis: Analysis) -> bool:
        """Plan more exchanges, or none; return whether the plan has changed."""
        before, self._plan = self.plan, None
        if analysis.is_proven:
            if before and not trace.fits(analysis):
                return True
            self._plan = before
            return False
        exchanges = trace.tower.exchange is not None
        # Of what is not known, nobody knows what it needs.
        is_known = any(not d.is_open for d in analysis.differences)
        is_known |= any(not effect.is_alike for effect in analysis.effects)
        if (
            exchanges
            and (before or is_known)
            and self._rounds < settings.JOINING_TRACES
        ):
            self._rounds += 1
            losses = trace.captured.losses
            self._plan = extended(before, trace.graph, analysis, losses)
        return bool(self._plan or before)

    def _judges(self, tower: tower_lib.Tower) -> bool:
        ignored = self._config.on_difference == "ignore"
        return tower.share is not None and not ignored and not self._is_done

    def _give_up(self, metrics: list[Metric]) -> bool:
        self._merge(metrics, SUM)
        given_up = {id(metric) for metric in metrics}
        self._tried = [m for m in self._tried or () if id(m) not in given_up]
        return bool(metrics)

    def _merge(self, metrics: list[Metric], merge: str) -> None:
        whole_metrics.set_merge(metrics, merge, anew=self._ranks > 1)

    def _no_sums(self, trace: TracedStep, analysis: Analysis) -> list[Metric]:
        """Return the metrics that are to be updated from the global batch."""
        if not _is_joined(self._config) or not self._begins:
            return []
        updates = trace.captured.metric_updates
        able = {id(update.metric): update.metric for update in updates}
        for update in updates:
            if not whole_metrics.can_be_gathered(update, self._ranks):
                able.pop(id(update.metric), None)
        found = [
            (difference, _metrics_of(trace, difference, able.values()))
            for difference in analysis.differences
        ]
        # What makes more than these differ is not for metrics to change.
        others = {d.operation for d, metrics in found if not metrics}
        return _unique(
            metric
            for difference, metrics in found
            if difference.operation not in others
            for metric in metrics
        )


@dataclasses.dataclass(frozen=True)
class Pending:
    """A verdict that waits until its step has run, and can be rehearsed."""

    config: TowerConfig
    # The model and what the step does.
    step: tuple[int, str]
    rehearsal: Rehearsal
    verdict: Verdict
    tell: Callable[[Verdict], None]

    def run(self) -> None:
        """Rehearse the step, and tell the verdict."""
        known = self.verdict
        try:
            found = self.rehearsal.run()
        except Exception as error:
            # A few examples may be too few for it.
            logger.debug("a rehearsal failed: %r", error, exc_info=True)
        else:
            if found is not None:
                known = verdict.rehearsed(found, known, self.config)
        self.tell(known)


def rehearse(waiting: Sequence[Pending]) -> None:
    """Rehearse the steps that have run since they were judged."""
    ran = [one for one in waiting if one.rehearsal.has_examples]
    for one in ran:
        one.run()
    # A step may have been traced again before it ran.
    known = {one.step for one in ran}
    for one in waiting:
        if one.step not in known:
            one.tell(one.verdict)


def _may_join(config: TowerConfig) -> bool:
    """Whether a step may exchange values where its author exchanges none."""
    return config.exact and config.average and _is_joined(config)


def _is_joined(config: TowerConfig) -> bool:
    """Whether the towers of all processes exchange values in a step."""
    joined = config.peers.size == config.transport.size
    return config.batches == "split" and joined


def _metrics_of(
    trace: TracedStep, difference: Difference, metrics: Iterable[Metric]
) -> list[Metric]:
    """Return the given metrics that differ; none if anything else does."""
    owners = splits.owners_of(trace)
    holders = {
        id(variable._value): metric
        for metric in metrics
        for variable in metric.variables
    }
    found = [holders.get(id(owners[key])) for key in difference.variables]
    of_metrics = [metric for metric in found if metric is not None]
    return of_metrics if len(of_metrics) == len(difference.names) else []


def _unique(metrics: Iterable[Metric]) -> list[Metric]:
    return list({id(metric): metric for metric in metrics}.values())
