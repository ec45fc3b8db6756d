"""Dry runs: steps that are laid out, and their memory, but that never run.

A dry run traces and lays out a step by the code that trains, in a TensorFlow
graph that has no session. There, variables have only shapes, and devices only
names, so neither needs to exist.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from keras_towers.fit.components import KerasStrategy, TowerConfig
from keras_towers.fit.context import patches
from keras_towers.fit.step.graph.trace import Trace
from keras_towers.fit.weights import model_state
from keras_towers.fit.weights.copies import bytes_on
from keras_towers.fit.weights.least_loaded import byte_size
from keras_towers.fit.weights.model_binding import unbound
from keras_towers.fit.weights.shards import (
    ShardedVariable,
    choose_layout,
    share_counts,
)
from keras_towers.fit.weights.tower_variables import with_values
from keras_towers.fit.weights.without_memory import (
    graph_without_memory,
    variable_like,
)
from keras_towers.foundation import compat
from keras_towers.foundation.object_types import Structure
from keras_towers.partition import Program
from keras_towers.partition.ir.program import (
    Event,
    Exchange,
    Phase,
    Tensor,
)
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.timeline.memory_estimate import MemoryEstimate
from keras_towers.partition.timeline.timeline import Timeline
from keras_towers.transport.devices import short_name

_S = TypeVar("_S", bound=KerasStrategy)
_SEEDS = "global_seed_generator"


@dataclasses.dataclass(frozen=True)
class Moment:
    """A time of a step: that of one operation or exchange.

    Attributes:
        level: its level.
        where: what runs then: ``once``, ``towers``, an ``update``, or an
            ``exchange``.
        bytes: what a device has then, besides variables.
    """

    level: int
    where: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Needs:
    """The bytes that the devices need.

    Attributes:
        weights: the bytes of the model's weights on each of K devices.
        optimizer: the bytes of the optimizer's variables on each of them.
        step: the bytes that a device has at a time while a step runs, besides
            these variables, by ``MemoryEstimate``; None: unknown.
        gradients: the bytes of the gradients that a device updates with.
        over_time: the N operations and exchanges of the step, in order.
    """

    weights: list[int]
    optimizer: list[int]
    gradients: int | None
    step: int | None
    over_time: Sequence[Moment]

    @property
    def held(self) -> int:
        """The bytes of variables on the device that holds the most."""
        return max(map(sum, zip(self.weights, self.optimizer, strict=True)))

    @property
    def total(self) -> int | None:
        """The bytes on the device that needs the most; None: unknown."""
        return None if self.step is None else self.held + self.step


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedModel:
    """A model on the devices of a strategy.

    Attributes:
        config: the places of the strategy.
        model: the model, adopted by the strategy.
    """

    config: TowerConfig
    model: keras.Model

    def held(self, ranks: int) -> Needs:
        """Return the bytes that the devices of the last rank hold."""
        state = model_state.collect(self.model)
        weights, optimizer = (
            self._bytes_held(variables, ranks)
            for variables in (state.weights, state.optimizer_variables)
        )
        return Needs(weights, optimizer, None, None, ())

    def _bytes_held(
        self, variables: Sequence[keras.Variable], ranks: int
    ) -> list[int]:
        """Return the bytes of variables on the devices of the last rank."""
        mesh, here = self.config.mesh, self.config.num_towers
        total = dict(bytes_on(mesh, variables))
        for value in self._in_shards_of_all(variables):
            rows = value.layout.rows
            if rows is None:
                continue
            counts = share_counts(rows.size, here * ranks)[-here:]
            for devices, shards, count in zip(
                mesh, value.shards, counts, strict=True
            ):
                for device, shard in zip(devices, shards, strict=False):
                    planned: Any = shard.shape[rows.axis]
                    size = byte_size(shard)
                    total[short_name(device)] += size * count // planned - size
        names = [short_name(device) for device in itertools.chain(*mesh)]
        sizes = [total[name] for name in names]
        # Variables that towers have once were made on this process's host.
        others = sum(total.values()) - sum(sizes)
        return [others + sizes[0], *sizes[1:]]

    def axes_of_shards(self, ranks: int) -> list[tuple[int, bool] | None]:
        """Return how several ranks divide its variables."""
        towers, axes = ranks * self.config.num_towers, []
        state = model_state.collect(self.model)
        variables = [*state.weights, *state.optimizer_variables]
        for variable in self._in_shards_of_all(variables):
            item_bytes = variable.dtype.size
            rows = choose_layout(variable.shape, item_bytes, towers).rows
            axes.append(
                None if rows is None else (rows.axis, rows.size % towers == 0)
            )
        return axes

    def _in_shards_of_all(
        self, variables: Sequence[keras.Variable]
    ) -> list[ShardedVariable]:
        """Return the variables in shards over the towers of all ranks."""
        if self.config.places("fit").ranks.shards.size == 1:
            return []
        values = [variable._value for variable in variables]
        return [v for v in values if isinstance(v, ShardedVariable)]


@dataclasses.dataclass(frozen=True, eq=False)
class LaidOutStep(PlacedModel):
    """A step that is laid out over towers.

    Attributes:
        traced: the trace of its step.
        timeline: when it does what.
    """

    traced: Trace
    timeline: Timeline

    @property
    def program(self) -> Program:
        """What it does."""
        return self.timeline.program

    def sizes(self, examples: int, ranks: int, parts: int = 1) -> TensorSizes:
        """Return the sizes of its tensors.

        Args:
            examples: the number of examples of a global batch.
            ranks: the number of ranks that share it.
            parts: the number of micro-batches of a tower.
        """
        cells = ranks * self.config.num_towers * parts
        return TensorSizes(self.program, cells, -(-examples // cells))

    def needs(self, examples: int, ranks: int) -> Needs:
        """Return the bytes that devices need for the step.

        Args:
            examples: the number of examples of the global batch.
            ranks: the number of ranks.
        """
        parts = self.timeline.plan.parts
        sizes = self.sizes(examples, ranks, parts)
        gradients = _gradients_in(self.traced, self.program)
        estimate = MemoryEstimate(self.timeline, sizes, parts)
        return dataclasses.replace(
            self.held(ranks),
            gradients=sum(map(sizes.bytes_of, gradients)),
            step=estimate.peak_bytes(),
            over_time=[
                Moment(self.timeline.levels[event], _where_runs(event), live)
                for event, live in zip(
                    estimate.events, estimate.live, strict=True
                )
            ],
        )


def _where_runs(event: Event) -> str:
    """Return ``once``, ``towers``, ``update`` or ``exchange``."""
    if isinstance(event, Exchange):
        return "exchange"
    if event.phase is Phase.ONCE:
        return "once"
    return "update" if event.phase is Phase.UPDATE else "towers"


@contextlib.contextmanager
def dry_run(
    model: keras.Model, make: Callable[[], _S], builds: bool = True
) -> Iterator[_S]:
    """Let a strategy place a model in this block, in a graph without memory.

    The model is left as it was, with its values and its own strategy.

    Args:
        model: the model.
        make: makes the strategy, which never runs.
        builds: whether slots of its optimizer are built. Otherwise those of
            another one like it are.
    """
    own: keras.Optimizer | None = getattr(model, "optimizer", None)
    settings = None
    if not builds and own is not None and not own.built:
        with tf.init_scope():
            settings = own.get_config()
    with contextlib.ExitStack() as stack:
        keep = compat.global_state.set_global_attribute
        # The step may create the one of the graph.
        stack.callback(keep, _SEEDS, compat.get_global_attribute(_SEEDS))
        stack.enter_context(unbound(model))
        stack.enter_context(graph_without_memory())
        variables = model_state.collect(model).everything()
        stack.enter_context(
            with_values((v, variable_like(v)) for v in variables)
        )
        if settings is not None:
            kind: Any = type(own)
            like = {"optimizer": kind.from_config(settings)}
            stack.enter_context(patches.shadowed(model, like))
        strategy = make()
        runner = strategy._runner
        # Other ranks, which do not exist, have the same values.
        equal: dict[str, object] = {"compare": lambda *_: []}
        stack.enter_context(patches.shadowed(runner.adoption, equal))
        unlimited = {"check_variables": lambda *_: None}
        stack.enter_context(patches.shadowed(runner.step.memory, unlimited))
        yield strategy


def lay_out_dry(
    strategy: KerasStrategy,
    model: keras.Model,
    batch: Structure,
    examples: int,
    kind: str = "fit",
    emits: bool = False,
) -> LaidOutStep:
    """Trace and lay out a step, within ``dry_run``.

    Args:
        strategy: the strategy.
        model: the model.
        batch: the specs of a global batch.
        examples: the number of its examples.
        kind: the method of Keras that the step belongs to.
        emits: whether it is also added to a graph, whose memory then counts in
            ``planned_memory``.
    """
    traced, timeline = strategy._runner.plan(
        model, batch, examples, kind, emits
    )
    return LaidOutStep(strategy._config, model, traced, timeline)


def _gradients_in(traced: Trace, program: Program) -> list[Tensor]:
    """Return the gradients of towers as optimizers get them."""
    values = [program.values[name] for name in traced.gradients]
    gradients = [value.local or value.whole for value in values]
    return [tensor for tensor in gradients if tensor is not None]
