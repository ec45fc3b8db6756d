"""Compare two strategies with one device, case by case.

Run it with ``python -m benchmarks.exactness``. Every cell is a fresh process
with two logical CPUs; a number is the largest difference of a weight from one
device after two epochs on the same batches. Takes about two minutes.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras
import numpy as np
from keras.layers import BatchNormalization, Dropout
from rich.console import Console
from rich.table import Table

from keras_towers.foundation import commands

TOWERS = 2
TIMEOUT_S = 120
# Float rounding reaches 1e-6 in two epochs; a wrong gradient 1e-2.
EQUAL = 1e-5
STRATEGIES = "MirroredStrategy", "TowerStrategy"


@dataclass(frozen=True)
class Case:
    """Something that strategies may get wrong.

    Attributes:
        sgd: options of the optimizer.
        examples: how many there are.
        batch_size: of how many a batch is.
        inputs: "numbers", "strings", or "masked" sequences of different length.
        overflow: whether the second tower's gradients overflow, with an
            optimizer that scales the loss.
        weighted: whether the loss is a mean weighted by examples.
        middle: makes a layer in the middle of the model.
    """

    sgd: dict[str, Any] = field(default_factory=dict)
    examples: int = 64
    batch_size: int = 8
    inputs: str = "numbers"
    overflow: bool = False
    weighted: bool = False
    middle: Callable[[], keras.layers.Layer] | None = None


_AVERAGES = {
    "use_ema": True,
    "ema_momentum": 0.9,
    "ema_overwrite_frequency": 3,
}
CASES = {
    "even batches": Case(),
    "last batch uneven (53 examples, batch 8)": Case(examples=53),
    "last batch of one example": Case(examples=57),
    "batch not divisible (7 on 2 towers)": Case(examples=63, batch_size=7),
    "string inputs": Case(inputs="strings"),
    "clipnorm": Case({"clipnorm": 0.05}),
    "global_clipnorm": Case({"global_clipnorm": 0.05}),
    "clipvalue": Case({"clipvalue": 0.005}),
    "gradient accumulation": Case({"gradient_accumulation_steps": 2}),
    "moving averages with overwrite": Case(_AVERAGES),
    "loss scaling, overflow on tower 1": Case(overflow=True),
    "masked sequences": Case(inputs="masked"),
    "weighted mean loss": Case(weighted=True),
    "Dropout": Case(examples=53, middle=partial(Dropout, 0.3, seed=5)),
    "BatchNormalization": Case(examples=53, middle=BatchNormalization),
}


def examples(case: Case) -> tuple[Any, Any, list[Any]]:
    """Return inputs, labels, and the first layers of a model for them."""
    random = np.random.RandomState(0)
    x: Any = random.randn(case.examples, 6).astype("float32")
    y = random.randint(0, 3, case.examples)
    if case.inputs == "strings":
        import tensorflow as tf

        x = tf.constant(np.array(["a", "b", "c", "d"])[y])
        words = keras.layers.StringLookup(vocabulary=["a", "b", "c"])
        first = keras.Input((), dtype="string")
        return x, y, [first, words, keras.layers.Embedding(5, 4)]
    if case.inputs == "masked":
        lengths = random.randint(1, 7, (case.examples, 1))
        x = np.where(np.arange(6) < lengths, random.randint(1, 9, x.shape), 0)
        y = random.randint(0, 3, x.shape)
        embedding = keras.layers.Embedding(9, 4, mask_zero=True)
        return x, y, [keras.Input((6,), dtype="int32"), embedding]
    if case.overflow:
        x[4] = np.inf
    return x, y, [keras.Input((6,)), keras.layers.Dense(16, "tanh")]


def train(
    case: Case, scope: Any = None, around_fit: Any = None
) -> list[np.ndarray]:
    """Train a new model, and return its weights.

    Args:
        case: what to train.
        scope: the block that the model is made in; None: none.
        around_fit: the block around ``fit``; None: none.
    """
    keras.utils.set_random_seed(1)
    with scope or contextlib.nullcontext():
        x, y, layers = examples(case)
        if case.middle:
            layers.append(case.middle())
        model = keras.Sequential([*layers, keras.layers.Dense(3)])
        momentum = 0.0 if case.overflow else 0.9
        optimizer = keras.optimizers.SGD(0.1, momentum, **case.sgd)
        if case.overflow:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        kind = (
            "mean_with_sample_weight"
            if case.weighted
            else "sum_over_batch_size"
        )
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction=kind
        )
        model.compile(optimizer, loss)
    weights = None
    if case.weighted:
        weights = np.random.RandomState(1).rand(case.examples)
    with around_fit or contextlib.nullcontext():
        model.fit(
            x,
            y,
            batch_size=case.batch_size,
            epochs=2,
            shuffle=False,
            verbose=0,
            sample_weight=weights,
        )
    # Not the states of random generators, which stock strategies hold apart.
    return [v.numpy() for v in model.variables if v.dtype.startswith("float")]


def compare(title: str, strategy: str) -> str:
    """Fill one cell of the table, in a process of its own."""
    import tensorflow as tf

    import keras_towers as kt

    devices = kt.virtual_towers(TOWERS)
    case = CASES[title]
    expected = train(case)
    try:
        if strategy == "MirroredStrategy":
            stock = tf.distribute.MirroredStrategy(devices)
            found = train(case, scope=stock.scope())
        else:
            found = train(case, around_fit=kt.TowerStrategy(TOWERS))
    except Exception as error:  # The table shows whatever goes wrong.
        return f"crash: {type(error).__name__}"
    difference = max(
        float(np.max(np.abs(a - b)))
        for a, b in zip(expected, found, strict=True)
    )
    if not np.isfinite(difference):
        return "wrong: not a number"
    verdict = "equal" if difference < EQUAL else "wrong"
    return f"{verdict}, {difference:.0e}"


def compare_in_process(title: str, strategy: str) -> str:
    """Fill one cell, which may crash or hang, by a new process."""
    command = [sys.executable, __file__, title, strategy]
    ended = commands.run_command(command, TIMEOUT_S)
    if ended.code is None:
        return f"hangs (ended after {TIMEOUT_S} s)"
    if ended.code:
        return f"crash: exit code {ended.code}"
    return ended.stdout.splitlines()[-1]


def main() -> None:
    """Print how far two strategies are from one device."""
    table, console = Table("case", *STRATEGIES), Console()
    with console.status("") as status:
        for title in CASES:
            status.update(title)
            cells = [compare_in_process(title, s) for s in STRATEGIES]
            table.add_row(title, *cells)
    console.print(table)
    console.print(
        f"Largest difference of a weight to one device, {TOWERS} towers."
    )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(compare(sys.argv[1], sys.argv[2]))
    else:
        main()
