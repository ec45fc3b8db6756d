"""Train the same model on one device and under two strategies, and compare.

Run it with ``python -m benchmarks.exactness``. Every row is a fresh process
with two logical CPUs; a number is the largest difference of a weight from one
device after two epochs on the same batches. Takes about two minutes.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typer

from keras_towers import subprocesses

TOWERS = 2
TIMEOUT_S = 120
# Float rounding reaches 1e-6 in two epochs; a wrong gradient 1e-2.
EQUAL = 1e-5


@dataclass(frozen=True)
class Case:
    """A model's optimizer and data that strategies may get wrong."""

    title: str
    optimizer: Callable[[], Any]
    examples: int = 64
    batch_size: int = 8
    strings: bool = False
    overflow: bool = False
    masked: bool = False
    loss_reduction: str = "sum_over_batch_size"
    middle: str = ""


def _sgd(**kwargs: Any) -> Callable[[], Any]:
    import keras

    return lambda: keras.optimizers.SGD(0.1, momentum=0.9, **kwargs)


def _loss_scaled() -> Any:
    import keras

    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))


def cases() -> list[Case]:
    """The cases, in the order of the table."""
    return [
        Case("even batches", _sgd()),
        Case("last batch uneven (53 examples, batch 8)", _sgd(), 53),
        Case("last batch of one example", _sgd(), 57),
        Case("batch not divisible (7 on 2 towers)", _sgd(), 63, 7),
        Case("string inputs", _sgd(), strings=True),
        Case("clipnorm", _sgd(clipnorm=0.05)),
        Case("global_clipnorm", _sgd(global_clipnorm=0.05)),
        Case("clipvalue", _sgd(clipvalue=0.005)),
        Case("gradient accumulation", _sgd(gradient_accumulation_steps=2)),
        Case(
            "moving averages with overwrite",
            _sgd(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3),
        ),
        Case("loss scaling, overflow on tower 1", _loss_scaled, overflow=True),
        Case("masked sequences", _sgd(), masked=True),
        Case(
            "weighted mean loss",
            _sgd(),
            loss_reduction="mean_with_sample_weight",
        ),
        Case("Dropout", _sgd(), 53, middle="Dropout"),
        Case(
            "BatchNormalization",
            _sgd(),
            53,
            middle="BatchNormalization",
        ),
    ]


def train(case: Case, strategy: Any, adopted: bool) -> list[np.ndarray]:
    """Build, compile and fit, with the strategy around all of it or ``fit``."""
    import contextlib

    import keras

    keras.utils.set_random_seed(1)
    random = np.random.RandomState(0)
    x: Any = random.randn(case.examples, 6).astype("float32")
    y = random.randint(0, 3, case.examples)
    weights = random.rand(case.examples).astype("float32")
    middle: list[Any] = [keras.layers.Dense(16, activation="tanh")]
    first: Any = keras.Input((6,))
    if case.strings:
        import tensorflow as tf

        x = tf.constant(np.array(["a", "b", "c", "d"])[y])
        first = keras.Input((), dtype="string")
        words = keras.layers.StringLookup(vocabulary=["a", "b", "c"])
        middle = [words, keras.layers.Embedding(5, 4)]
    if case.masked:
        lengths = random.randint(1, 7, (case.examples, 1))
        x = np.where(np.arange(6) < lengths, random.randint(1, 9, x.shape), 0)
        y = random.randint(0, 3, x.shape)
        first = keras.Input((6,), dtype="int32")
        middle = [keras.layers.Embedding(9, 4, mask_zero=True)]
    if case.middle:
        options = {"rate": 0.3, "seed": 5} if case.middle == "Dropout" else {}
        middle.append(getattr(keras.layers, case.middle)(**options))
    if case.overflow:
        x[4] = np.inf
    inside = contextlib.nullcontext() if adopted else strategy.scope()
    around = strategy if adopted else contextlib.nullcontext()
    with inside:
        model = keras.Sequential([first, *middle, keras.layers.Dense(3)])
        model.compile(
            case.optimizer(),
            keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction=case.loss_reduction
            ),
        )
    weighted = case.loss_reduction == "mean_with_sample_weight"
    with around:
        model.fit(
            x,
            y,
            batch_size=case.batch_size,
            epochs=2,
            shuffle=False,
            verbose=0,
            sample_weight=weights if weighted else None,
        )
    # Not the states of random generators, which stock strategies hold apart.
    return [
        weight.numpy()
        for weight in model.variables
        if weight.dtype.startswith("float")
    ]


def run_case(index: int, which: str) -> str:
    """One cell of the table, in this process."""
    import tensorflow as tf

    import keras_towers as kt

    devices = kt.virtual_towers(TOWERS)
    case = cases()[index]
    wanted = train(case, tf.distribute.get_strategy(), adopted=False)
    try:
        if which == "stock":
            strategy = tf.distribute.MirroredStrategy(devices)
            got = train(case, strategy, adopted=False)
        else:
            strategy = kt.TowerStrategy(TOWERS)
            got = train(case, strategy, adopted=True)
    except Exception as error:  # the table shows whatever goes wrong
        return f"crash: {type(error).__name__}"
    difference = max(
        float(np.max(np.abs(a - b))) for a, b in zip(wanted, got, strict=True)
    )
    if not np.isfinite(difference):
        return "wrong: not a number"
    verdict = "equal" if difference < EQUAL else "wrong"
    return f"{verdict}, {difference:.0e}"


def _in_fresh_process(index: int, which: str) -> str:
    command = [sys.executable, __file__, "--case", str(index), "--which", which]
    ended = subprocesses.run(command, TIMEOUT_S)
    if ended.code is None:
        return f"hangs (ended after {TIMEOUT_S} s)"
    if ended.code:
        return f"crash: exit code {ended.code}"
    return json.loads(ended.stdout.splitlines()[-1])


def main(
    case: Annotated[int, typer.Option(hidden=True)] = -1,
    which: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Print how far two strategies are from one device, case by case."""
    if case >= 0:
        print(json.dumps(run_case(case, which)))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("case", "MirroredStrategy", "TowerStrategy")
    console = Console()
    with console.status("") as status:
        for index, each in enumerate(cases()):
            status.update(each.title)
            cells = [
                _in_fresh_process(index, name) for name in ("stock", "towers")
            ]
            table.add_row(each.title, *cells)
    console.print(table)
    console.print(
        f"Largest difference of a weight to one device, {TOWERS} towers."
    )


if __name__ == "__main__":
    typer.run(main)
