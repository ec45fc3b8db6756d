"""Finds all variables of a compiled model, and of its optimizers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_towers.foundation import compat

_NOT_USER_STATE = frozenset(
    ("_tracker", "_layers", "_inbound_nodes", "_outbound_nodes")
)


@dataclasses.dataclass
class ModelState:
    """Every Keras variable that a step of the model may use, by role."""

    seeds: list[keras.Variable]
    weights: list[keras.Variable]
    metrics: list[keras.Variable]
    optimizers: list[keras.optimizers.Optimizer]

    @property
    def optimizer_variables(self) -> list[keras.Variable]:
        """The variables of all optimizers, without duplicates."""
        return _unique(
            v for optimizer in self.optimizers for v in optimizer.variables
        )

    def everything(self) -> list[keras.Variable]:
        """Return all variables of all roles."""
        return [
            *self.seeds,
            *self.weights,
            *self.metrics,
            *self.optimizer_variables,
        ]


def collect(model: keras.Model) -> ModelState:
    """Collect the state of ``model``, its nested models and its training."""
    layers = list(model._flatten_layers())
    seeds = [
        generator.state
        for layer in layers
        for generator in getattr(layer, "_seed_generators", ())
    ]
    shared = compat.get_global_attribute("global_seed_generator")
    if shared is not None:
        seeds.append(shared.state)
    seeds = _unique(seeds)
    weights = _unique(model.variables, excluding=seeds)
    metrics = _unique(
        (v for metric in _metrics(model, layers) for v in metric.variables),
        excluding=[*seeds, *weights],
    )
    return ModelState(seeds, weights, metrics, _optimizers(layers))


def models_in(model: keras.Model) -> Iterator[keras.Model]:
    """Yield the model and every model nested in it."""
    for layer in model._flatten_layers():
        if isinstance(layer, compat.TensorFlowTrainer):
            yield layer


def output_paths(model: keras.Model) -> Iterator[str]:
    """Yield the paths by which Keras looks up layouts of layers' outputs."""
    for layer in model._flatten_layers():
        # Without a scope it has not been called, or built, yet.
        if layer._parent_path is not None:
            scope = layer._parent_path and f"{layer._parent_path}/"
            yield f"{scope}{layer.name}/output"


def optimizers_in(optimizer: Any) -> Iterator[keras.Optimizer]:
    """Yield an optimizer and, recursively, the optimizers it wraps."""
    yield optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    for part in (inner, *getattr(optimizer, "optimizers", ())):
        if isinstance(part, compat.BaseOptimizer):
            yield from optimizers_in(part)


def trained_by(optimizer: Any) -> list[keras.Variable]:
    """Return the weights that an optimizer, or one that it wraps, updates."""
    weights = (
        weight
        for part in optimizers_in(optimizer)
        for weight in part._trainable_variables
    )
    return list({id(weight): weight for weight in weights}.values())


def _unique(
    variables: Iterable[Any], excluding: Iterable[keras.Variable] = ()
) -> list[keras.Variable]:
    seen = {id(variable) for variable in excluding}
    unique = []
    for variable in variables:
        if not isinstance(variable, keras.Variable) or id(variable) in seen:
            continue
        seen.add(id(variable))
        if variable._value is not None:
            unique.append(variable)
    return unique


def _metrics(
    model: keras.Model, layers: list[Any]
) -> Iterator[keras.metrics.Metric]:
    yield from model.metrics
    for layer in layers:
        yield from getattr(layer, "_metrics", ())
        for name in ("_loss_tracker", "_compile_metrics", "_compile_loss"):
            holder = getattr(layer, name, None)
            if hasattr(holder, "variables"):
                yield holder
            else:
                yield from getattr(holder, "metrics", ())


def _optimizers(layers: list[Any]) -> list[keras.optimizers.Optimizer]:
    optimizers: list[keras.optimizers.Optimizer] = []

    def visit(value: Any) -> None:
        if isinstance(value, compat.BaseOptimizer):
            for part in optimizers_in(value):
                if not any(part is other for other in optimizers):
                    optimizers.append(part)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif isinstance(value, dict):
            for item in value.values():
                visit(item)

    for layer in layers:
        for name, value in list(vars(layer).items()):
            if name not in _NOT_USER_STATE:
                visit(value)
    return optimizers


def build_optimizer(optimizer: Any, weights: Iterable[Any]) -> None:
    """Build an optimizer as its first ``apply`` does, which names its slots."""
    with keras.name_scope(optimizer.name, caller=optimizer):
        optimizer.build(list(weights))


def slots_of(
    optimizer: keras.optimizers.Optimizer,
) -> Iterator[tuple[keras.Variable, keras.Variable]]:
    """Yield the slots of a built optimizer, each with its weight.

    Slots are the variables in lists with one entry per weight.
    """
    for slots in lists_by_weight(optimizer):
        weights = optimizer._trainable_variables
        for slot, weight in zip(slots, weights, strict=True):
            if slot is not None:
                yield slot, weight


def lists_by_weight(
    optimizer: keras.optimizers.Optimizer,
) -> list[list[keras.Variable | None]]:
    """Return a built optimizer's lists of slots with one slot per weight."""
    # A list has None for a weight without a slot.
    number = len(optimizer._trainable_variables)
    # These lists hold no slots, but may have the same length.
    excluded = ("_variables", "_trainable_variables")
    return [
        value
        for name, value in vars(optimizer).items()
        if name not in excluded
        and isinstance(value, list)
        and len(value) == number
        and all(s is None or isinstance(s, keras.Variable) for s in value)
    ]


def shared_variables(
    model: keras.Model, optimizers: bool = True
) -> list[keras.Variable]:
    """Return all variables that are equal on all ranks: all but metrics.

    Args:
        model: the model.
        optimizers: whether to return those of its optimizers, too.
    """
    state = collect(model)
    of_optimizers = state.optimizer_variables if optimizers else []
    return [*state.seeds, *state.weights, *of_optimizers]


def runs_eagerly(model: keras.Model) -> bool:
    """Whether a model's steps run without a graph."""
    return model.run_eagerly or tf.config.functions_run_eagerly()


def eager_cause(model: keras.Model) -> str:
    """Return what makes the steps of a model run eagerly."""
    if model.run_eagerly:
        return "run_eagerly=True"
    return "tf.config.run_functions_eagerly(True)"


def has_keras_step(trainer: keras.Model) -> bool:
    """Whether ``train_step`` is Keras's own, which uses the optimizer once."""
    own = compat.TensorFlowTrainer.train_step
    return getattr(trainer.train_step, "__func__", None) is own
