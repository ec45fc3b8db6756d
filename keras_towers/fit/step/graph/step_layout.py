"""The layout of a step over towers, and the settings that it is traced for.

``global_step.py`` calls ``lay_out`` with the trace, and a search for a plan
(``plan_search.py``) ``with_timeline`` with the result. ``partition/`` does the
work.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping

import keras
import tensorflow as tf

from keras_towers.fit.components import TRAINING, TowerConfig
from keras_towers.fit.options import Shards
from keras_towers.fit.places import Places
from keras_towers.fit.step.graph.graph_function import CallMode
from keras_towers.fit.step.graph.step_inputs import DividedBatch, capture
from keras_towers.fit.step.graph.trace import Trace
from keras_towers.fit.update.sharding_policy import ShardingPolicy
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.fit.weights.tower_variables import TowerHandles
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.notices import first_time, logger
from keras_towers.foundation.object_types import Structure
from keras_towers.partition import LayoutOptions, Program, partition_over_mesh
from keras_towers.partition.ir.axes import SHARDS, TOWERS
from keras_towers.partition.ir.layouts import FIXED, REPLICATED
from keras_towers.partition.ir.sizes import ASSUMED_LENGTH
from keras_towers.partition.timeline.kept_results import KEEP_ALL, RematLimits
from keras_towers.partition.timeline.local_step import (
    LocalStep,
    to_local_step,
    write_only_rows,
)
from keras_towers.partition.timeline.memory_estimate import ALIKE
from keras_towers.partition.timeline.schedule import BatchSplit, schedule
from keras_towers.partition.timeline.timeline import Timeline
from keras_towers.transport import devices

# Fewer rows per tower are not worth a separate exchange.
_MIN_GATHERED_ROWS = 32
# Ranks gather rows instead of a gradient if the rows are at least this many
# times smaller, and only for batches up to this size: for larger ones computing
# the gradient on every rank takes longer than sending it.
_MIN_SAVING_RATIO = 4
_MAX_GATHERED_BATCH = 256


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """A way to make a step fit into memory.

    Attributes:
        micro_batches: the number of micro-batches of each tower.
        bytes: what a tower is planned to have at a time, for a usual batch,
            besides variables.
        held: the bytes of variables on a device; 0: not compared.
        shards: the option that divides variables, or would.
    """

    micro_batches: int
    bytes: int
    held: int = 0
    shards: Shards | None = None

    @property
    def total(self) -> int:
        """The bytes on a device at a time."""
        return self.held + self.bytes

    def needs_less_than(self, other: MemoryPlan) -> bool:
        """Whether this plan needs clearly less memory than another one."""
        if self.shards == other.shards:
            own, others = self.bytes, other.bytes
        else:
            own, others = self.total, other.total
        return self.micro_batches > other.micro_batches or own * ALIKE < others


@dataclasses.dataclass(frozen=True, eq=False)
class StepSettings:
    """The settings that a step is traced for.

    Attributes:
        model: the model that runs it.
        kind: the method of Keras that it belongs to.
        places: where it computes, and with whom.
        undivided: which parts of batches have no row per example, as batches so
            far have shown, by the names of all their parts.
        examples: the usual number of examples of a batch, from which it chooses
            what to gather; None: unknown.
        rows: the most rows of a tower, each of which may become a micro-batch
            of its own; None: the number of micro-batches is given.
        failed: the plan with which memory has run out; None: it has not.
        repeats: whether a step that runs out of memory is repeated.
        place: places the variables that a trace of the step makes.
        divide: divides variables by an option; None: they stay as they are.
        make: makes and places variables before data are read for a first step.
        on_trace: called with the graph of the step, and its layout.
        around: called with what adds the step to a graph, and adds what else
            belongs to it; returns what the step returns.
    """

    model: keras.Model
    kind: str
    places: Places
    undivided: dict[tuple[str, ...], set[str]]
    examples: int | None = None
    rows: int | None = None
    failed: MemoryPlan | None = None
    repeats: bool = False
    place: Callable[[], None] = lambda: None
    divide: Callable[[Shards], None] | None = None
    make: Callable[[], None] = lambda: None
    on_trace: Callable[[tf.Graph, StepLayout], None] = lambda *_: None
    around: Callable[[Callable[[], Structure]], Structure] = lambda add: add()

    @property
    def trains(self) -> bool:
        """Whether the step trains."""
        return self.kind in TRAINING

    @property
    def xla(self) -> bool:
        """Whether XLA compiles the step, where it can."""
        return bool(self.model.jit_compile)


@dataclasses.dataclass(frozen=True, eq=False)
class StepLayout:
    """A step that is laid out over towers.

    Attributes:
        traced: the step on one device.
        divided: its batch.
        settings: what it is traced for.
        program: what towers compute and exchange.
        on_towers: the handles of variables that each tower has a copy or a
            shard of, by their index among the captures.
        local_step: the step of a rank that computes its own part only; None:
            all ranks share one.
        timeline: when they do what, once that is decided, like the next one.
        plan: how they make it fit into memory.
    """

    traced: Trace
    divided: DividedBatch
    settings: StepSettings
    program: Program
    on_towers: Mapping[int, TowerHandles]
    local_step: LocalStep | None
    timeline: Timeline | None = None
    plan: MemoryPlan | None = None

    @property
    def scheduled(self) -> Timeline:
        """The timeline.

        Raises:
            AssertionError: it is not decided yet.
        """
        assert self.timeline is not None, "a step without a timeline"
        return self.timeline


def lay_out(
    update: WeightUpdate,
    traced: Trace,
    divided: DividedBatch,
    settings: StepSettings,
) -> StepLayout:
    """Lay out a step over the towers.

    Args:
        update: the towers, and their variables.
        traced: the step on one device.
        divided: its batch.
        settings: what it is traced for.
    """
    config, ranks = update.config, settings.places.ranks
    is_alone = ranks.shards.size < config.shards.size
    on_towers = update.variables.on_towers(traced.captures, is_alone)
    if ranks.shards.size > 1 and not settings.trains:
        _refuse_writes_to_shards(update.sharding, traced, on_towers, settings)
    program = _divide_trace(update, traced, divided, on_towers, settings)
    local_step = None
    if not ranks.share_step and update.local_sgd is not None:
        program = write_only_rows(program)
    elif not ranks.share_step:
        gradients = traced.gradients_in(program.results)
        local_step = to_local_step(program, gradients)
        program = local_step.program
        _warn_of_own_rows(config, local_step, traced, settings)
    return StepLayout(traced, divided, settings, program, on_towers, local_step)


def with_timeline(
    config: TowerConfig,
    layout: StepLayout,
    remat: RematLimits,
    gather_bytes: int,
) -> StepLayout:
    """Return a step with its timeline.

    Ranks that share a step decide alike.

    Args:
        config: the towers.
        layout: the step.
        remat: what may be computed again, if the step trains.
        gather_bytes: the bytes of gathered weights at a time.
    """
    settings = layout.settings
    places, examples = settings.places, settings.examples or ASSUMED_LENGTH
    towers = places.ranks.batch.size * config.num_towers * places.micro_batches
    has_segments = settings.trains and config.options.remat is not False
    split = BatchSplit(
        towers,
        rows=-(-examples // towers),
        parts=places.micro_batches,
        sharing=places.towers if devices.all_on_host(config.devices) else 1,
        over_ranks=places.ranks.step.size > 1,
    )
    timeline = schedule(
        layout.program,
        split,
        remat if settings.trains else KEEP_ALL,
        layout.traced.segments if has_segments else None,
        gather_bytes,
        xla=settings.xla,
    )
    return dataclasses.replace(layout, timeline=timeline)


def _divide_trace(
    update: WeightUpdate,
    traced: Trace,
    divided: DividedBatch,
    on_towers: Mapping[int, TowerHandles],
    settings: StepSettings,
) -> Program:
    places = settings.places
    are_several = places.ranks.step.size > 1
    fixed = traced.fixed_tables if are_several else {}
    of_captures = [
        on_towers[index].layout.towers
        if index in on_towers
        else FIXED
        if id(tensor) in fixed
        else REPLICATED
        for index, tensor in enumerate(traced.captures)
    ]
    first = len(divided.layouts)
    in_columns = {
        first + index: handles.layout.columns
        for index, handles in on_towers.items()
        if handles.layout.columns is not None
    }
    return partition_over_mesh(
        traced.graph,
        [*divided.layouts, *of_captures],
        in_columns,
        traced.wanted,
        traced.layouts,
        traced.in_updates,
        places.columns,
        LayoutOptions(
            axes=places.axes,
            shard_axes=TOWERS if places.ranks.replicate_shards else SHARDS,
            xla=settings.xla,
            gather_ratio=_gather_ratio(update, settings),
            examples=settings.examples or ASSUMED_LENGTH,
        ),
    )


def _warn_of_own_rows(
    config: TowerConfig,
    local_step: LocalStep,
    traced: Trace,
    settings: StepSettings,
) -> None:
    """Warn if a rank uses only its own rows where one device uses all."""
    has_all = len(local_step.parts) == len(traced.updates)
    is_first = settings.places.ranks.job.rank == 0
    if has_all or not is_first:
        return
    if first_time(settings.model, ("own rows", config.name)):
        logger.warning(
            "the gradients of model %r need values of the whole batch, such "
            "as the statistics of a BatchNormalization or the number of "
            "masked entries. With %s, each worker computes them from its own "
            "part, so the weights will differ from one device. "
            "HorovodStrategy and MultiWorkerTowerStrategy give equal weights.",
            settings.model.name,
            config.name,
        )


def _gather_ratio(update: WeightUpdate, settings: StepSettings) -> float | None:
    """Return how many times larger a sum must be to gather rows instead."""
    config, examples = update.config, settings.examples
    places, ranks = settings.places, settings.places.ranks
    on_host = devices.all_on_host(config.devices)
    is_local = not ranks.share_step and update.local_sgd is None
    if is_local or places.micro_batches > 1 or update.sharding.divide_any:
        return None
    if callable(config.options.mode):
        # A function of the user's gets each gradient.
        return None
    if ranks.step.size == 1:
        # On one host, gathering does not change the computing time.
        rows = -(-(examples or ASSUMED_LENGTH) // places.towers)
        return max(rows, _MIN_GATHERED_ROWS) if on_host else None
    # Every rank computes the gradient.
    few = examples is not None and examples <= _MAX_GATHERED_BATCH
    is_lossless = config.options.compression in (None, "none")
    one_device = on_host or places.towers == 1
    if not (few and is_lossless and one_device):
        return None
    return _MIN_SAVING_RATIO * (examples or 0)


def _refuse_writes_to_shards(
    sharding: ShardingPolicy,
    traced: Trace,
    on_towers: Mapping[int, TowerHandles],
    settings: StepSettings,
) -> None:
    """Refuse a step that writes shards while ranks hold whole weights."""
    written = {id(tensor) for tensor in traced.written}
    for index, handles in on_towers.items():
        tensor = traced.captures[index]
        if id(tensor) in written and handles.layout.rows is not None:
            raise TowerError(
                f"{settings.kind} of model {settings.model.name!r} writes "
                f"{describe_variable(capture(tensor))}. It is in shards on "
                "several ranks, so only training steps may write it. Write it "
                f"in the training step, or {sharding.to_stay_whole}."
            )


def describe_variable(handle: tf.Tensor) -> str:
    """Describe a variable, given its handle."""
    content = compat.get_resource_handle_data(handle).shape_and_type[0]
    shape, dtype = tf.TensorShape(content.shape), tf.as_dtype(content.dtype)
    return f"a variable {shape} {dtype.name}"


def devices_for(
    config: TowerConfig, places: Places, has_copies: bool
) -> Places:
    """Return the places of a step, with the devices on which towers compute.

    Args:
        config: the towers.
        places: the places of the step.
        has_copies: whether each tower has copies of variables on its device.
    """
    mesh = places.mesh
    # Other modes exchange among the towers' own devices.
    has_mode = config.options.mode not in (None, "host")
    if (
        has_mode
        or has_copies
        or not devices.all_on_host(itertools.chain(*mesh))
    ):
        return places
    # They share all cores anyway, and TensorFlow instantiates each function
    # only once for a single device.
    mesh = [[mesh[0][0] for _ in row] for row in mesh]
    return dataclasses.replace(places, mesh=mesh)


def call_mode(config: TowerConfig, settings: StepSettings) -> CallMode:
    """Return how towers call their functions.

    Inlined functions send gradients to other ranks while the step computes
    more, and TensorFlow optimizes them, as accelerators need.
    """
    if settings.xla:
        return "xla"
    is_alone = settings.places.ranks.step.size == 1
    on_host = devices.all_on_host(config.devices)
    return "called" if is_alone and on_host else "inlined"
