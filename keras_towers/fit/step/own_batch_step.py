"""A step that XLA compiles for a tower with a batch of its own.

It is the step of one device. What towers do with gradients, such as waiting for
one another, XLA cannot compile; it compiles all before it. So a step that reads
a weight after its update is not compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras

from keras_towers._types import Step, Structure, Variable
from keras_towers.fit.context.thread_state import ActiveStep
from keras_towers.fit.places import Places, Ranks
from keras_towers.fit.step.divided_batch import DividedBatch
from keras_towers.fit.step.step_reports import log_no_xla, log_not_compiled
from keras_towers.fit.step.tower_program import TowerProgram
from keras_towers.fit.step.trace import trace
from keras_towers.fit.step_order import StepOrder
from keras_towers.partition import partition_graph
from keras_towers.partition.conversions import LayoutOptions
from keras_towers.partition.layouts import REPLICATED

_COMPILED = LayoutOptions(xla=True)


def run_compiled(
    step: Step,
    batch: Structure,
    model: keras.Model,
    active: ActiveStep,
    build: Callable[[keras.Optimizer, Sequence[Variable]], None],
) -> Structure:
    """Add a step that trains to the current graph; return what it returns.

    Args:
        step: a function of a batch.
        batch: the batch.
        model: the model.
        active: the step, whose ``apply`` handles calls of optimizers.
        build: builds an optimizer for weights, unless it is built.
    """
    traced = trace(step, batch, "fit", build, xla=True, active=active)
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
    ready = TowerProgram(program, "xla", places, order)
    results = ready.add_to_graph(inputs)
    for name, gradients in traced.gradients_in(results).items():
        active.apply(traced.call_with(name, gradients))
    log_not_compiled(model, True, ready.xla)
    return traced.output_with(results)
