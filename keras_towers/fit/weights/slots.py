"""Slot variables: which weights they belong to, and where they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from keras_towers.errors import TowerError


def slots_of(
    optimizer: keras.optimizers.Optimizer,
) -> Iterator[tuple[keras.Variable, Any]]:
    """Find the slot variables of a built optimizer."""
    # Names are not unique, and Adafactor gives its slots others.
    by_place = _by_place(optimizer)
    by_prefix = {
        _prefix(weight): weight for weight in optimizer._trainable_variables
    }
    for slot in optimizer.variables:
        weight = by_place.get(id(slot))
        if weight is None:
            weight = _by_name(slot.name, by_prefix)
        if weight is not None:
            yield slot, weight


def lists_by_weight(
    optimizer: keras.optimizers.Optimizer,
) -> list[list[keras.Variable | None]]:
    """Return a built optimizer's lists of slots, of one for each weight."""
    # A weight without such a slot has None.
    number = len(optimizer._trainable_variables)
    # These may happen to be as long.
    others = ("_variables", "_trainable_variables")
    return [
        value
        for name, value in vars(optimizer).items()
        if name not in others
        and isinstance(value, list)
        and len(value) == number
        and all(s is None or isinstance(s, keras.Variable) for s in value)
    ]


def of_update_rule(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.Variable]:
    """Return the slot variables that only the update of their weight uses."""
    others = {id(slot) for slot in _of_every_optimizer(optimizer)}
    return [s for s, _ in slots_of(optimizer) if id(s) not in others]


def check_known(optimizer: keras.optimizers.Optimizer) -> None:
    """Check that each variable of an optimizer is known to be a weight's."""
    if type(optimizer).__module__.startswith("keras."):
        return
    known = {*_by_place(optimizer), *map(id, _of_every_optimizer(optimizer))}
    known |= {id(optimizer._iterations), id(optimizer._learning_rate)}
    for variable in optimizer.variables:
        if id(variable) not in known:
            raise TowerError(
                f"optimizer {type(optimizer).__name__} has the variable "
                f"{variable.path!r}, of which it is not known to which weight "
                'it belongs, so updates="sharded" cannot share it between '
                "ranks: keep such variables in lists with one for each weight, "
                "as Keras's optimizers do, or leave updates out."
            )


def _of_every_optimizer(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.Variable]:
    """Slots that any optimizer may have, whatever its update rule."""
    names = ("_model_variables_moving_average", "_accumulated_gradients")
    lists = (getattr(optimizer, name, ()) for name in names)
    return [slot for slots in lists for slot in slots if slot is not None]


def _by_place(optimizer: keras.optimizers.Optimizer) -> dict[int, Any]:
    """The weights of slots, by id, in lists with an entry for each weight."""
    weights = optimizer._trainable_variables
    return {
        id(slot): weight
        for slots in lists_by_weight(optimizer)
        for slot, weight in zip(slots, weights, strict=True)
        if slot is not None
    }


def _by_name(name: str, by_prefix: dict[str, Any]) -> Any:
    """The weight of a slot that is named "<weight path>_<role>", or None."""
    while name not in by_prefix and "_" in name:
        name = name.rpartition("_")[0]
    return by_prefix.get(name)


def _prefix(weight: Any) -> str:
    if isinstance(weight, keras.Variable):
        return weight.path.replace("/", "_")
    return weight.name.replace("/", "_").replace(":", "_")
