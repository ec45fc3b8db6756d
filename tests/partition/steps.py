"""Keras models that train on one device and on towers, and what comes of it."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

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
    ours = global_batch.partitioned

    def noted(*given: Any, **more: Any) -> Any:
        programs.append(ours(*given, **more))
        return programs[-1]

    with (
        unittest.mock.patch.object(global_batch, "partitioned", noted),
        kt.TowerStrategy(towers, **options),
    ):
        yield


def trained(case: Case, scope: Any, **options: Any) -> dict[str, np.ndarray]:
    """Return all weights, optimizers' state and logs of a short training.

    Args:
        case: what is trained.
        scope: a block in which it is.
        **options: arguments of ``fit`` instead of those of the case.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    logs: dict[str, list[float]] = {}

    def note(kind: str, now: Any) -> None:
        for key, value in now.items():
            logs.setdefault(f"{kind} {key}", []).append(np.array(value))

    with scope:
        model = case.build()
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
            on_train_batch_end=lambda _, logs: note("batch", logs),
            on_epoch_end=lambda _, logs: note("epoch", logs),
        )
        arguments["callbacks"] = [*arguments.get("callbacks", ()), noting]
        model.fit(**arguments)
    found = {key: np.array(values) for key, values in logs.items()}
    return state_of(model) | found


def given(case: Case) -> dict[str, Any]:
    """Return what a case trains on, as arguments of ``fit``."""
    data = case.data()
    if isinstance(data, dict):
        return data
    return dict(zip(("x", "y", "sample_weight"), data, strict=False))


def state_of(model: keras.Model) -> dict[str, np.ndarray]:
    """Return all weights of a model, and the state of its optimizers."""
    optimizers = [model.optimizer, *getattr(model, "others", ())]
    variables = [
        *model.variables,
        *(v for optimizer in optimizers for v in optimizer.variables),
    ]
    return {
        f"{number} {v.name}": np.array(v) for number, v in enumerate(variables)
    }


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
