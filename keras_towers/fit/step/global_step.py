"""A step on all towers, stage by stage, from a batch to new weights.

Keras's loop calls the train function (``AdaptiveFunction``), which passes it on
to Keras's own ``tf.function``. While TensorFlow traces that, Keras runs the
model's ``train_step`` by the strategy's ``run``, and ``TowerCall.run_step``
comes here. ``GlobalStep._add_to_graph`` has one line for each stage.

If each tower has a batch of its own, and XLA compiles the step, there are fewer
stages (``run_for_own_batch``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import itertools
import secrets
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit.components import TowerConfig
from keras_towers.fit.context import thread_state
from keras_towers.fit.context.thread_state import ActiveStep
from keras_towers.fit.context.without_collection import without_collection
from keras_towers.fit.data import batches as data_lib
from keras_towers.fit.data.same_data import Fingerprint
from keras_towers.fit.places import ALONE, Places, Ranks
from keras_towers.fit.ranks.compared_step import ComparedStep
from keras_towers.fit.ranks.step_agreement import STEP_KEY
from keras_towers.fit.ranks.step_order import StepOrder
from keras_towers.fit.step.graph import step_clock
from keras_towers.fit.step.graph.exchange_kinds import GradientExchange
from keras_towers.fit.step.graph.program_text import text_of
from keras_towers.fit.step.graph.step_function import StepFunction
from keras_towers.fit.step.graph.step_inputs import (
    DividedBatch,
    as_one_batch,
    capture,
    gather_batch,
    shares_batches,
)
from keras_towers.fit.step.graph.step_layout import (
    StepLayout,
    StepSettings,
    call_mode,
    describe_variable,
    devices_for,
    lay_out,
)
from keras_towers.fit.step.graph.tower_program import TowerProgram
from keras_towers.fit.step.graph.trace import Trace, components_of, trace
from keras_towers.fit.step.plan.device_memory import DeviceMemory
from keras_towers.fit.step.reports.step_reports import (
    log_no_xla,
    log_not_compiled,
    record_graph,
)
from keras_towers.fit.step.running.heap_trim import HeapTrim
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.fit.weights.copies import copy_on_tower, native
from keras_towers.fit.weights.model_state import collect, eager_cause
from keras_towers.fit.weights.shards import spans_ranks
from keras_towers.fit.weights.writes import OuterVariable
from keras_towers.foundation import compat
from keras_towers.foundation.notices import first_time, logger
from keras_towers.foundation.object_types import Step, Structure, Variable
from keras_towers.jobs.rendezvous import activity, rank_checks
from keras_towers.partition import partition_graph
from keras_towers.partition.ir.layouts import REPLICATED
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.layout.conversions import LayoutOptions
from keras_towers.partition.timeline.gathers import place_earliest
from keras_towers.partition.timeline.timeline import Timeline
from keras_towers.reduction.gradients import Gradient, on_values, scaled

# The collection of a graph for steps that it may have again, as functions:
# Keras unrolls the steps of an execution of ``predict``.
_REPEATED = "keras_towers_steps"

_COMPILED = LayoutOptions(xla=True)


class GlobalStep:
    """Runs steps of Keras on all towers, with the results of one device."""

    def __init__(self, update: WeightUpdate):
        self.order: StepOrder = update.order
        self.config: TowerConfig = update.config
        self.update = update
        self.memory: DeviceMemory = DeviceMemory(update.config)
        self._heap = HeapTrim()
        self._outer: weakref.WeakKeyDictionary[
            keras.Model, dict[int, OuterVariable]
        ] = weakref.WeakKeyDictionary()
        self._eager_steps = itertools.count()

    def outer_variables(self, model: keras.Model) -> list[OuterVariable]:
        """Return the variables outside of a model that its steps use."""
        return [*self._outer.get(model, {}).values()]

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
            return self._on_one_device(step, batch, settings)
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
            self._compare_with_ranks(layout)
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

    def _placement_for(self, settings: StepSettings) -> compat.Placement | None:
        """Return where variables are for a step; None: as on one device."""
        variables = self.update.variables
        # A rank that uses what ranks divide alone has the whole for a call.
        has_wholes = settings.places.ranks.shards.size < variables.access.size
        if has_wholes or self.config.options.batch_norm == "tower":
            return compat.Placement()
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

    def _compare_with_ranks(self, layout: StepLayout) -> None:
        """Compare the step over ranks; share rank 0's outer variables."""
        traced, settings = layout.traced, layout.settings
        model, ranks = settings.model, settings.places.ranks
        shares_step = ranks.step.size > 1
        if ranks.job.size == 1 or not (shares_step or settings.trains):
            return
        exchanges = [
            f"{e.kind} {e.given.dtype.name} {e.result.shape}"
            for e in layout.program.exchanges
            if not e.gradient
        ]
        outside = traced.variables_outside(model)
        variables = [
            f"outside of the model: {describe_variable(capture(handle))}"
            for handle in outside
        ]
        compared = ComparedStep(
            text_of(traced, model, [*exchanges, *variables]),
            layout.divided.spec,
            layout.divided.fingerprint,
        )
        if not shares_step:
            self.update.note_own_step(compared)
            if ranks.in_lockstep:
                self.order.compare_in_rounds(compared)
            return
        copies_of = self.update.variables.handles_of_copies
        others = [copies_of(handle) or [handle] for handle in outside]
        known = self._outer.setdefault(model, {})
        for handles in others:
            outer = OuterVariable(handles, self.config.devices)
            known.setdefault(id(handles[0]), outer)
        self.order.compare(compared, others, self.config.devices)

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
        self._push(layout, results)
        log_not_compiled(settings.model, settings.trains, towers.xla)
        return traced.output_with(results)

    def _push(self, layout: StepLayout, results: Sequence[object]) -> None:
        """Pass on gradients that are results of the step."""
        traced, local_step = layout.traced, layout.local_step
        number = layout.settings.places.ranks.batch.size
        sums = traced.gradients_in(results)
        for name, ends in traced.gradients_in(layout.program.results).items():
            call = traced.call_with(name, sums[name])
            if local_step is None:
                self.update.push(call)
                continue
            # The workers' gradients are averaged.
            grads: list[Gradient | None] = []
            left = iter(ends)
            for gradient in call.grads:
                components = [next(left) for _ in components_of(gradient)]
                if name not in local_step.parts:
                    grads += _scale_or_zero(
                        layout.divided.share * number, [gradient]
                    )
                elif local_step.shared.issuperset(components):
                    grads.append(gradient)
                else:
                    grads += scaled([gradient], number)
            self.update.push(dataclasses.replace(call, grads=grads))

    def plan(
        self, step: Step, batch: Structure, settings: StepSettings
    ) -> tuple[Trace, Timeline]:
        """Trace and plan a step, without adding it to a graph.

        Args:
            step: a function of a batch, which one device would call.
            batch: a global batch, of placeholders.
            settings: what it is traced for.
        """
        divided = self._divide(batch, settings)
        layout = self._planned(step, divided, settings)
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

    def _on_one_device(
        self, step: Step, batch: Structure, settings: StepSettings
    ) -> Structure:
        """Run an untraced step as on one device, with a warning."""
        config, variables = self.config, self.update.variables
        model, places = settings.model, settings.places
        if first_time(model, ("runs eagerly", config.name)):
            logger.warning(
                "model %r runs eagerly, so its steps are not divided: they run "
                "as on one device under %s. To train on all towers, leave "
                "out %s.",
                model.name,
                config.name,
                eager_cause(model),
            )
        # Each rank computes the step on the global batch, also where it would
        # train on its own part only: its updates belong to no round.
        transport = config.transport if places.ranks.in_lockstep else ALONE
        is_whole = data_lib.is_whole(batch)
        if is_whole and shares_batches(config, places.ranks):
            data = Fingerprint(batch)
            compared = ComparedStep.of_exchanges((), fingerprint=data)
            self.order.agreement.assert_same(compared, (), STEP_KEY)
        whole = as_one_batch(config, places, batch)
        with contextlib.ExitStack() as stack:
            if transport.size > 1:
                if not is_whole or config.options.batches == "each":
                    whole = gather_batch(whole, transport)
                if self._eager_seed is not None:
                    # Between steps, ranks may draw different numbers of values.
                    seed = self._eager_seed + next(self._eager_steps)
                    stack.enter_context(compat.global_seed_of(seed))
            stack.enter_context(compat.single_device_mode())
            one_device = thread_state.trains_on_one_device
            stack.enter_context(one_device.holding(settings.trains))
            stack.enter_context(variables.first_copies())
            result = step(whole)
        if transport.size > 1:
            self.order.check_first_results(lambda: _values_of(result, model))
            self.order.end_eager_step()
        variables.copy_first()
        return result

    @functools.cached_property
    def _eager_seed(self) -> int | None:
        """The first seed of eager steps; None if ranks have a common one."""
        local = compat.global_seed(), secrets.randbits(31)
        where = "begins a step that runs eagerly"
        ranks = rank_checks.gather(self.config.transport, local, where)
        seeds = [seed for seed, _ in ranks]
        if None not in seeds and len(set(seeds)) == 1:
            return None
        return ranks[0][1] if seeds[0] is None else seeds[0]

    def end_data(self, batches: int, model: keras.Model, ranks: Ranks) -> None:
        """Check that the data of all ranks ends after so many batches.

        Collective: ranks whose data goes on are in a step of the same method,
        whose first exchanges are the same.

        Args:
            batches: the batches of all executions, also where the last one had
                fewer.
            model: the model.
            ranks: the ranks of the call.
        """
        eagerly = model.run_eagerly
        all_end = self.order.agreement.all_end
        compare = all_end if eagerly else self._all_end_in_graph
        # In the first step of an epoch ranks compare themselves in rounds, too.
        own_steps = not eagerly and not ranks.share_step
        in_rounds = own_steps and not self.order.at_first_step
        if not compare(tf.constant(batches, tf.int64), in_rounds):
            has_exact = model.steps_per_execution == 1
            number = str(batches) if has_exact else f"at most {batches}"
            raise self.order.agreement.mismatch_error(number)

    @functools.cached_property
    def _all_end_in_graph(self) -> Callable[[tf.Tensor, bool], tf.Tensor]:
        return tf.function(self.order.agreement.all_end, autograph=False)


