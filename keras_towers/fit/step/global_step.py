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
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat, devices
from keras_towers._notices import first_time
from keras_towers.errors import TowerError
from keras_towers.fit.context import thread_state
from keras_towers.fit.contract import TRAINING, KerasCall, TowerConfig
from keras_towers.fit.data import batches as data_lib
from keras_towers.fit.data import same_data
from keras_towers.fit.step import marks, program_inputs, step_costs
from keras_towers.fit.step.divided_batch import DividedBatch, share_of
from keras_towers.fit.step.graph_function import CallMode
from keras_towers.fit.step.program_inputs import capture
from keras_towers.fit.step.step_order import (
    ComparedStep,
    StepOrder,
    outside_of_loops,
)
from keras_towers.fit.step.tower_program import TowerProgram
from keras_towers.fit.step.trace import Trace, trace, with_components
from keras_towers.fit.step.traced_constants import constants_of
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
from keras_towers.transport import SingleProcess, Transport

logger = logging.getLogger("keras_towers")

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


def ignore_trace(graph: Any) -> None:
    """Do nothing with the graph of a step that has been traced."""


class GlobalStep:
    """Runs steps of Keras on all towers, with the results of one device.

    Attributes:
        micro_batches: the number of micro-batches of each tower, in steps that
            are traced from now on.
        on_trace: called with the graph of a step that has been traced.
        examples: the usual number of examples of a batch, from which a step
            chooses what to gather; None: unknown.
        has_gathered: whether a step has gathered rows because of this number.
        undivided: which parts of batches have no row per example, as batches so
            far have shown, by the names of all their parts.
    """

    def __init__(self, update: WeightUpdate, config: TowerConfig | None = None):
        self.order: StepOrder = (
            StepOrder(config.transport) if config else update.order
        )
        self.undivided: dict[tuple[str, ...], set[str]] = {}
        self.config: TowerConfig = config or update.config
        self.update = update
        number = self.config.options.micro_batches
        self.micro_batches: int = 1 if number == "auto" else number
        self.on_trace: Callable[[Any], None] = ignore_trace
        self.examples: int | None = None
        self.has_gathered = False
        self._eager_steps = itertools.count()

    def end_data(self, batches: int, model: keras.Model, kind: str) -> None:
        """Check that the data of all ranks ends after so many batches.

        Collective: ranks whose data goes on are in a step of the method, which
        has the same exchanges first.

        Args:
            batches: the batches of all executions, also where the last one had
                fewer.
            model: the model.
            kind: the method of Keras.
        """
        eagerly = model.run_eagerly
        compare = self._all_end if eagerly else self._all_end_in_graph
        in_rounds = not eagerly and self._diverges(kind)
        if not compare(tf.constant(batches, tf.int64), in_rounds):
            has_exact = model.steps_per_execution == 1
            number = str(batches) if has_exact else f"at most {batches}"
            raise self.order.agreement.mismatch_error(number)

    def _all_end(self, batches: tf.Tensor, in_rounds: bool) -> tf.Tensor:
        first = [self._check_first(())] if self._shares_batches else []
        return self.order.agreement.all_end(batches, first, in_rounds)

    @functools.cached_property
    def _all_end_in_graph(self) -> Callable[[tf.Tensor, bool], tf.Tensor]:
        return tf.function(self._all_end, autograph=False)

    @property
    def _shares_batches(self) -> bool:
        """Whether all ranks have to read the same batches."""
        config = self.config
        return config.transport.size > 1 and config.options.batches == "split"

    def _check_first(self, batch: Any) -> tf.Tensor:
        """Check that the first batch of an epoch is the same on all ranks."""
        transport = self.config.transport
        check = functools.partial(same_data.check_batch, transport, batch)
        return self.order.in_first_step(outside_of_loops(check))

    @functools.cached_property
    def without_other_processes(self) -> GlobalStep:
        """The same steps without the other processes."""
        return GlobalStep(self.update, self.config.without_other_processes())

    def run_step(
        self, step: Callable[[Any], Any], batch: Any, call: KerasCall
    ) -> Any:
        """Run a step that trains, evaluates or predicts.

        Args:
            step: a function of a batch, which one device would call.
            batch: a global batch, or the towers' parts of one.
            call: the call of Keras's method that the step belongs to.
        """
        if tf.executing_eagerly():
            return self._on_one_device(step, batch, call)
        graph: Any = compat.get_default_graph()
        repeated = graph.get_collection_ref(_REPEATED)
        # Each call gets another wrapper of AutoGraph.
        key = inspect.unwrap(step), call.kind
        for other, again in repeated:
            if other == key:
                return again(batch)
        draws = compat.draws_of_graphs.get(graph, 0)
        result = self._add_to_graph(step, batch, call)
        # Draws without a seed are others in each step.
        if draws == compat.draws_of_graphs.get(graph, 0):
            # The graph does not keep the user's data.
            call = dataclasses.replace(call, arguments={})
            run = functools.partial(self._add_to_graph, step, call=call)
            again = tf.function(run, autograph=False, reduce_retracing=True)
            repeated.append((key, again))
        return result

    def _add_to_graph(
        self, step: Callable[[Any], Any], batch: Any, call: KerasCall
    ) -> Any:
        divided = self._divide(batch, call.kind)
        recorded = call.model if call.trains else None
        # The first micro-batch of each tower.
        begins = divided.batch.pieces[:: self.micro_batches]
        with (
            watch.preparing(),
            self.order.in_turn(),
            marks.marked(recorded, self.config.devices, begins),
        ):
            result = self._run_divided(step, divided, call)
        result = self.order.end_step(result)
        self.on_trace(compat.get_default_graph())
        return result

    def _on_one_device(
        self, step: Callable[[Any], Any], batch: Any, call: KerasCall
    ) -> Any:
        """Run an untraced step as on one device, with a warning."""
        config, variables = self.config, self.update.variables
        if first_time(call.model, ("runs eagerly", config.name)):
            logger.warning(
                "model %r runs eagerly, so its steps are not divided: they run "
                "as on one device under %s. Leave out %s to train on all "
                "towers.",
                call.model.name,
                config.name,
                eager_cause(call.model),
            )
        # Each rank computes the step on the global batch, also where it would
        # train on its own part only: its updates belong to no round.
        transport = self._ranks_of_batch(call.kind)
        is_whole = data_lib.is_whole(batch)
        if self._shares_batches and is_whole:
            self._check_first(batch)
        whole = data_lib.as_one_batch(config, batch)
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
            stack.enter_context(one_device.holding(call.trains))
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

    def _divide(self, data: Any, kind: str) -> DividedBatch:
        """Divide a batch over towers, once the previous step has ended.

        ``Batch.split`` cuts a whole batch into the towers' rows.
        """
        whole = data_lib.is_whole(data)
        undivided = self.undivided
        batch, like = data_lib.as_tower_batch(self.config, data, undivided)
        batch = self.order.begin_step(batch)
        fingerprint = None
        if self._shares_batches and whole:
            check = functools.partial(self._check_first, data)
            batch = self.order.begin_after(check, batch)
            fingerprint = same_data.rounded_fingerprint(data)
        of_all, batch = self._count_examples(batch, kind, like)
        specs = like.with_structure(batch.pieces[0]).specs(any_size=True)
        if whole and self._sees_global_batch:
            specs = like.specs()
        batch = batch.in_micro_batches(self.micro_batches, like)
        return DividedBatch(batch, specs, of_all, fingerprint)

    @property
    def _sees_global_batch(self) -> bool:
        """Whether Keras passes the batch of one device to a step."""
        config = self.config
        rank_batches = (
            config.options.batches == "each" and config.transport.size > 1
        )
        local_sgd = self.update.local_sgd is not None
        return not (rank_batches or local_sgd or config.others is not None)

    def _run_divided(
        self, step: Callable[[Any], Any], divided: DividedBatch, call: KerasCall
    ) -> Any:
        config, transport = self.config, self._transport_of(call.kind)
        traced = self._trace(step, divided, call)
        # The handles of variables that each tower has a copy or a shard of.
        variables = self.update.variables
        alone = transport.size < self.update.config.transport.size
        on_towers = variables.on_towers(traced.captures, alone)
        if transport.size > 1 and not call.trains:
            _refuse_writes_to_shards(traced, on_towers, call)
        program, local_step = self._lay_out(traced, divided, on_towers, call)
        if transport.size > 1:
            self._compare_with_ranks(traced, program, divided, call.model)
        common, parts = divided.values_of(
            program.inputs,
            transport.rank == 0,
            local_step,
            config.peers.rank == 0,
        )
        inputs, towers = program.inputs, config.num_towers
        program_inputs.add_captures(
            inputs, traced.captures, on_towers, common, parts, towers
        )
        program_inputs.add_shares(inputs, parts, towers, transport)
        first = len(divided.layouts)
        of_columns, of_cells = program_inputs.column_inputs(
            inputs,
            {first + index: handles for index, handles in on_towers.items()},
            towers,
            config.num_columns,
        )
        ready = TowerProgram(
            program,
            "xla" if call.model.jit_compile else self._call_mode(),
            self._mesh(bool(on_towers) and variables.mirrors),
            transport,
            self.order,
            len(parts) // towers,
        )
        update = functools.partial(
            self._update, traced, local_step, divided, call
        )
        results = ready.add_to_graph(
            common, parts, update, of_columns, of_cells
        )
        functions = ready.functions
        if functions.not_compiled:
            (reason, source), *_ = functions.not_compiled
            where = "" if source is None else f": {step_costs.line_of(source)}"
            what = "a part of the step" if functions.compiled else "the step"
            log_without_xla(call.model, call.trains, f"{what} {reason}{where}")
        return traced.output_with(results)

    def plan(
        self, step: Callable[[Any], Any], batch: Any, call: KerasCall
    ) -> tuple[Trace, Program]:
        """Trace a step and lay it out, without adding it to a graph.

        Args:
            step: a function of a batch, which one device would call.
            batch: a global batch, of placeholders.
            call: the call of Keras's method that the step belongs to.
        """
        divided = self._divide(batch, call.kind)
        traced = self._trace(step, divided, call)
        on_towers = self.update.variables.on_towers(traced.captures)
        program, _ = self._lay_out(traced, divided, on_towers, call)
        return traced, program

    def _trace(
        self, step: Callable[[Any], Any], divided: DividedBatch, call: KerasCall
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
                call.kind,
                build,
                own_statistics=self.config.options.batch_norm == "tower",
                xla=bool(call.model.jit_compile),
                apply=self.update.apply_in_trace
                if self.update.is_traced
                else None,
            )

    def _lay_out(
        self,
        traced: Trace,
        divided: DividedBatch,
        on_towers: Mapping[int, TowerHandles],
        call: KerasCall,
    ) -> tuple[Program, LocalStep | None]:
        """Lay a step out over the towers, and record what it costs.

        Args:
            traced: the step on one device.
            divided: its batch.
            on_towers: the captures of which each tower has a copy or a shard.
            call: the call of Keras's method that the step belongs to.
        """
        config, name = self.config, call.model.name
        transport = self._transport_of(call.kind)
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
            columns=config.num_columns,
            ranks=transport.size > 1,
            xla=bool(call.model.jit_compile),
            gather_ratio=self._gather_ratio(transport),
            micro_batches=self.micro_batches > 1,
            gather_bytes=config.options.gathered_bytes,
            examples=self.examples or _ASSUMED_BATCH,
        )
        self.has_gathered |= program.replaced_sums > 0
        if self._diverges(call.kind):
            program = write_only_rows(program)
        local_step = to_local_step(program) if self._has_workers else None
        if local_step is not None:
            program = local_step.program
            has_all = len(local_step.parts) == len(program.updates)
            said = not has_all and config.peers.rank == 0
            if said and first_time(call.model, ("own rows", config.name)):
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
        parts = config.num_replicas * self.micro_batches
        step_costs.record_costs(config, call.kind, call.model, program, parts)
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

    @property
    def _has_workers(self) -> bool:
        """Whether several workers each compute a part of the batch."""
        others = self.config.others
        split = self.config.options.batches == "split"
        return split and others is not None and others.size > 1

    def _gather_ratio(self, transport: Transport) -> float | None:
        """Return how many times larger a sum must be to gather rows instead."""
        config, examples = self.config, self.examples
        on_host = devices.all_on_host(config.devices)
        if self._has_workers or self.micro_batches > 1 or self.update.is_traced:
            return None
        if transport.size == 1:
            # On one host, gathering does not change the computing time.
            rows = -(-(examples or _ASSUMED_BATCH) // config.num_towers)
            return max(rows, _MIN_GATHERED_ROWS) if on_host else None
        # Every rank computes the gradient.
        few = examples is not None and examples <= _MAX_GATHERED_BATCH
        is_lossless = config.options.compression in (None, "none")
        one_device = on_host or config.num_towers == 1
        if not (few and is_lossless and one_device):
            return None
        return _MIN_SAVING_RATIO * (examples or 0)

    def _mesh(self, copied: bool) -> Sequence[Sequence[str]]:
        """Return where the columns of this process's towers compute.

        Args:
            copied: whether each tower has copies of variables on its device.
        """
        mesh = self.config.mesh
        if copied or not devices.all_on_host(itertools.chain(*mesh)):
            return mesh
        # They share all cores anyway, and TensorFlow instantiates each function
        # only once for a single device.
        return [[mesh[0][0] for _ in row] for row in mesh]

    def _call_mode(self) -> CallMode:
        """Return how towers call their functions.

        Inlined functions send gradients to other ranks while the step computes
        more, and TensorFlow optimizes them, as accelerators need.
        """
        on_host = devices.all_on_host(self.config.devices)
        one_process = self.config.transport.size == 1
        return "called" if one_process and on_host else "inlined"

    def _update(
        self,
        traced: Trace,
        local_step: LocalStep | None,
        divided: DividedBatch,
        keras_call: KerasCall,
        update: Update,
        parts: list[list[Any]],
        shared: list[Any],
    ) -> None:
        call = dataclasses.replace(
            traced.updates[update.name],
            is_compiled=bool(keras_call.model.jit_compile),
        )
        grads = [with_components(call.grads, tensors) for tensors in parts]
        sums = with_components(call.grads, shared)
        weight = 1
        if local_step is not None and update.name in local_step.parts:
            # The workers' gradients are averaged.
            weight = self.config.peers.size
            sums = _scale_or_zero(1 / weight, sums)
        elif local_step is not None:
            share = divided.share * self.config.peers.size
            grads = [_scale_or_zero(share, of_tower) for of_tower in grads]
            sums = _scale_or_zero(share, sums)
        self.update.reduce_and_apply(call, grads, sums, weight)

    def _transport_of(self, kind: str) -> Transport:
        """Return the transport in the steps of a method."""
        if self._diverges(kind):
            return SingleProcess()
        return self._ranks_of_batch(kind)

    def _diverges(self, kind: str) -> bool:
        """Whether a step changes the variables of this rank only."""
        return self.update.local_sgd is not None and kind in TRAINING

    def _ranks_of_batch(self, kind: str) -> Transport:
        """Return the transport to the ranks that have parts of a batch."""
        if self.config.runs_alone(kind):
            return SingleProcess()
        return self.config.transport

    def _count_examples(
        self, batch: data_lib.TowerBatch, kind: str, like: data_lib.Batch
    ) -> tuple[data_lib.TowerBatch, data_lib.TowerBatch]:
        """Count the examples of a step.

        Returns:
            The batch, as a part of the batch of all processes, and as a part of
            the batch of the processes that compute the step together.
        """
        config, local_sgd = self.config, self.update.local_sgd
        counts = batch.counts(like)
        if all(isinstance(count, int) for count in counts):
            here = sum(counts)
        else:
            with tf.device(compat.HOST):
                here = tf.add_n([tf.cast(count, tf.int64) for count in counts])
        if batch.is_counted:
            of_all = batch
        elif self.config.runs_alone(kind):
            of_all = batch._replace(total=here, start=0)
        else:
            of_all = self.order.count(batch, here)
        together = self._transport_of(kind).size == config.peers.size
        if together or config.num_replicas == config.num_towers:
            return of_all, of_all
        if local_sgd is not None and kind in TRAINING:
            local_sgd.begin_step(share_of(here, of_all.total))
        return of_all, of_all._replace(total=here, start=0)


def _refuse_writes_to_shards(
    traced: Trace, on_towers: Mapping[int, TowerHandles], call: KerasCall
) -> None:
    """Refuse a step that would leave the wholes that ranks hold behind."""
    written = {id(tensor) for tensor in traced.written}
    for index, found in on_towers.items():
        tensor = traced.captures[index]
        if id(tensor) in written and isinstance(found.layout, InShards):
            raise TowerError(
                f"{call.kind} of model {call.model.name!r} writes "
                f"{_describe_variable(capture(tensor))}, in shards on several "
                "ranks, and only steps that train may write it there. Write it "
                'in the training step, or leave weights="sharded" out.'
            )


def log_without_xla(trainer: keras.Model, training: bool, why: str) -> None:
    """Log once that XLA compiles no training, or evaluation, steps of a model.

    It is a warning if the user requested XLA: if Keras would not turn it on by
    default.
    """
    kind = "training" if training else "evaluation"
    line = f"jit_compile is off for {kind} of {trainer.name!r} on towers: {why}"
    if first_time(trainer, line):
        by_user = not trainer._resolve_auto_jit_compile()
        level = logging.WARNING if by_user else logging.INFO
        logger.log(level, "%s", line)


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
