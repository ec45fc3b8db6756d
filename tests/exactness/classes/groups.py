"""Trains recipes side by side in one model, on one device and on towers."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import keras_towers as kt
from tests.exactness.classes.recipes import BATCH, EXAMPLES, Recipe

# Relative to the largest value of a variable or a history.
TOLERANCE = 5e-6


@dataclasses.dataclass
class Trained:
    """What a fit left of each recipe, by the recipe's name."""

    values: dict[str, list[np.ndarray]]
    told: list[str]


def train(recipes: Mapping[str, Recipe], strategy: Any = None) -> Trained:
    """Build one model of all recipes and fit it for an epoch.

    Args:
        recipes: parts that have nothing in common but the batch.
        strategy: the towers; None: one device.
    """
    keras.utils.set_random_seed(5)
    inputs, outputs, held = [], {}, {}
    for name, recipe in recipes.items():
        kind = recipe.x.dtype
        entry = layers.Input(
            recipe.x.shape[1:], dtype="string" if kind == object else kind.name
        )
        output = recipe.build(entry)
        inputs.append(entry)
        outputs[_key(name)] = output
        held[name] = keras.Model(entry, output)
    model = keras.Model(inputs, outputs)
    parts: dict[str, dict[str, Any]] = {}
    for name, recipe in recipes.items():
        for kind, make in {"loss": _mse, **recipe.compiled}.items():
            parts.setdefault(kind, {})[_key(name)] = (
                make() if kind == "loss" else [make()]
            )
    model.compile(keras.optimizers.SGD(0.05), **parts)
    random = np.random.default_rng(3)
    y = {
        _key(name): recipe.y
        if recipe.y is not None
        else random.normal(size=(EXAMPLES, *outputs[_key(name)].shape[1:]))
        for name, recipe in recipes.items()
    }
    weights = {
        _key(name): random.random(EXAMPLES) + 0.5
        if recipe.weighted
        else np.ones(EXAMPLES)
        for name, recipe in recipes.items()
    }
    # Keras takes no array of strings.
    x = [
        tf.constant(recipe.x) if recipe.x.dtype == object else recipe.x
        for recipe in recipes.values()
    ]
    keras.utils.set_random_seed(11)
    with _told() as told, strategy or contextlib.nullcontext():
        history = model.fit(
            x if len(x) > 1 else x[0],
            y,
            sample_weight=weights
            if any(recipe.weighted for recipe in recipes.values())
            else None,
            batch_size=BATCH,
            shuffle=False,
            verbose=0,
        ).history
    alone = len(recipes) == 1
    return Trained(
        {
            name: [
                *(v.numpy() for v in part.variables if "seed" not in v.path),
                *(
                    np.asarray(value)
                    for key, value in history.items()
                    if alone or key.startswith(f"{_key(name)}_")
                ),
            ]
            for name, part in held.items()
        },
        told,
    )


def differences(
    recipes: Mapping[str, Recipe], towers: int
) -> dict[str, tuple[float, Exception | None, list[str]]]:
    """Compare towers with one device.

    Returns:
        For each recipe its largest difference, relative to the tolerance that
        it is granted; what it raised; and what ``fit`` told.
    """
    wanted = train(recipes)
    try:
        strategy = kt.TowerStrategy(towers, exact=True)
        found = train(recipes, strategy)
    except Exception as error:
        if len(recipes) == 1:
            return {name: (np.inf, error, []) for name in recipes}
        raise
    return {
        name: (
            _difference(found.values[name], wanted.values[name])
            / recipe.amplifies,
            None,
            found.told,
        )
        for name, recipe in recipes.items()
    }


def _difference(found: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    worst = 0.0
    for one, other in zip(found, wanted, strict=True):
        if not np.array_equal(one, other, equal_nan=one.dtype.kind == "f"):
            scale = max(1.0, float(np.max(np.abs(other))))
            difference = float(np.max(np.abs(one - other))) / scale
            worst = max(worst, difference / TOLERANCE)
            worst = np.inf if np.isnan(difference) else worst
    return worst


def _key(name: str) -> str:
    return name.replace(" ", "_").lower()


def _mse() -> keras.losses.Loss:
    return keras.losses.MeanSquaredError()


@contextlib.contextmanager
def _told() -> Iterator[list[str]]:
    """Record what the package warns of."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("keras_towers")
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)
