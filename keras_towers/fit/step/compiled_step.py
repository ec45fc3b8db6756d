"""What XLA compiles besides levels: an optimizer's update, and a whole step.

Keras's ``apply`` is traced, and laid out as a step is: what the variables hold
goes into a function, and what they hold afterwards comes out. Of towers that
each train a batch of their own, a step is that of one device. What they do with
gradients, such as waiting for one another, XLA cannot compile; it compiles all
before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.context.thread_state import ActiveStep
from keras_towers.fit.contract import ApplyCall
from keras_towers.fit.places import Places, Ranks
from keras_towers.fit.step.placed_tensors import PlacedTensors
from keras_towers.fit.step.program_inputs import add_variables
from keras_towers.fit.step.step_reports import log_not_compiled
from keras_towers.fit.step.tower_program import TowerProgram
from keras_towers.fit.step.trace import components_of, trace, with_components
from keras_towers.fit.step_order import StepOrder
from keras_towers.fit.weights.tower_variables import TowerHandles
from keras_towers.partition import partition_graph
from keras_towers.partition.conversions import LayoutOptions
from keras_towers.partition.layouts import MIRRORED, REPLICATED
from keras_towers.partition.program import Inputs, Update

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
        traced.graph,
        layouts,
        traced.results,
        traced.update_infos(),
        options=_COMPILED,
    )
    leaves = tf.nest.flatten(batch, expand_composites=True)
    tensors = [leaf for leaf in leaves if leaf is not None]
    places = Places(Ranks(), [[active.device]])
    inputs = _inputs_of(program.inputs, tensors, places)
    add_variables(inputs, program.inputs, traced.captures, {})

    def update(change: Update, _: Any, grads: list[Any]) -> None:
        call: ApplyCall = traced.updates[change.name]
        sums = with_components(call.grads, grads)
        active.apply(dataclasses.replace(call, grads=sums))

    order = StepOrder(places.ranks.step)
    ready = TowerProgram(program, "xla", places, order)
    results = ready.add_to_graph(inputs, update)
    log_not_compiled(model, True, ready.xla)
    return traced.output_with(results)


def apply_compiled(
    apply: Callable[[list[Any]], Any],
    sums: Sequence[list[Any]],
    copies: Mapping[int, Sequence[Any]],
    devices: Sequence[str],
    order: StepOrder,
) -> None:
    """Update variables on the towers that have them.

    Args:
        apply: updates the variables of the first tower, given gradients.
        sums: K lists of what ``apply`` takes: tensors, IndexedSlices and None,
            which are the same on all towers.
        copies: the handles of variables on K towers, by the ids of the first.
            Other variables are updated once.
        devices: the K towers' devices.
        order: orders the operations that have other effects.
    """
    first, *_ = tensors_of_towers = [
        [t for grad in of_tower for t in components_of(grad)]
        for of_tower in sums
    ]

    def run(*tensors: tf.Tensor) -> None:
        apply(with_components(sums[0], tensors))

    specs = [tf.TensorSpec(t.shape, t.dtype) for t in first]
    with compat.trace_context(xla=True):
        graph = compat.func_graph_from_py_func("update", run, specs, {})
    captures = [outside for outside, _ in graph.captures]
    on_towers = {
        index: TowerHandles(MIRRORED, [[h] for h in copies[id(tensor)]])
        for index, tensor in enumerate(captures, len(specs))
        if id(tensor) in copies
    }
    of_grads = MIRRORED if len(devices) > 1 else REPLICATED
    layouts = [of_grads for _ in specs]
    layouts += [
        MIRRORED if index in on_towers else REPLICATED
        for index, _ in enumerate(captures, len(specs))
    ]
    program = partition_graph(graph, layouts, [], options=_COMPILED)
    places = Places(Ranks(), [[device] for device in devices])
    inputs = _inputs_of(program.inputs, first, places)
    for index, tensor in program.inputs.copies.items():
        if index < len(specs):
            for scope in inputs.scopes(towers=True):
                scope[tensor] = tensors_of_towers[scope.tower][index]
    add_variables(inputs, program.inputs, captures, on_towers)
    ready = TowerProgram(program, "xla", places, order)
    ready.add_to_graph(inputs, _refuse)


def _inputs_of(
    inputs: Inputs, tensors: Sequence[Any], places: Places
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


def _refuse(*_: Any) -> None:
    raise AssertionError("an update within an update")
