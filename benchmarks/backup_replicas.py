"""Draw loss and global step against time, with and without a backup replica.

Run it with ``python -m benchmarks.backup_replicas [PNG]``; needs what
``async_vs_sync.py`` needs, and has its model, its data and its slow device: one
of four replicas takes ten times as long as the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import tensorflow as tf
import typer
from matplotlib import pyplot

import keras_towers as kt
from benchmarks import async_vs_sync as device
from keras_towers.doctor.probe import describe_machine, machine_facts

REPLICAS = device.TOWERS
PICTURE = Path(__file__).parents[1] / "docs/images/backup_replicas.png"

# How many gradients an update averages, with title and colour.
RUNS = {
    REPLICAS: (f"R = {REPLICAS} of {REPLICAS}, waits", "#1f6feb"),
    REPLICAS - 1: (
        f"R = {REPLICAS - 1} of {REPLICAS}, one backup",
        "#d9822b",
    ),
}


class Progress(device.Curve):
    """The loss, and the number of updates, after every epoch."""

    def __init__(self, x: Any, y: Any, seconds: float, strategy: Any):
        super().__init__(x, y, seconds)
        self._strategy = strategy
        self.updates: list[int] = []

    def _note(self) -> None:
        super()._note()
        trained = self._strategy.counts.updates if self._spent else 0
        self.updates.append(trained)


def train(aggregate: int, seconds: float) -> Progress:
    """Train for some seconds, averaging so many gradients an update."""
    x, y = device.data()
    with kt.SyncReplicasStrategy(
        replicas_to_aggregate=aggregate, total_num_replicas=REPLICAS
    ) as strategy:
        progress = Progress(x, y, seconds, strategy)
        options = {"epochs": 1000, "verbose": 0, "callbacks": [progress]}
        device.make_model().fit(x, y, batch_size=device.BATCH_SIZE, **options)
    print(f"R = {aggregate}: {strategy.counts}")
    return progress


def draw(
    curves: dict[int, tuple[list[float], list[int], list[float]]], machine: str
) -> pyplot.Figure:
    """Draw the curves.

    Args:
        curves: seconds, updates and losses, by gradients in an update.
        machine: where they were measured.
    """
    figure, (steps, losses) = pyplot.subplots(
        1, 2, figsize=(8.4, 3.8), layout="constrained"
    )
    for aggregate, (title, colour) in RUNS.items():
        times, updates, loss = curves[aggregate]
        steps.plot(times, updates, label=title, color=colour)
        losses.plot(times, loss, label=title, color=colour)
    steps.set_ylabel("global step (updates), higher is better")
    for axes in (steps, losses):
        device.over_time(axes)
    device.of_losses(losses)
    steps.set_ylim(0)
    steps.legend(frameon=False)
    figure.suptitle(
        f"{REPLICAS} replicas, one of them {device.SLOW} times slower"
    )
    device.explain(figure, "replica", machine)
    return figure


def main(
    picture: Annotated[Path, typer.Argument(help="PNG to write")] = PICTURE,
    seconds: Annotated[float, typer.Option(help="training of each")] = 6.0,
) -> None:
    """Train without and with a backup replica, and draw the curves."""
    kt.virtual_towers(REPLICAS)
    # A replica that sleeps keeps a thread.
    tf.config.threading.set_inter_op_parallelism_threads(4 * REPLICAS)
    curves = {}
    for aggregate, (title, _) in RUNS.items():
        run = train(aggregate, seconds)
        curves[aggregate] = run.times, run.updates, run.losses
        rate = run.updates[-1] / run.times[-1]
        print(
            f"{title}: {rate:.1f} updates a second, loss "
            f"{run.losses[-1]:.3f} after {run.times[-1]:.1f} s"
        )
    machine = describe_machine(machine_facts(timeout_s=60))
    draw(curves, machine).savefig(picture, dpi=130)


if __name__ == "__main__":
    typer.run(main)
