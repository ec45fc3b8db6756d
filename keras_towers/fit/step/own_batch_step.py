"""The step of a tower that has a batch of its own, which XLA compiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras

from keras_towers.fit.context.thread_state import ActiveStep
from keras_towers.fit.places import Places, Ranks
from keras_towers.fit.ranks.step_order import StepOrder
from keras_towers.fit.step.graph.step_inputs import DividedBatch
from keras_towers.fit.step.graph.tower_program import TowerProgram
from keras_towers.fit.step.graph.trace import trace
from keras_towers.fit.step.reports.step_reports import (
    log_no_xla,
    log_not_compiled,
)
from keras_towers.foundation.object_types import Step, Structure, Variable
from keras_towers.partition import LayoutOptions, partition_graph
from keras_towers.partition.ir.layouts import REPLICATED
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.timeline.gathers import place_earliest

_COMPILED = LayoutOptions(xla=True)


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
