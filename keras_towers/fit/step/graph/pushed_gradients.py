"""Gradients that a step passes on, rather than update variables with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from keras_towers.fit.step.graph.step_layout import StepLayout
from keras_towers.fit.step.graph.trace import components_of
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.reduction.gradients import Gradient, on_values, scaled


def push_gradients(
    update: WeightUpdate, layout: StepLayout, results: Sequence[object]
) -> None:
    """Pass on the gradients that are results of a step.

    Args:
        update: the update, which gets them.
        layout: the step.
        results: the N results of its program.
    """
    traced, local_step = layout.traced, layout.local_step
    number = layout.settings.places.ranks.batch.size
    sums = traced.gradients_in(results)
    for name, ends in traced.gradients_in(layout.program.results).items():
        call = traced.call_with(name, sums[name])
        if local_step is None:
            update.push(call)
            continue
        # The workers' gradients are averaged.
        grads: list[Gradient | None] = []
        left = iter(ends)
        for gradient in call.grads:
            components = [next(left) for _ in components_of(gradient)]
            if name not in local_step.parts:
                grads += _scale_or_zero(
                    layout.divided.share * number, [gradient]
                )
            elif local_step.shared.issuperset(components):
                grads.append(gradient)
            else:
                grads += scaled([gradient], number)
        update.push(dataclasses.replace(call, grads=grads))


def _scale_or_zero(
    factor: tf.Tensor, grads: Sequence[Gradient | None]
) -> list[Gradient | None]:
    """Multiply gradients by a factor; a factor of 0 turns NaN into 0, too."""

    def times(values: tf.Tensor) -> tf.Tensor:
        return tf.math.multiply_no_nan(values, tf.cast(factor, values.dtype))

    return [None if g is None else on_values(g, times) for g in grads]
