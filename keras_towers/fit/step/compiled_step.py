"""The step of one device as functions that XLA compiles, and its updates.

What towers that each train a batch of their own do with gradients, such as
waiting for one another, XLA cannot compile. It compiles all before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.context.thread_state import ActiveStep
from keras_towers.fit.contract import ApplyCall
from keras_towers.fit.places import Places, Ranks
from keras_towers.fit.step.program_inputs import StepInputs
from keras_towers.fit.step.step_costs import log_not_compiled
from keras_towers.fit.step.tower_program import TowerProgram
from keras_towers.fit.step.trace import trace, with_components
from keras_towers.fit.step_order import StepOrder
from keras_towers.partition import partition_graph
from keras_towers.partition.layouts import REPLICATED
from keras_towers.partition.program import Update


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
        traced.graph, layouts, traced.results, traced.update_infos(), xla=True
    )
    inputs = program.inputs
    with tf.device(compat.HOST):
        common: dict[Any, Any] = {inputs.total: tf.constant(0, tf.int64)}
        parts: list[dict[Any, Any]] = [
            {
                inputs.start: tf.constant(0, tf.int64),
                inputs.is_first: tf.constant(True),
                inputs.is_first_part: tf.constant(True),
            }
        ]
    leaves = tf.nest.flatten(batch, expand_composites=True)
    given = [leaf for leaf in leaves if leaf is not None]
    common |= zip(inputs.of_graph, given, strict=False)
    step_inputs = StepInputs(common, parts)
    step_inputs.add_captures(inputs, traced.captures, {}, 1)

    def update(change: Update, _: Any, grads: list[Any]) -> None:
        call: ApplyCall = traced.updates[change.name]
        sums = with_components(call.grads, grads)
        active.apply(dataclasses.replace(call, grads=sums))

    places = Places(Ranks(), [[active.device]])
    order = StepOrder(places.ranks.step)
    ready = TowerProgram(program, "xla", places, order)
    results = ready.add_to_graph(step_inputs, update)
    log_not_compiled(model, True, ready.xla)
    return traced.output_with(results)
