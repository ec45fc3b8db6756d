"""An optimizer's update as functions that XLA compiles.

Keras's ``apply`` is traced, and laid out as a step is: what the variables hold
goes into a function, and what they hold afterwards comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.places import Places, Ranks
from keras_towers.fit.step.program_inputs import StepInputs
from keras_towers.fit.step.tower_program import TowerProgram
from keras_towers.fit.step.trace import components_of, with_components
from keras_towers.fit.step_order import StepOrder
from keras_towers.fit.weights.tower_variables import TowerHandles
from keras_towers.partition import partition_graph
from keras_towers.partition.layouts import MIRRORED, REPLICATED


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
    first, *_ = given = [
        [t for grad in of_tower for t in components_of(grad)]
        for of_tower in sums
    ]

    def run(*tensors: tf.Tensor) -> None:
        apply(with_components(sums[0], tensors))

    specs = [tf.TensorSpec(t.shape, t.dtype) for t in first]
    with compat.xla_context():
        graph = compat.func_graph_from_py_func("update", run, specs, {})
    captures = [outside for outside, _ in graph.captures]
    on_towers = {
        index: TowerHandles(MIRRORED, [[h] for h in copies[id(tensor)]])
        for index, tensor in enumerate(captures)
        if id(tensor) in copies
    }
    of_grads = MIRRORED if len(devices) > 1 else REPLICATED
    layouts = [of_grads for _ in specs]
    layouts += [
        MIRRORED if index in on_towers else REPLICATED
        for index, _ in enumerate(captures)
    ]
    program = partition_graph(graph, layouts, [], xla=True)
    inputs = program.inputs
    with tf.device(compat.HOST):
        common: dict[Any, Any] = {inputs.total: tf.constant(0, tf.int64)}
        parts: list[dict[Any, Any]] = [
            {
                inputs.start: tf.constant(0, tf.int64),
                inputs.is_first: tf.constant(k == 0),
            }
            for k, _ in enumerate(devices)
        ]
    common |= zip(inputs.of_graph, first, strict=False)
    for index, tensor in inputs.copies.items():
        if index < len(specs):
            for grads, part in zip(given, parts, strict=True):
                part[tensor] = grads[index]
    given_inputs = StepInputs(common, parts)
    given_inputs.add_captures(inputs, captures, on_towers, 1)
    places = Places(Ranks(), [[device] for device in devices])
    ready = TowerProgram(program, "xla", places, order)
    ready.add_to_graph(given_inputs, _refuse)


def _refuse(*_: Any) -> None:
    raise AssertionError("an update within an update")
