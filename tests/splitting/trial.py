"""What comes of a case, on one device and on towers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import linecache
import logging
import pathlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

import keras_towers as kt
from keras_towers.fit import told
from tests.splitting.cases.table import BY_DESIGN, Case
from tests.splitting.hostile.table import BATCH, SPLITS

HERE = pathlib.Path(__file__).parent / "hostile"
TOLERANCE = 1e-4
# What fit says when it begins.
DESIGNED = "does not train as on one device"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a training said, and by how much it is not that of one device."""

    difference: float
    said: tuple[str, ...] = ()
    # What is known to differ by design is no warning.
    announced: tuple[str, ...] = ()
    error: str | None = None

    @property
    def lines(self) -> list[str]:
        """The lines of the cases that are named, with their code."""
        named = re.findall(r"(\w+\.py):(\d+)", " ".join(self.said))
        return [
            linecache.getline(str(HERE / file), int(line)).strip()
            for file, line in named
            if (HERE / file).exists()
        ]

    def verdict(self, case: Case, exact: bool) -> str:
        """Return what is wrong with it: "" if nothing is."""
        if self.error:
            return "crash"
        same = self.difference <= TOLERANCE
        if not self.said:
            designed = case.truth == BY_DESIGN and not exact
            told = any(DESIGNED in line for line in self.announced)
            return "" if same or (designed and told) else "silent"
        if case.truth == SPLITS:
            return "told in vain" if same else "told of what should be equal"
        if case.truth == BY_DESIGN:
            return ""
        right = any("# here" in line for line in self.lines)
        if case.says:
            right = any(case.says in line for line in self.said)
        return "" if right else "wrong line"


def tried(case: Case, towers: int, **options: Any) -> Outcome:
    """Train a case on towers."""
    one = alone(case)
    strategy = kt.TowerStrategy(towers=towers, **options)
    with _heard() as (said, announced):
        try:
            many = trained(case, strategy)
        except Exception as error:
            many, failed = {}, f"{type(error).__name__}: {error}"
        else:
            failed = None
    return Outcome(difference(one, many), tuple(said), tuple(announced), failed)


@functools.cache
def alone(case: Case) -> dict[str, np.ndarray]:
    """Train a case on one device."""
    return trained(case, contextlib.nullcontext())


def difference(one: dict[str, Any], many: dict[str, Any]) -> float:
    """Return the largest difference of a value, relative to the largest."""
    if not many:
        return np.inf
    if one.keys() != many.keys():
        return np.inf
    return max(_between(one[key], many[key]) for key in one)


def trained(
    case: Case, scope: Any, batch_size: int = BATCH
) -> dict[str, np.ndarray]:
    """Return all weights, optimizers' state and logs of a short training."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    logs: dict[str, list[float]] = {}

    def note(kind: str, now: Any) -> None:
        for key, value in now.items():
            logs.setdefault(f"{kind} {key}", []).append(np.array(value))

    with scope:
        model = case.build()
        data = case.data()
        arguments = (
            data
            if isinstance(data, dict)
            else dict(zip(("x", "y", "sample_weight"), data, strict=False))
        )
        arguments = {
            "batch_size": batch_size,
            "epochs": 2,
            "verbose": 0,
            "shuffle": False,
            **arguments,
            **case.options(),
        }
        noting = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda _, logs: note("batch", logs),
            on_epoch_end=lambda _, logs: note("epoch", logs),
        )
        arguments["callbacks"] = [*arguments.get("callbacks", ()), noting]
        if arguments["batch_size"] is None:
            del arguments["batch_size"]
        model.fit(**arguments)
    optimizers = [model.optimizer, *getattr(model, "others", ())]
    variables = [
        *model.variables,
        *(v for optimizer in optimizers for v in optimizer.variables),
        *getattr(model, "kept_too", ()),
    ]
    return {
        **{
            f"{number} {v.name}": np.array(v)
            for number, v in enumerate(variables)
            if "seed" not in getattr(v, "path", "")
        },
        **{key: np.array(values) for key, values in logs.items()},
    }


def _between(one: Any, many: Any) -> float:
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


@contextlib.contextmanager
def _heard() -> Iterator[tuple[list[str], list[str]]]:
    """Collect what a block warns of and announces, as if none had before."""
    said: list[str] = []
    announced: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            loud = record.levelno >= logging.WARNING
            (said if loud else announced).append(record.getMessage())

    told._said.clear()
    logger, handler = logging.getLogger("keras_towers"), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said, announced
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        said.extend(
            str(w.message) for w in caught if "keras_towers" in w.filename
        )
