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
from keras_towers.fit.capture import capture, judging
from keras_towers.splitting import Analysis
from keras_towers.splitting.lines import line_of
from tests.splitting.cases.table import (
    BATCH,
    BY_DESIGN,
    COUPLES,
    REHEARSED,
    SPLITS,
    Case,
)

HERE = pathlib.Path(__file__).parent / "cases"
MARK = "# here"
TOLERANCE = 2e-5
# What fit says when it begins.
DESIGNED = "does not train as on one device"


@dataclasses.dataclass
class Outcome:
    """What a training said, and by how much it is not that of one device."""

    difference: float = np.inf
    said: list[str] = dataclasses.field(default_factory=list)
    # What is known to differ by design is no warning.
    announced: list[str] = dataclasses.field(default_factory=list)
    # The first analysis; None if every tower traces the step by itself.
    analysis: Analysis | None = None

    def verdict(self, case: Case, exact: bool) -> str:
        """Return what is wrong with it: "" if nothing is."""
        same = self.difference <= TOLERANCE
        if not self.said:
            designed = case.truth == BY_DESIGN and not exact
            told = any(DESIGNED in line for line in self.announced)
            return "" if same or (designed and told) else "silent"
        if case.truth in (SPLITS, REHEARSED):
            return "told in vain" if same else "told of what should be equal"
        words = " ".join(self.said)
        is_right = case.says in words if case.says else _is_marked(words)
        return "" if case.truth == BY_DESIGN or is_right else "wrong line"

    def verdict_of_analysis(self, case: Case) -> str:
        """Return what is wrong with what is known before the first step."""
        if self.analysis is None:
            return ""
        analysis = self.analysis
        if any(draw.value.rows for draw in analysis.draws):
            return "" if case.truth == BY_DESIGN else "draws for each example"
        if analysis.is_proven:
            right = case.truth in (SPLITS, BY_DESIGN) or case.says
            return "" if right else "proven"
        return "" if case.truth in (COUPLES, REHEARSED) else "not proven"

    @property
    def names_the_line(self) -> bool:
        """Whether the analysis names a line that is to be named."""
        assert self.analysis is not None
        found = (*self.analysis.differences, *self.analysis.effects)
        lines = [line_of(one.operation, capture.__file__) for one in found]
        return _is_marked(" ".join(filter(None, lines)))


class _Enough(BaseException):
    """The analysis is all that is asked for."""


def analysed(case: Case) -> Outcome:
    """Begin to train a case on towers, up to the first analysis."""
    outcome = Outcome()
    with _analyses(outcome, stop=True), contextlib.suppress(_Enough):
        trained(case, kt.TowerStrategy(towers=3))
    return outcome


def tried(case: Case, towers: int, **options: Any) -> Outcome:
    """Train a case on towers, and on one device."""
    one, outcome = _alone(case), Outcome()
    strategy = kt.TowerStrategy(towers=towers, **options)
    with _heard(outcome), _analyses(outcome):
        many = trained(case, strategy)
    if one.keys() == many.keys():
        outcome.difference = max(between(one[k], many[k]) for k in one)
    return outcome


@functools.cache
def _alone(case: Case) -> dict[str, np.ndarray]:
    return trained(case, contextlib.nullcontext())


def trained(case: Case, scope: Any) -> dict[str, np.ndarray]:
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
        if not isinstance(data, dict):
            names = "x", "y", "sample_weight"
            data = dict(zip(names, data, strict=False))
        arguments = {
            "batch_size": BATCH,
            "epochs": 2,
            "verbose": 0,
            "shuffle": False,
            **data,
            **case.options(),
        }
        noting = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda _, logs: note("batch", logs),
            on_epoch_end=lambda _, logs: note("epoch", logs),
        )
        arguments["callbacks"] = [*arguments.get("callbacks", ()), noting]
        model.fit(**arguments)
    optimizers = [model.optimizer, *getattr(model, "others", ())]
    variables = [
        *model.variables,
        *(v for optimizer in optimizers for v in optimizer.variables),
    ]
    weights = {
        f"{number} {v.name}": np.array(v)
        for number, v in enumerate(variables)
        if "seed" not in getattr(v, "path", "")
    }
    return weights | {key: np.array(values) for key, values in logs.items()}


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


def _is_marked(text: str) -> bool:
    """Whether a text names a line of the cases that is to be named."""
    return any(
        MARK in linecache.getline(str(HERE / file), int(line))
        for file, line in re.findall(r"(\w+\.py):(\d+)", text)
    )


@contextlib.contextmanager
def _analyses(outcome: Outcome, stop: bool = False) -> Iterator[None]:
    """Keep what is said of the first step that is analysed in a block.

    Args:
        outcome: gets it.
        stop: whether it goes no further then.
    """
    ours = judging.splits.analysed

    def keep(*given: Any) -> Analysis:
        analysis = ours(*given)
        outcome.analysis = outcome.analysis or analysis
        if stop:
            raise _Enough
        return analysis

    judging.splits.analysed = keep
    try:
        yield
    finally:
        judging.splits.analysed = ours


@contextlib.contextmanager
def _heard(outcome: Outcome) -> Iterator[None]:
    """Collect what a block warns of and announces, as if none had before."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            loud = record.levelno >= logging.WARNING
            into = outcome.said if loud else outcome.announced
            into.append(record.getMessage())

    told._said.clear()
    logger, handler = logging.getLogger("keras_towers"), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        outcome.said.extend(
            str(w.message) for w in caught if "keras_towers" in w.filename
        )
