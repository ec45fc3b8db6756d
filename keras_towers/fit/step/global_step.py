"""A step on all towers, stage by stage, from a batch to new weights.

Keras's loop calls the train function (``AdaptiveFunction``), which passes it on
to Keras's own ``tf.function``. While TensorFlow traces that, Keras runs the
model's ``train_step`` by the strategy's ``run``, and ``TowerCall.run_step``
comes here. ``GlobalStep._add_to_graph`` has one line for each stage.

If each tower has a batch of its own, and XLA compiles the step, there are fewer
stages (``own_batch_step.py``). Steps that Keras does not trace run as on one
device (``eager_step.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_towers.fit.components import TowerConfig
from keras_towers.fit.context.without_collection import without_collection
from keras_towers.fit.ranks.step_order import StepOrder
from keras_towers.fit.step.eager_step import EagerStep
from keras_towers.fit.step.graph import step_clock
from keras_towers.fit.step.graph.exchange_kinds import GradientExchange
from keras_towers.fit.step.graph.pushed_gradients import push_gradients
from keras_towers.fit.step.graph.step_comparison import StepComparison
from keras_towers.fit.step.graph.step_function import StepFunction
from keras_towers.fit.step.graph.step_inputs import (
    DividedBatch,
)
from keras_towers.fit.step.graph.step_layout import (
    StepLayout,
    StepSettings,
    call_mode,
    devices_for,
    lay_out,
)
from keras_towers.fit.step.graph.tower_program import TowerProgram
from keras_towers.fit.step.graph.trace import Trace, trace
from keras_towers.fit.step.plan.device_memory import DeviceMemory
from keras_towers.fit.step.reports.step_reports import (
    log_not_compiled,
    record_graph,
)
from keras_towers.fit.step.running.heap_trim import HeapTrim
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.foundation import compat
from keras_towers.foundation.object_types import Step, Structure
from keras_towers.jobs.rendezvous import activity
from keras_towers.partition.timeline.timeline import Timeline

# The collection of a graph for steps that it may have again, as functions:
# Keras unrolls the steps of an execution of ``predict``.
_REPEATED = "keras_towers_steps"


class GlobalStep:
    """Runs steps of Keras on all towers, with the results of one device."""

    def __init__(self, update: WeightUpdate):
        self.order: StepOrder = update.order
        self.config: TowerConfig = update.config
        self.update = update
        self.memory: DeviceMemory = DeviceMemory(update.config)
        self._heap = HeapTrim()
        self.comparison: StepComparison = StepComparison(update)
        self._eager = EagerStep(update)

    def run_step(
        self, step: Step, batch: Structure, settings: StepSettings
    ) -> Structure:
        """Run a step that trains, evaluates or predicts.

        Args:
            step: a function of a batch, which one device would call.
            batch: a global batch, or the towers' parts of one.
            settings: what it is traced for.
        """
        if tf.executing_eagerly():
            return self._eager.run(step, batch, settings)
        # As a decorator it would add a frame of contextlib to tracebacks.
        with without_collection():
            return self._add_once(step, batch, settings)

    def _add_to_graph(
        self, step: Step, batch: Structure, settings: StepSettings
    ) -> Structure:
        """Add a step to the current graph; return what it returns."""
        # Each tower's rows of the batch, once the previous step has ended.
        divided = self._divide(batch, settings)
        with self._begun(divided, settings):
            # The step of one device, with its calls of optimizers; what each
            # tower computes, what towers exchange, and when, within the memory
            # of a device.
            layout = self._planned(step, divided, settings)
            # All ranks make the same exchanges, or all of them fail.
            self.comparison.compare(layout)
            # Level by level: what towers compute, and exchanges.
            result = self._compute(layout)
        # The next step may begin.
        result = self.order.end_step(result)
        settings.on_trace(compat.get_default_graph(), layout)
        return result

    def _divide(self, data: Structure, settings: StepSettings) -> DividedBatch:
        """Divide a batch over towers, once the previous step has ended."""
        places, local_sgd = settings.places, self.update.local_sgd
        divided = DividedBatch.of(
            self.config, places, data, settings.undivided, self.order
        )
        if local_sgd is not None and not places.ranks.share_step:
            local_sgd.begin_step(divided.share)
        return divided

    @contextlib.contextmanager
    def _begun(
        self, divided: DividedBatch, settings: StepSettings
    ) -> Iterator[None]:
        """In this block, add operations after the previous step, with marks."""
        recorded = settings.model if settings.trains else None
        pieces = divided.batch.pieces
        with (
            activity.preparing(),
            self.order.in_order(),
            step_clock.marked(recorded, self.config.devices, pieces),
        ):
            yield

    def _trace(
        self,
        step: Step,
        divided: DividedBatch,
        settings: StepSettings,
        again: bool = True,
    ) -> Trace:
        """Trace a step as one device runs it, with the first tower's values.

        Args:
            step: as for ``run_step``.
            divided: its batch.
            settings: as for ``run_step``.
            again: as for ``trace``.
        """
        with contextlib.ExitStack() as view:
            view.enter_context(self.update.variables.first_copies())

            def placing(place: Callable[..., None]) -> Callable[..., None]:
                def with_all_copies(*args: Any) -> None:
                    view.close()
                    place(*args)
                    view.enter_context(self.update.variables.first_copies())

                return with_all_copies

            return trace(
                step,
                divided.spec,
                settings.kind,
                # Slots are created next to all copies of their weights.
                placing(self.update.make_ready),
                placing(settings.place),
                own_statistics=self.config.options.batch_norm == "tower",
                xla=settings.xla,
                find_placement=lambda: self._placement_for(settings),
                update=self.update,
                again=again,
            )

    def _placement_for(
        self, settings: StepSettings
    ) -> compat.TracePlacement | None:
        """Return where variables are for a step; None: as on one device."""
        variables = self.update.variables
        # A rank that uses what ranks divide alone has the whole for a call.
        has_wholes = settings.places.ranks.shards.size < variables.access.size
        if has_wholes or self.config.options.batch_norm == "tower":
            return compat.TracePlacement()
        return variables.placement

    def _planned(
        self, step: Step, divided: DividedBatch, settings: StepSettings
    ) -> StepLayout:
        """Trace a step, lay it out over towers, and plan it.

        If a plan moves variables, the step is traced again.
        """
        while True:
            traced = self._trace(step, divided, settings)
            layout = self._lay_out(traced, divided, settings)
            if layout is not None:
                return layout
            # The next trace takes the place of this one.
            del traced
            gc.collect(0)

    def _lay_out(
        self, traced: Trace, divided: DividedBatch, settings: StepSettings
    ) -> StepLayout | None:
        """Lay out a step over towers, and plan it, as ``DeviceMemory.plan``."""

        def in_micro_batches(
            settings: StepSettings, fewer: StepLayout | None
        ) -> StepLayout:
            cut = divided.in_micro_batches(settings.places.micro_batches)
            if fewer is None or fewer.settings.places.micro_batches == 1:
                return lay_out(self.update, traced, cut, settings)
            # A layout says only whether there are several.
            return dataclasses.replace(fewer, divided=cut, settings=settings)

        return self.memory.plan(in_micro_batches, settings, divided.spec)

    def _compute(self, layout: StepLayout) -> Structure:
        """Add the towers' computations and exchanges, and the updates."""
        config, traced, settings = self.config, layout.traced, layout.settings
        has_copies = bool(layout.on_towers) and self.update.variables.mirrors
        places = devices_for(config, settings.places, has_copies)
        inputs = layout.divided.inputs_of(
            layout.program,
            traced.captures,
            layout.on_towers,
            places,
            layout.local_step,
        )
        towers = TowerProgram(
            layout.scheduled,
            call_mode(config, settings),
            places,
            self.order,
            self.update.collectives,
            GradientExchange(self.update, traced.gradients),
        )
        with contextlib.ExitStack() as stack:
            rounds = self.update.local_sgd
            if rounds is not None and not places.ranks.share_step:
                calls = traced.updates.values()
                for optimizer in dict.fromkeys(c.optimizer for c in calls):
                    around = rounds.around_update(optimizer, self.order)
                    stack.enter_context(around)
            results = towers.add_to_graph(inputs)
        graph = compat.get_default_graph()
        record_graph(config, settings.kind, settings.model, graph)
        push_gradients(self.update, layout, results)
        log_not_compiled(settings.model, settings.trains, towers.xla)
        return traced.output_with(results)

    def plan(
        self,
        step: Step,
        batch: Structure,
        settings: StepSettings,
        emits: bool = False,
    ) -> tuple[Trace, Timeline]:
        """Trace and plan a step that never runs.

        Args:
            step: a function of a batch, which one device would call.
            batch: a global batch, of placeholders.
            settings: what it is traced for.
            emits: whether it is added to the current graph, too.
        """
        divided = self._divide(batch, settings)
        layout = self._planned(step, divided, settings)
        if emits:
            self._compute(layout)
        return layout.traced, layout.scheduled

    def make_variables(
        self, step: Step, batch: Structure, settings: StepSettings
    ) -> None:
        """Make the variables that a step makes, by a trace that never runs.

        Args:
            step: as for ``plan``, like the other arguments.
            batch: a global batch, of placeholders.
            settings: what it is traced for.
        """
        divided = self._divide(batch, settings)
        self._trace(step, divided, settings, again=False)

    def _add_once(
        self, step: Step, batch: Structure, settings: StepSettings
    ) -> Structure:
        """Add a step to the graph; as a call if the graph has it already."""
        graph: tf.Graph = compat.get_default_graph()
        repeated = graph.get_collection_ref(_REPEATED)
        # Each call gets another wrapper of AutoGraph.
        key = inspect.unwrap(step), settings.kind
        for other, again in repeated:
            if other == key and again.takes(batch):
                return again(batch)

        def add(batch: Structure) -> Structure:
            return settings.around(
                lambda: self._add_to_graph(step, batch, settings)
            )

        function = StepFunction(add, batch)
        # Draws without a seed are others in each step.
        if not function.draws:
            repeated.append((key, function))
        return function(self._heap.before_step(batch))
