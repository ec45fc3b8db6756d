"""How long a strategy takes to adopt and release a model of 100 MB."""

from __future__ import annotations

import statistics
import time
from typing import Annotated

import typer

_TIMES = 4


def main(
    towers: Annotated[int, typer.Option(min=1, help="Number of towers.")] = 2,
    strategy: Annotated[str, typer.Option(help="Its name.")] = "tower",
) -> None:
    """Time how long a strategy takes to adopt and release a 100 MB model."""
    import keras

    import keras_towers as kt

    kt.virtual_towers(towers)
    hidden = [keras.layers.Dense(1250, "relu") for _ in range(8)]
    model = keras.Sequential([keras.Input((1250,)), *hidden])
    model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    arrays = [variable.numpy() for variable in variables]
    copied, adopted, released = [], [], []
    for _ in range(_TIMES):
        start = time.perf_counter()
        copies = [array.copy() for array in arrays]
        copied.append(time.perf_counter() - start)
        del copies
        start = time.perf_counter()
        with kt.strategy(strategy, towers=towers) as entered:
            entered.adopt(model)
            end = time.perf_counter()
            adopted.append(end - start)
        released.append(time.perf_counter() - end)
    first, *later = adopted
    for name, seconds in (
        ("one copy by numpy", statistics.median(copied)),
        ("first adoption in a process", first),
        ("adoption", statistics.median(later)),
        ("release", statistics.median(released)),
    ):
        print(f"{name}: {1e3 * seconds:.1f} ms")
