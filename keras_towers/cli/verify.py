"""``keras-towers verify``: compare training on towers with one device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keras_towers.bench.models import call_named
from keras_towers.errors import TowerError

if TYPE_CHECKING:
    from keras_towers.verification import Verification


def verify(
    target: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION")],
    towers: int | None = None,
    batch_size: int | None = None,
    steps: int = 3,
    tolerance: float = math.inf,
) -> None:
    """Measure how far training on towers is from training on one device.

    A few steps run on both, and their weights and logs are compared.

    The exit code is 0; 1 if the difference is larger than --tolerance; and 2
    if it cannot be measured.

    Args:
        target: A function without arguments that returns a compiled model and
            data, as for fit: (model, x), (model, x, y), (model, x, y,
            sample_weight) or (model, dataset).
        towers: Number of towers. Default: all GPUs; without GPUs, the devices
            that the function makes, or 2 on the CPU.
        batch_size: Examples in a batch of arrays.
        steps: How many steps to compare.
        tolerance: The largest acceptable difference.
    """
    try:
        found = _measure(target, towers, batch_size, steps)
    except TowerError:
        raise
    except Exception as error:
        raise TowerError(
            f"{target} cannot be measured: {type(error).__name__}: {error}"
        ) from error
    typer.echo(found)
    if found.difference > tolerance:
        raise typer.Exit(1)


def _measure(
    target: str, towers: int | None, batch_size: int | None, steps: int
) -> Verification:
    import tensorflow as tf

    import keras_towers as kt

    if not tf.config.list_physical_devices("GPU"):
        kt.virtual_towers(2 if towers is None else towers)
    model, *data = _build(target)
    return kt.verify(
        model,
        *data,
        strategy=kt.TowerStrategy(towers),
        batch_size=batch_size,
        steps=steps,
    )


def _build(target: str) -> tuple[Any, ...]:
    """Call the named function, or raise ``TowerError``."""
    built = call_named(target)
    if not isinstance(built, tuple) or not 2 <= len(built) <= 4:
        raise TowerError(
            f"{target} has to return (model, x), (model, x, y), (model, x, y, "
            f"sample_weight) or (model, dataset), but returned {built!r:.200}."
        )
    return built
