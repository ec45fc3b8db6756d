"""What of a model is made, and the step that makes the rest of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit.components import TRAINING
from keras_towers.fit.data.epoch_iterator import TowerEpochIterator
from keras_towers.fit.step.graph.trace import trace
from keras_towers.fit.weights import model_state
from keras_towers.foundation import compat
from keras_towers.foundation.object_types import Step, Structure, Variable
from keras_towers.jobs.rendezvous import rank_checks

# Attributes of a model that a step may build.
_OPTIMIZER = ("optimizer",)
_LOSSES_AND_METRICS = ("_compile_metrics", "_compile_loss")


def batch_spec(iterator: TowerEpochIterator) -> Structure:
    """Return the element spec of one tower's batch."""
    return tf.nest.map_structure(
        lambda spec: (
            spec._value_specs[0]
            if isinstance(spec, compat.PerReplicaSpec)
            else spec
        ),
        iterator.source.element_spec,
    )


def placeholders(batch: Structure) -> Structure:
    """Return a batch of placeholders, given its specs or its arrays."""

    def placeholder(leaf: Any) -> Any:
        if leaf is None:
            return None
        return tf.compat.v1.placeholder(leaf.dtype, leaf.shape)

    leaves = tf.nest.flatten(batch, expand_composites=True)
    inputs = map(placeholder, leaves)
    return tf.nest.pack_sequence_as(batch, [*inputs], expand_composites=True)


def step_of(model: keras.Model, kind: str) -> Step:
    """Return the step of a method of Keras, such as ``train_step``."""
    if kind in TRAINING:
        return model.train_step
    return model.predict_step if "predict" in kind else model.test_step


def make_variables(model: keras.Model, kind: str, batch: Structure) -> None:
    """Make the variables that a step of plain Keras would make.

    This traces a step that never runs.

    Args:
        model: the model.
        kind: the method of Keras that the step belongs to.
        batch: the specs of a batch, or its arrays.
    """
    if not needs_build(model, kind):
        return

    def build(optimizer: keras.Optimizer, weights: Sequence[Variable]) -> None:
        with tf.init_scope():
            if not optimizer.built:
                model_state.build_optimizer(optimizer, weights)

    step = compat.convert_optionals(model, step_of(model, kind))
    xla = bool(model.jit_compile)
    with compat.FuncGraph("variables").as_default():
        trace(
            step,
            placeholders(batch),
            kind,
            build,
            lambda: None,
            xla=xla,
            again=False,
        )


def parts_made(model: keras.Model) -> str:
    """Return a digest of the variables that a model has, to compare ranks."""
    made = [
        f"{rank_checks.name_in_parent(variable.path)} {variable.shape}"
        for variable in model_state.collect(model).everything()
    ]
    return hashlib.sha256("\n".join(made).encode()).hexdigest()[:16]


def needs_build(model: keras.Model, kind: str) -> bool:
    """Whether a step of the model may make variables."""
    names: tuple[str, ...] = _OPTIMIZER if kind in TRAINING else ()
    if not kind.startswith("predict"):
        names += _LOSSES_AND_METRICS
    return not layers_are_built(model) or bool(_unbuilt(model, names))


def layers_are_built(model: keras.Model) -> bool:
    """Whether all layers are built that a step might build, as for its loss."""
    return all(layer.built for layer in model._flatten_layers())


def uses_optimizer(model: keras.Model, kind: str) -> bool:
    """Whether a method uses ``model.optimizer`` for all trainable weights.

    This is known once every layer is built.
    """
    has_keras_step = kind in TRAINING and model_state.has_keras_step(model)
    return has_keras_step and layers_are_built(model)


def _unbuilt(model: keras.Model, names: Sequence[str]) -> list[keras.Layer]:
    """Return the named attributes of a model that exist but are not built."""
    parts = [getattr(model, name, None) for name in names]
    return [part for part in parts if part is not None and not part.built]
