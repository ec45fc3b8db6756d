"""One step on all towers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from keras_towers import compat, devices
from keras_towers._notices import first_time
from keras_towers.errors import TowerError
from keras_towers.fit import marks
from keras_towers.fit.context import thread_state
from keras_towers.fit.contract import TRAINING, TowerConfig
from keras_towers.fit.data import batches as data_lib
from keras_towers.fit.places import ALONE, Places, Ranks
from keras_towers.fit.step import step_costs
from keras_towers.fit.step.compiled_update import apply_compiled
from keras_towers.fit.step.divided_batch import DividedBatch, shares_batches
from keras_towers.fit.step.graph_function import CallMode
from keras_towers.fit.step.program_inputs import capture
from keras_towers.fit.step.tower_program import TowerProgram
from keras_towers.fit.step.trace import Trace, trace, with_components
from keras_towers.fit.step_order import ComparedStep, StepOrder
from keras_towers.fit.traced_constants import constants_of
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.fit.weights.model_state import eager_cause
from keras_towers.fit.weights.tower_variables import TowerHandles, copy_first
from keras_towers.partition.layouts import REPLICATED, InShards
from keras_towers.partition.local_step import (
    LocalStep,
    to_local_step,
    write_only_rows,
)
from keras_towers.partition.mesh import partition_over_mesh
from keras_towers.partition.program import Program, Update
from keras_towers.reduction.gradients import on_values
from keras_towers.rendezvous import rank_checks, watch

logger = logging.getLogger("keras_towers")

Step: TypeAlias = Callable[[Any], Any]

# The collection of a graph for steps that it may have again, as functions:
# Keras unrolls the steps of an execution of ``predict``.
_REPEATED = "keras_towers_steps"
# The batch size to assume if it is unknown.
_ASSUMED_BATCH = 64
# Fewer rows per tower are not worth a separate exchange.
_MIN_GATHERED_ROWS = 32
# Ranks gather rows instead of a gradient if the rows are at least this many
# times smaller, and only for batches up to this size: for larger ones computing
# the gradient on every rank takes longer than sending it.
_MIN_SAVING_RATIO = 4
_MAX_GATHERED_BATCH = 256


@dataclasses.dataclass(frozen=True, eq=False)
class StepSettings:
    """What a step is traced for.

    Attributes:
        model: the model that runs it.
        kind: the method of Keras that it belongs to.
        places: where it computes, and with whom.
        undivided: which parts of batches have no row per example, as batches so
            far have shown, by the names of all their parts.
        examples: the usual number of examples of a batch, from which it chooses
            what to gather; None: unknown.
        on_trace: called with the graph of the step, and whether it gathers rows
            because of this number.
    """

    model: keras.Model
    kind: str
    places: Places
    undivided: dict[tuple[str, ...], set[str]]
    examples: int | None = None
    on_trace: Callable[[Any, bool], None] = lambda graph, gathers: None

    @property
    def trains(self) -> bool:
        """Whether the step trains."""
        return self.kind in TRAINING

    @property
    def xla(self) -> bool:
        """Whether XLA compiles it, where it can."""
        return bool(self.model.jit_compile)


class GlobalStep:
    """Runs steps of Keras on all towers, with the results of one device."""

    def __init__(self, update: WeightUpdate):
        self.order: StepOrder = update.order
        self.config: TowerConfig = update.config
        self.update = update
        self._eager_steps = itertools.count()

    def run_step(self, step: Step, batch: Any, settings: StepSettings) -> Any:
        """Run a step that trains, evaluates or predicts.

        Args:
            step: a function of a batch, which one device would call.
            batch: a global batch, or the towers' parts of one.
            settings: what it is traced for.
        """
        if tf.executing_eagerly():
            return self._on_one_device(step, batch, settings)
        graph: Any = compat.get_default_graph()
        repeated = graph.get_collection_ref(_REPEATED)
        # Each call gets another wrapper of AutoGraph.
        key = inspect.unwrap(step), settings.kind
        for other, again in repeated:
            if other == key:
                return again(batch)
        draws = compat.draws_of_graphs.get(graph, 0)
        result = self._add_to_graph(step, batch, settings)
        # Draws without a seed are others in each step.
        if draws == compat.draws_of_graphs.get(graph, 0):
            run = functools.partial(self._add_to_graph, step, settings=settings)
            again = tf.function(run, autograph=False, reduce_retracing=True)
            repeated.append((key, again))
        return result

    def _add_to_graph(
        self, step: Step, batch: Any, settings: StepSettings
    ) -> Any:
        divided = self._divide(batch, settings)
        recorded = settings.model if settings.trains else None
        # The first micro-batch of each tower.
        begins = divided.batch.pieces[:: settings.places.parts]
        with (
            watch.preparing(),
            self.order.in_turn(),
            marks.marked(recorded, self.config.devices, begins),
        ):
            result, program = self._run_divided(step, divided, settings)
        result = self.order.end_step(result)
        gathers = program.replaced_sums > 0
        settings.on_trace(compat.get_default_graph(), gathers)
        return result

    def _divide(self, data: Any, settings: StepSettings) -> DividedBatch:
        """Divide a batch over towers, once the previous step has ended."""
        places, local_sgd = settings.places, self.update.local_sgd
        divided = DividedBatch.of(
            self.config, places, data, settings.undivided, self.order
        )
        if local_sgd is not None and not places.ranks.share_step:
            local_sgd.begin_step(divided.share)
        return divided

    def _run_divided(
        self, step: Step, divided: DividedBatch, settings: StepSettings
    ) -> tuple[Any, Program]:
        places, variables = settings.places, self.update.variables
        ranks = places.ranks
        traced = self._trace(step, divided, settings)
        # The handles of variables that each tower has a copy or a shard of.
        alone = ranks.shards.size < self.config.shards.size
        on_towers = variables.on_towers(traced.captures, alone)
        if ranks.shards.size > 1 and not settings.trains:
            _refuse_writes_to_shards(traced, on_towers, settings)
        program, local_step = self._lay_out(
            traced, divided, on_towers, settings
        )
        if ranks.step.size > 1:
            self._compare_with_ranks(traced, program, divided, settings.model)
        inputs = divided.inputs_of(
            program,
            traced.captures,
            on_towers,
            places,
            local_step,
        )
        ready = TowerProgram(
            program,
            "xla" if settings.xla else self._call_mode(ranks),
            self._on_devices(places, bool(on_towers) and variables.mirrors),
            self.order,
            self.update.sum_traced,
        )
        update = functools.partial(
            self._update, traced, local_step, divided, settings
        )
        with contextlib.ExitStack() as stack:
            rounds = self.update.local_sgd
            if rounds is not None and not ranks.share_step:
                for optimizer in traced.traced_for:
                    around = rounds.around_update(optimizer, self.order)
                    stack.enter_context(around)
            results = ready.add_to_graph(inputs, update)
        step_costs.log_not_compiled(settings.model, settings.trains, ready.xla)
        return traced.output_with(results), program

    def _trace(
        self, step: Step, divided: DividedBatch, settings: StepSettings
    ) -> Trace:
        """Trace a step as one device runs it, with the first tower's values."""
        with contextlib.ExitStack() as view:
            view.enter_context(self.update.variables.first_copies())

            def build(optimizer: Any, weights: Sequence[Any]) -> None:
                # Slots are created next to all copies of their weights.
                view.close()
                self.update.make_ready(optimizer, weights)
                view.enter_context(self.update.variables.first_copies())

            return trace(
                step,
                divided.spec,
                settings.kind,
                build,
                own_statistics=self.config.options.batch_norm == "tower",
                xla=settings.xla,
                apply=self.update.apply_in_trace
                if self.update.is_traced
                else None,
            )

    def _lay_out(
        self,
        traced: Trace,
        divided: DividedBatch,
        on_towers: Mapping[int, TowerHandles],
        settings: StepSettings,
    ) -> tuple[Program, LocalStep | None]:
        """Lay a step out over the towers, and record what it costs.

        Args:
            traced: the step on one device.
            divided: its batch.
            on_towers: the captures of which each tower has a copy or a shard.
            settings: what it is traced for.
        """
        config, name = self.config, settings.model.name
        places, ranks = settings.places, settings.places.ranks
        of_captures = [
            on_towers[index].layout if index in on_towers else REPLICATED
            for index, _ in enumerate(traced.captures)
        ]
        first = len(divided.layouts)
        in_columns = {
            first + index: handles.columns
            for index, handles in on_towers.items()
            if handles.columns is not None
        }
        program = partition_over_mesh(
            traced.graph,
            [*divided.layouts, *of_captures],
            in_columns,
            traced.results,
            traced.update_infos(),
            traced.placed,
            columns=places.columns,
            ranks=ranks.step.size > 1,
            replicate_shards=ranks.replicate_shards,
            hooked=config.compresses,
            xla=settings.xla,
            gather_ratio=self._gather_ratio(settings),
            micro_batches=places.parts > 1,
            gather_bytes=config.options.gathered_bytes,
            examples=settings.examples or _ASSUMED_BATCH,
        )
        local_step = None
        if not ranks.share_step and self.update.local_sgd is not None:
            program = write_only_rows(program)
        elif not ranks.share_step:
            local_step = to_local_step(program)
            program = local_step.program
            has_all = len(local_step.parts) == len(program.updates)
            said = not has_all and ranks.job.rank == 0
            if said and first_time(settings.model, ("own rows", config.name)):
                logger.warning(
                    "the gradients of model %r need values of the whole batch, "
                    "such as the statistics of a BatchNormalization or the "
                    "number of masked entries, and each worker with %s "
                    "computes them from its own part only: the weights will "
                    "differ from the weights on one device. HorovodStrategy "
                    "and MultiWorkerTowerStrategy give equal weights.",
                    name,
                    config.name,
                )
        step_costs.record_costs(
            config, settings.kind, settings.model, program, places
        )
        return program, local_step

    def _compare_with_ranks(
        self,
        traced: Trace,
        program: Program,
        divided: DividedBatch,
        model: keras.Model,
    ) -> None:
        """Compare the step with those of other ranks; share its variables."""
        exchanges = [
            f"{e.kind} {e.given.dtype.name} {e.result.shape}"
            for e in program.exchanges
        ]
        outside = traced.variables_outside(model)
        variables = [
            f"outside of the model: {_describe_variable(capture(t))}"
            for t in outside
        ]
        compared = ComparedStep(
            [*exchanges, *traced.describe_gradients(), *variables],
            constants_of(traced),
            divided.spec,
            divided.fingerprint,
        )
        copies = self.update.variables.handles()
        others = [copies.get(id(handle), [handle]) for handle in outside]
        self.order.compare(compared, others, self.config.devices)

    def _gather_ratio(self, settings: StepSettings) -> float | None:
        """Return how many times larger a sum must be to gather rows instead."""
        config, examples = self.config, settings.examples
        places, ranks = settings.places, settings.places.ranks
        on_host = devices.all_on_host(config.devices)
        is_local = not ranks.share_step and self.update.local_sgd is None
        if is_local or places.parts > 1 or self.update.is_traced:
            return None
        if ranks.step.size == 1:
            # On one host, gathering does not change the computing time.
            rows = -(-(examples or _ASSUMED_BATCH) // places.towers)
            return max(rows, _MIN_GATHERED_ROWS) if on_host else None
        # Every rank computes the gradient.
        few = examples is not None and examples <= _MAX_GATHERED_BATCH
        is_lossless = config.options.compression in (None, "none")
        one_device = on_host or places.towers == 1
        if not (few and is_lossless and one_device):
            return None
        return _MIN_SAVING_RATIO * (examples or 0)

    def _on_devices(self, places: Places, copied: bool) -> Places:
        """Return places with the devices on which towers compute.

        Args:
            places: the places of the step.
            copied: whether each tower has copies of variables on its device.
        """
        mesh = places.mesh
        if copied or not devices.all_on_host(itertools.chain(*mesh)):
            return places
        # They share all cores anyway, and TensorFlow instantiates each function
        # only once for a single device.
        mesh = [[mesh[0][0] for _ in row] for row in mesh]
        return dataclasses.replace(places, mesh=mesh)

    def _call_mode(self, ranks: Ranks) -> CallMode:
        """Return how towers call their functions.

        Inlined functions send gradients to other ranks while the step computes
        more, and TensorFlow optimizes them, as accelerators need.
        """
        on_host = devices.all_on_host(self.config.devices)
        return "called" if ranks.step.size == 1 and on_host else "inlined"

    def _update(
        self,
        traced: Trace,
        local_step: LocalStep | None,
        divided: DividedBatch,
        settings: StepSettings,
        update: Update,
        parts: list[list[Any]],
        shared: list[Any],
    ) -> None:
        call = dataclasses.replace(
            traced.updates[update.name],
            apply_compiled=apply_compiled if settings.xla else None,
        )
        grads = [with_components(call.grads, tensors) for tensors in parts]
        sums = with_components(call.grads, shared)
        weight, number = 1, settings.places.ranks.batch.size
        if local_step is not None and update.name in local_step.parts:
            # The workers' gradients are averaged.
            weight = number
            sums = _scale_or_zero(1 / weight, sums)
        elif local_step is not None:
            share = divided.share * number
            grads = [_scale_or_zero(share, of_tower) for of_tower in grads]
            sums = _scale_or_zero(share, sums)
        self.update.reduce_and_apply(call, grads, sums, weight)

    def plan(
        self, step: Step, batch: Any, settings: StepSettings
    ) -> tuple[Trace, Program]:
        """Trace a step and lay it out, without adding it to a graph.

        Args:
            step: a function of a batch, which one device would call.
            batch: a global batch, of placeholders.
            settings: what it is traced for.
        """
        divided = self._divide(batch, settings)
        traced = self._trace(step, divided, settings)
        on_towers = self.update.variables.on_towers(traced.captures)
        program, _ = self._lay_out(traced, divided, on_towers, settings)
        return traced, program

    def _on_one_device(
        self, step: Step, batch: Any, settings: StepSettings
    ) -> Any:
        """Run an untraced step as on one device, with a warning."""
        config, variables = self.config, self.update.variables
        model, places = settings.model, settings.places
        if first_time(model, ("runs eagerly", config.name)):
            logger.warning(
                "model %r runs eagerly, so its steps are not divided: they run "
                "as on one device under %s. Leave out %s to train on all "
                "towers.",
                model.name,
                config.name,
                eager_cause(model),
            )
        # Each rank computes the step on the global batch, also where it would
        # train on its own part only: its updates belong to no round.
        together = places.ranks.batch is config.transport
        transport = config.transport if together else ALONE
        is_whole = data_lib.is_whole(batch)
        if is_whole and shares_batches(config, places.ranks):
            self.order.check_first(batch)
        whole = data_lib.as_one_batch(config, places, batch)
        with contextlib.ExitStack() as stack:
            if transport.size > 1:
                if not is_whole or config.options.batches == "each":
                    whole = data_lib.gather_batch(whole, transport)
                if self._eager_seed is not None:
                    # Between steps, ranks may draw different numbers of values.
                    seed = self._eager_seed + next(self._eager_steps)
                    stack.enter_context(compat.global_seed_of(seed))
            stack.enter_context(compat.single_device_mode())
            one_device = thread_state.trains_on_one_device
            stack.enter_context(one_device.holding(settings.trains))
            stack.enter_context(variables.first_copies())
            result = step(whole)
        for handles_of_towers in variables.handles().values():
            copy_first(handles_of_towers, config.devices)
        return result

    @functools.cached_property
    def _eager_seed(self) -> int | None:
        """The first seed of eager steps; None: all ranks have a common one."""
        local = compat.global_seed(), secrets.randbits(31)
        where = "begins a step that runs eagerly"
        ranks = rank_checks.gather(self.config.transport, local, where)
        seeds = [seed for seed, _ in ranks]
        if None not in seeds and len(set(seeds)) == 1:
            return None
        return ranks[0][1] if seeds[0] is None else seeds[0]

    def end_data(self, batches: int, model: keras.Model, ranks: Ranks) -> None:
        """Check that the data of all ranks ends after so many batches.

        Collective: ranks whose data goes on are in a step of the method, which
        has the same exchanges first.

        Args:
            batches: the batches of all executions, also where the last one had
                fewer.
            model: the model.
            ranks: the ranks of the call.
        """
        eagerly = model.run_eagerly
        compare = self._all_end if eagerly else self._all_end_in_graph
        in_rounds = not eagerly and not ranks.share_step
        if not compare(tf.constant(batches, tf.int64), in_rounds):
            has_exact = model.steps_per_execution == 1
            number = str(batches) if has_exact else f"at most {batches}"
            raise self.order.agreement.mismatch_error(number)

    def _all_end(self, batches: tf.Tensor, in_rounds: bool) -> tf.Tensor:
        first = [self.order.check_first(())]
        return self.order.agreement.all_end(batches, first, in_rounds)

    @functools.cached_property
    def _all_end_in_graph(self) -> Callable[[tf.Tensor, bool], tf.Tensor]:
        return tf.function(self._all_end, autograph=False)


def _refuse_writes_to_shards(
    traced: Trace,
    on_towers: Mapping[int, TowerHandles],
    settings: StepSettings,
) -> None:
    """Refuse a step that would leave the wholes that ranks hold behind."""
    written = {id(tensor) for tensor in traced.written}
    for index, found in on_towers.items():
        tensor = traced.captures[index]
        if id(tensor) in written and isinstance(found.layout, InShards):
            raise TowerError(
                f"{settings.kind} of model {settings.model.name!r} writes "
                f"{_describe_variable(capture(tensor))}, in shards on several "
                "ranks, and only steps that train may write it there. Write it "
                'in the training step, or leave weights="sharded" out.'
            )


def _describe_variable(handle: Any) -> str:
    """Describe a variable, given its handle."""
    found = compat.get_resource_handle_data(handle).shape_and_type[0]
    shape, dtype = tf.TensorShape(found.shape), tf.as_dtype(found.dtype)
    return f"a variable {shape} {dtype.name}"


def _scale_or_zero(factor: Any, grads: Sequence[Any]) -> list[Any]:
    """Multiply gradients by a factor; a factor of 0 turns NaN into 0, too."""

    def times(values: tf.Tensor) -> tf.Tensor:
        return tf.math.multiply_no_nan(values, tf.cast(factor, values.dtype))

    return [None if g is None else on_values(g, times) for g in grads]
