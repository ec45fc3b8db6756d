"""A step that XLA compiles for a tower with a batch of its own.

It is the step of one device. What towers do with gradients, such as waiting for
one another, XLA cannot compile; it compiles all before it. So a step that reads
a weight after its update is not compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers._types import Step, Structure, Variable
from keras_towers.fit.context.thread_state import ActiveStep
from keras_towers.fit.places import Places, Ranks
from keras_towers.fit.step.placed_tensors import PlacedTensors
from keras_towers.fit.step.program_inputs import add_variables
from keras_towers.fit.step.step_reports import log_no_xla, log_not_compiled
from keras_towers.fit.step.tower_program import TowerProgram
from keras_towers.fit.step.trace import trace
from keras_towers.fit.step_order import StepOrder
from keras_towers.partition import partition_graph
from keras_towers.partition.conversions import LayoutOptions
from keras_towers.partition.layouts import REPLICATED
from keras_towers.partition.program import Inputs

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
    leaves = tf.nest.flatten(batch, expand_composites=True)
    tensors = [leaf for leaf in leaves if leaf is not None]
    places = Places(Ranks(), [[active.device]])
    inputs = _inputs_of(program.inputs, tensors, places)
    add_variables(inputs, program.inputs, traced.captures, {})

    order = StepOrder(places.ranks.step)
    ready = TowerProgram(program, "xla", places, order)
    results = ready.add_to_graph(inputs)
    for name, gradients in traced.gradients_in(results).items():
        active.apply(traced.call_with(name, gradients))
    log_not_compiled(model, True, ready.xla)
    return traced.output_with(results)


def _inputs_of(
    inputs: Inputs, tensors: Sequence[tf.Tensor], places: Places
) -> PlacedTensors:
    """Return what a program gets of which no input is divided.

    Args:
        inputs: the inputs of the program.
        tensors: the first of them.
        places: where it computes.
    """
    placed = PlacedTensors(places)
    with tf.device(compat.HOST):
        placed.shared[inputs.total] = tf.constant(0, tf.int64)
        for scope in placed.scopes(towers=True):
            scope[inputs.start] = tf.constant(0, tf.int64)
            scope[inputs.is_first] = tf.constant(scope.tower == 0)
    for tensor, value in zip(inputs.of_graph, tensors, strict=False):
        placed.shared[tensor] = value
    return placed
