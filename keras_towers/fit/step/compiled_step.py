"""A step that XLA compiles for a tower with a batch of its own.

It is the step of one device. What towers do with gradients, such as waiting for
one another, XLA cannot compile; it compiles all before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.context.thread_state import ActiveStep
from keras_towers.fit.places import Places, Ranks
from keras_towers.fit.step.program_inputs import StepInputs
from keras_towers.fit.step.step_reports import log_not_compiled
from keras_towers.fit.step.tower_program import TowerProgram
from keras_towers.fit.step.trace import trace
from keras_towers.fit.step_order import StepOrder
from keras_towers.partition import partition_graph
from keras_towers.partition.conversions import LayoutOptions
from keras_towers.partition.layouts import REPLICATED

_COMPILED = LayoutOptions(xla=True)


def run_compiled(
    step: Callable[[Any], Any],
    batch: Any,
    model: keras.Model,
    active: ActiveStep,
    build: Callable[[Any, Sequence[Any]], None],
) -> Any:
    """Add a step that trains to the current graph; return what it returns.

    Args:
        step: a function of a batch.
        batch: the batch.
        model: the model.
        active: the step, whose ``apply`` handles calls of optimizers.
        build: builds an optimizer for weights, unless it is built.
    """
    traced = trace(step, batch, "fit", build, xla=True, active=active)
    layouts = [REPLICATED for _ in traced.graph.inputs]
    program = partition_graph(
        traced.graph, layouts, traced.wanted, options=_COMPILED
    )
    leaves = tf.nest.flatten(batch, expand_composites=True)
    tensors = [leaf for leaf in leaves if leaf is not None]
    taken = program.inputs
    with tf.device(compat.HOST):
        nothing = tf.constant(0, tf.int64)
        is_first = tf.constant(True)
    common = {
        taken.total: nothing,
        **dict(zip(taken.of_graph, tensors, strict=False)),
    }
    part = {
        taken.start: nothing,
        taken.is_first: is_first,
        taken.is_first_part: is_first,
    }
    inputs = StepInputs(common, [part])
    inputs.add_captures(taken, traced.captures, {}, 1)
    places = Places(Ranks(), [[active.device]])
    order = StepOrder(places.ranks.step)
    ready = TowerProgram(program, "xla", places, order)
    results = ready.add_to_graph(inputs)
    for name, gradients in traced.gradients_in(results).items():
        active.apply(traced.call_with(name, gradients))
    log_not_compiled(model, True, ready.xla)
    return traced.output_with(results)
