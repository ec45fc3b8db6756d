"""Adds a program to a graph: a function per level, and exchanges.

It runs the micro-batches of a tower one after another, and adds up their
gradients (``PlacedTensors.add``).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.fit.places import Places
from keras_towers.fit.ranks.step_order import StepOrder
from keras_towers.fit.step.graph.exchange_kinds import (
    GradientExchange,
    Members,
    exchange_tensors,
)
from keras_towers.fit.step.graph.graph_function import CallMode
from keras_towers.fit.step.graph.placed_tensors import (
    PLACE_AXES,
    Place,
    PlacedTensors,
    TensorsAt,
    with_shapes,
)
from keras_towers.fit.step.graph.tower_functions import (
    FunctionCall,
    Section,
    TowerFunctions,
)
from keras_towers.partition.emission import emit, value_of
from keras_towers.partition.ir.axes import (
    COLUMNS,
    MICRO_BATCHES,
    ONCE,
    TOWERS,
    Axes,
)
from keras_towers.partition.ir.program import Exchange, Operation, Phase
from keras_towers.partition.ir.reasons import asserted
from keras_towers.partition.timeline.gathers import gathers_variables
from keras_towers.partition.timeline.memory_estimate import summed_tensors
from keras_towers.partition.timeline.timeline import Timeline
from keras_towers.partition.xla.xla_pieces import Stage, Stages
from keras_towers.reduction.collectives import Collectives, OnTowers


class TowerProgram:
    """Adds a step to the current graph, for the towers of this process.

    Args:
        timeline: when the towers compute what.
        mode: how towers call their functions.
        places: where it computes, and with whom. A tower computes its
            micro-batches one after another.
        order: orders the exchanges between processes.
        collectives: exchange tensors among the devices of this process; None:
            as ``OnTowers``.
        gradients: adds gradients up; None: as anything else is.

    Attributes:
        xla: what XLA compiles, in the mode ``xla``.
    """

    def __init__(
        self,
        timeline: Timeline,
        mode: CallMode,
        places: Places,
        order: StepOrder,
        collectives: Collectives | None = None,
        gradients: GradientExchange | None = None,
    ):
        self._timeline, self._program = timeline, timeline.program
        self._order, self._gradients = order, gradients
        self._collectives: Collectives = collectives or OnTowers()
        # Where towers compute what all of their columns share.
        self._devices: list[str] = [row[0] for row in places.mesh]
        self._functions = TowerFunctions(timeline, mode, places, order)
        self.xla: Stages = self._functions.xla
        self._summed = summed_tensors(self._program)

    def add_to_graph(self, tensors: PlacedTensors) -> list[tf.Tensor]:
        """Add the program to this graph; return its results.

        Args:
            tensors: what the inputs of the program get. All that it computes is
                added.
        """
        pace = Pace(self._timeline)
        for level, (_, exchanges) in enumerate(self._timeline.by_level):
            checks: list[Any] = []
            for columns in (ONCE, COLUMNS):
                self._compute_once(level, columns, tensors, checks)
            for columns in (ONCE, COLUMNS):
                computed = self._compute_on_towers(
                    level, TOWERS | columns, tensors, pace.before_level()
                )
                pace.note_computed(computed)
            if exchanges:
                with pace.before_exchanges(exchanges):
                    pace.note_exchanged(self._exchange(exchanges, tensors))
            pace.end_level()
            # A step whose assertion fails updates nothing.
            with tf.device(self._devices[0]):
                self._order.assert_first(checks)
        with tf.device(self._devices[0]):
            return [value_of(t, tensors.shared) for t in self._program.results]

    def _compute_once(
        self, level: int, axes: Axes, tensors: PlacedTensors, checks: list[Any]
    ) -> None:
        """Add the undivided operations of a level, once or for each column."""
        section = Section(level, Phase.ONCE, axes)
        stages = self._functions.once.get(section, ())
        if tensors.places.ranks.step.rank != 0:
            stages = [
                Stage(s.compiled, [o for o in s.single if not o.at_root])
                for s in stages
            ]
        for here in tensors.at_places(axes):
            with tf.device(here.device):
                self._functions.add_stages(
                    stages,
                    here,
                    self._functions.used,
                    after=self._order.gate,
                    checks=checks,
                )

    def _compute_on_towers(
        self,
        level: int,
        axes: Axes,
        tensors: PlacedTensors,
        after: Sequence[object],
    ) -> list[Any]:
        """Add the towers' operations of a level, or their columns'.

        Args:
            level: the level.
            axes: the axes of the places that do it, besides micro-batches.
            tensors: the tensors of all places.
            after: what functions wait for.

        Returns:
            What they compute.
        """

        def operations_of(
            phase: Phase, also: Axes = ONCE
        ) -> Sequence[Operation]:
            section = Section(level, phase, axes | also)
            return self._functions.operations.get(section, ())

        towers = tensors.at_places(axes)
        micro_batches = tensors.at_places(axes | MICRO_BATCHES)
        reads, writes = operations_of(Phase.READ), operations_of(Phase.UPDATE)
        call = self._functions.call_of(operations_of(Phase.TOWERS))
        if call:
            call, reads, writes = self._functions.with_variables(
                call, reads, writes, towers
            )
        self._use_variables(reads, towers)
        computed = self._call(call, towers, tensors, after)
        call = self._functions.call_of(
            operations_of(Phase.TOWERS, MICRO_BATCHES)
        )
        computed += self._call(call, micro_batches, tensors, after)
        self._use_variables(writes, towers)
        return computed

    def _use_variables(
        self, operations: Sequence[Operation], towers: Sequence[TensorsAt]
    ) -> None:
        """Read or update the towers' copies of variables, on their devices.

        All micro-batches write the same.
        """
        if not operations:
            return
        outputs = self._functions.used(operations)
        graphs, gate = self._program.graphs, self._order.gate
        for here in towers:
            with tf.device(here.device):
                values = emit(
                    operations,
                    here,
                    outputs,
                    graphs,
                    gate,
                    waits=self._timeline.waits,
                )
            here.update(zip(outputs, values, strict=True))

    def _call(
        self,
        call: FunctionCall | None,
        places: Sequence[TensorsAt],
        tensors: PlacedTensors,
        first_after: Sequence[object],
    ) -> list[Any]:
        """Call a function at each place; return the results.

        Args:
            call: the call; None: nothing is computed.
            places: the places.
            tensors: the tensors of all places.
            first_after: what the first micro-batch of each tower waits for.
        """
        computed: list[Any] = []
        if call is None:
            return computed
        before: list[Any] = []
        for here in places:
            # One micro-batch frees its memory before the next one begins.
            after = before if here.micro_batch > 0 else first_after
            with tf.device(here.device):
                call.add_to_graph(here, after)
                values = [
                    tensors.add(t, here) if t in self._summed else here[t]
                    for t in call.body.outputs
                ]
                before = values
                if call.is_inlined:
                    # Who waits for the call waits for none of its results.
                    before = [tf.identity(value) for value in values]
            computed += before
        return computed

    def _exchange(
        self, exchanges: Sequence[Exchange], tensors: PlacedTensors
    ) -> list[Any]:
        """Exchange the tensors of a level, and add the results to them."""
        with tf.device(tensors.shared.device):
            groups = [m for e in exchanges for m in _members(e, tensors)]
        results = exchange_tensors(
            groups,
            self._collectives,
            tensors.places.ranks.step,
            self._order.exchange,
            self._gradients,
        )
        for group, result in zip(groups, results, strict=True):
            exchange = group.exchange
            values = result if exchange.is_own else [result]
            for here, value in zip(group.takers, values, strict=True):
                here.update(with_shapes([exchange.result], [value]))
        return results


class Pace:
    """Orders the levels of a program.

    TensorFlow runs an operation as soon as its inputs are there. So it would
    compute early, and keep, what only the backward pass uses. And since the
    inputs of a gather are variables, it would gather all weights when a step
    begins. So towers compute a level when the level two before it is done. What
    is gathered at the end of a level waits until the level before is done. It
    still goes on while the level itself is computed.

    A level is done when it is computed; with gathers or buckets of gradients,
    its exchanges have to be done, too. Otherwise gradients would pile up behind
    a slow link.

    Args:
        timeline: when it does what.
    """

    def __init__(self, timeline: Timeline):
        gathers = map(gathers_variables, timeline.program.exchanges)
        self._with_exchanges: bool = timeline.is_paced or any(gathers)
        self._done: list[Any] = []
        # Tensors that exist once the last level is done, and the one before.
        self._ends: list[Any] = []
        self._earlier_ends: list[Any] = []

    def before_level(self) -> Sequence[object]:
        """Return what the functions of a level wait for."""
        return self._earlier_ends

    def note_computed(self, results: Sequence[object]) -> None:
        """Record what the towers compute in a level."""
        self._done += tf.nest.flatten(results)

    def note_exchanged(self, results: Sequence[object]) -> None:
        """Record what they exchange at its end."""
        if self._with_exchanges:
            self._done += tf.nest.flatten(results)

    def before_exchanges(
        self, exchanges: Sequence[Exchange]
    ) -> contextlib.AbstractContextManager[None]:
        """Return a block for the exchanges of a level, if they have to wait."""
        waits = any(map(gathers_variables, exchanges))
        return tf.control_dependencies(self._ends if waits else [])

    def end_level(self) -> None:
        """End a level."""
        self._earlier_ends = self._ends
        with tf.control_dependencies([*self._done, *self._ends]):
            self._ends = [tf.no_op()]
        self._done = []


# ---- who exchanges what ------------------------------------------------------


def _members(exchange: Exchange, tensors: PlacedTensors) -> Iterator[Members]:
    """Yield who exchanges a tensor: those that differ along its axes."""
    given, result = _given(exchange, tensors), exchange.result
    differ = exchange.over | result.axes - exchange.given.axes
    along = [k for k, axis in enumerate(PLACE_AXES) if axis in differ]
    of_mesh, lengths = map(tensors.lengths, (TOWERS | COLUMNS, result.axes))
    others = [1 if a in along else n for a, n in enumerate(given.shape)]
    for place in np.ndindex(*others):
        devices = [
            tensors.places.mesh[tower][column]
            for tower, column, _ in _line(of_mesh, place, along)
        ]
        values = [given[k] for k in _line(given.shape, place, along)]
        takers = [
            tensors.at(lengths, taker) for taker in _line(lengths, place, along)
        ]
        rows: list[Any] = [
            [value_of(t, taker) for t in exchange.rows or ()]
            for taker in takers
        ]
        if exchange.kind == "scatter" and "columns" in exchange.over:
            count: Any = result.shape[exchange.axis]
            rows = [(taker.column * count, count) for taker in takers]
        yield Members(exchange, devices, values, rows, takers)


def _given(exchange: Exchange, tensors: PlacedTensors) -> np.ndarray:
    """Return the values that are exchanged, by their places."""
    tensor = exchange.given
    source, rank = tensor.operation, tensors.places.ranks.step.rank
    if source is not None and source.at_root and rank != 0:
        # Only the first process has it.
        return np.empty((1, 1, 1), object)
    if exchange.part is not None:
        return _parts(exchange, tensors, *exchange.part)
    is_sum = exchange.kind in ("sum", "scatter")
    if is_sum and "micro_batches" in exchange.over:
        return tensors.sum(tensor)
    return tensors.array(tensor)


def _parts(
    exchange: Exchange, tensors: PlacedTensors, first: int, number: int
) -> np.ndarray:
    """Return some rows of a tensor, or of the variable that it is read from."""
    given, numbers = exchange.given, tf.range(first, first + number)
    places = tensors.at_places(given.axes)
    array = np.empty(places[0].lengths, object)
    for here in places:
        with tf.device(here.device):
            if exchange.reads:
                (handle,) = asserted(given.operation).inputs
                array[here.place] = tf.raw_ops.ResourceGather(
                    resource=here[handle], indices=numbers, dtype=given.dtype
                )
            else:
                array[here.place] = here[given][first : first + number]
    return array


def _line(
    lengths: Sequence[int], place: Sequence[int], along: Sequence[int]
) -> Iterator[Place]:
    """Yield the places that differ from one along axes."""
    return itertools.product(
        *(
            range(length) if axis in along else [place[axis]]
            for axis, length in enumerate(lengths)
        )
    )