def run_for_own_batch(
    step: Step,
    batch: Structure,
    model: keras.Model,
    active: ActiveStep,
    build: Callable[[keras.Optimizer, Sequence[Variable]], None],
) -> Structure:
    """Add a step of a tower with its own batch, which XLA compiles.

    It is the step of one device. XLA cannot compile what towers do with
    gradients, such as wait for one another; it compiles all before that. So a
    step that reads a weight after its update is not compiled.

    Args:
        step: a function of a batch.
        batch: the batch.
        model: the model.
        active: the step, whose ``apply`` handles calls of optimizers.
        build: builds an optimizer for weights, unless it is built.

    Returns:
        What the step returns.
    """
    traced = trace(
        step, batch, "fit", build, lambda: None, xla=True, active=active
    )
    late = [name for c in traced.updates.values() for name in c.read_later]
    if late:
        weights = ", ".join(late)
        log_no_xla(model, f"the step reads {weights} after an update of it")
        return step(batch)
    layouts = [REPLICATED for _ in traced.graph.inputs]
    program = partition_graph(
        traced.graph, layouts, traced.wanted, options=_COMPILED
    )
    places = Places(Ranks(), [[active.device]])
    inputs = DividedBatch.undivided(batch).inputs_of(
        program, traced.captures, {}, places
    )
    order = StepOrder(places.ranks.step)
    timeline = place_earliest(program, TensorSizes(program, 1, 1), 0)
    ready = TowerProgram(timeline, "xla", places, order)
    results = ready.add_to_graph(inputs)
    for name, gradients in traced.gradients_in(results).items():
        active.apply(traced.call_with(name, gradients))
    log_not_compiled(model, True, ready.xla)
    return traced.output_with(results)


def _values_of(result: object, model: keras.Model) -> list[tf.Tensor]:
    """Return the results and the weights that an eager step has computed."""
    weights = [v for v in collect(model).weights if not spans_ranks(v)]
    values = [copy_on_tower(native(weight)).read_value() for weight in weights]
    return data_lib.tensors_in(result) + values


def _scale_or_zero(
    factor: tf.Tensor, grads: Sequence[Gradient | None]
) -> list[Gradient | None]:
    """Multiply gradients by a factor; a factor of 0 turns NaN into 0, too."""

    def times(values: tf.Tensor) -> tf.Tensor:
        return tf.math.multiply_no_nan(values, tf.cast(factor, values.dtype))

    return [None if g is None else on_values(g, times) for g in grads]
