"""Keras models that train on one device and on towers, and what comes of it."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.step import global_batch
from tests.partition.cases.table import BATCH, Case

TOLERANCE = 2e-5


@contextlib.contextmanager
def on_towers(
    programs: list[Any], towers: int = 4, **options: Any
) -> Iterator[None]:
    """Have Keras train on towers in a block.

    Args:
        programs: gets the programs of the steps that are traced.
        towers: their number.
        **options: of ``TowerStrategy``.
    """
    ours = global_batch.partition_graph

    def noted(*given: Any, **more: Any) -> Any:
        programs.append(ours(*given, **more))
        return programs[-1]

    with (
        unittest.mock.patch.object(global_batch, "partition_graph", noted),
        kt.TowerStrategy(towers, **options),
    ):
        yield


def trained(case: Case, scope: Any) -> dict[str, np.ndarray]:
    """Return all weights, optimizers' state and logs of a short training.

    Args:
        case: what is trained.
        scope: a block in which it is.
    """
    return used(case, scope, fit)


def used(
    case: Case, scope: Any, act: Callable[[keras.Model, Case], Any]
) -> dict[str, np.ndarray]:
    """Return what becomes of a model, and what a function returns of it.

    Args:
        case: makes the model.
        scope: a block in which it is used.
        act: uses it.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    with scope:
        model = case.build()
        found = act(model, case)
    values = {
        f"{number} {v.name}": np.array(v)
        for number, v in enumerate(_variables_of(model))
    }
    returned = tf.nest.flatten(found, expand_composites=True)
    return values | {
        f"returned {k}": np.array(leaf) for k, leaf in enumerate(returned)
    }


def fit(model: keras.Model, case: Case, **options: Any) -> Any:
    """Train for two epochs; return the logs of each batch and epoch."""
    noted: list[Any] = []
    arguments = {
        "batch_size": BATCH,
        "epochs": 2,
        "verbose": 0,
        "shuffle": False,
        **given(case),
        **case.options(),
        **options,
    }
    noting = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda _, logs: noted.append(dict(logs)),
        on_epoch_end=lambda _, logs: noted.append(dict(logs)),
    )
    arguments["callbacks"] = [*arguments.get("callbacks", ()), noting]
    model.fit(**arguments)
    return noted


def given(case: Case) -> dict[str, Any]:
    """Return what a case trains on, as arguments of ``fit``."""
    data = case.data()
    if isinstance(data, dict):
        return data
    return dict(zip(("x", "y", "sample_weight"), data, strict=False))


def _variables_of(model: keras.Model) -> list[Any]:
    """All variables of a model, and of its optimizers."""
    optimizers = [model.optimizer, *getattr(model, "others", ())]
    return [
        *model.variables,
        *(v for optimizer in optimizers for v in optimizer.variables),
    ]


def differences(
    one: dict[str, np.ndarray], many: dict[str, np.ndarray]
) -> dict[str, float]:
    """Return by how much what there is of towers is not that of one device."""
    assert one.keys() == many.keys()
    off = {key: between(one[key], many[key]) for key in one}
    return {key: number for key, number in off.items() if number > TOLERANCE}


def between(one: Any, many: Any) -> float:
    """Return the largest difference of a value, relative to the largest."""
    if one.shape != many.shape:
        return np.inf
    if one.dtype.kind not in "fiub":
        return 0.0 if np.array_equal(one, many) else np.inf
    one, many = one.astype("float64"), many.astype("float64")
    if one.size == 0 or np.array_equal(one, many, equal_nan=True):
        return 0.0
    finite = np.isfinite(one) & np.isfinite(many)
    if not np.array_equal(one[~finite], many[~finite], equal_nan=True):
        return np.inf
    one, many = one[finite], many[finite]
    largest = np.abs(one).max(initial=0)
    return float(np.abs(one - many).max(initial=0) / (largest + 1e-3))
