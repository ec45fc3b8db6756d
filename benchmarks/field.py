"""The field: TensorFlow's strategies, other frameworks, and loops by hand.

``python -m benchmarks.field`` measures them beside this package's strategies.
A row counts only if its losses are those of one device, after MLPerf's rule
that figures of speed are compared only between trainings that reach the same
result.
"""

# PyTorch and JAX are optional.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from keras_towers.cli.bench import COLUMNS, Column, OfRow, compare, ratio, split
from keras_towers.cli.main import Command
from keras_towers.foundation.system import usable_cores
from keras_towers.inspection.bench.cell_process import wait_for_all
from keras_towers.inspection.bench.models import Workload, classifier
from keras_towers.inspection.bench.rows import (
    ROWS,
    Row,
    Runs,
    Times,
    Train,
    find_row,
    fit,
    keras_alone,
    state_bytes,
)
from keras_towers.inspection.bench.runner import Sample, Setting
from keras_towers.jobs.rendezvous import tf_config

# How many more steps at once, while other processes are still measured.
_MORE_STEPS = 4


def wide() -> Any:
    """Build a 9-layer perceptron with 25 million parameters.

    ``--models benchmarks.field:wide`` trains it.
    """
    import keras

    body = [keras.layers.Dense(1808, activation="relu") for _ in range(8)]
    return classifier([keras.Input((1024,)), *body])


def cnn() -> Any:
    """Build a 6-layer convolutional net with 0.6 million parameters."""
    import keras
    from keras import layers

    convolutions = [
        layers.Conv2D(
            filters, 3, strides=strides, padding="same", activation="relu"
        )
        for filters, strides in ((32, 1), (32, 2), (64, 1), (64, 2))
    ]
    dense = [layers.Flatten(), layers.Dense(128, activation="relu")]
    return classifier([keras.Input((32, 32, 3)), *convolutions, *dense])


def loop(
    model: Any,
    batches: Callable[[int], Iterable[tuple[Any, Any]]],
    step: Callable[[Any, Any], Any],
) -> Train:
    """Train with a custom loop, without metrics and callbacks."""

    def train(steps: int, waits: bool) -> Times:
        times = Times()
        for x, y in batches(steps):
            times.batches.append(time.perf_counter())
            loss = step(x, y)
            if waits:
                times.add_loss(float(loss))
        times.state_bytes = state_bytes(model)
        return times

    return train


@contextlib.contextmanager
def alone(work: Workload) -> Iterator[Train]:
    """Use plain Keras in all processes at the same time, without exchange."""
    # No strategy connects the processes that TF_CONFIG describes.
    os.environ.pop(tf_config.VARIABLE, None)
    train = fit(work, work.model.build())
    yield train
    # If a rank stopped early, the other ranks would run faster.
    wait_for_all(work, "done", lambda: train(_MORE_STEPS, True))


@contextlib.contextmanager
def mirrored(work: Workload, reduction: str = "") -> Iterator[Train]:
    """Use ``MirroredStrategy``, with one of its cross-device operations."""
    import tensorflow as tf

    operations = getattr(tf.distribute, reduction)() if reduction else None
    strategy = tf.distribute.MirroredStrategy(work.devices, operations)
    with strategy.scope():
        model = work.model.build()
    yield fit(work, model)


@contextlib.contextmanager
def stock_loop(work: Workload) -> Iterator[Train]:
    """Use ``MultiWorkerMirroredStrategy`` in the loop of TensorFlow's guide.

    With Keras 3 ``fit`` crashes under it. The ring is also the default on CPUs;
    it is set so that the row means the same on every machine.
    """
    import tensorflow as tf

    experimental = tf.distribute.experimental
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=experimental.CommunicationOptions(
            implementation=experimental.CommunicationImplementation.RING
        )
    )
    with strategy.scope():
        model = work.model.build()

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            # Under a strategy Keras divides it by the number of ranks, because
            # its optimizer sums gradients over them.
            loss = model.compute_loss(x, y, model(x, training=True))
        weights = model.trainable_variables
        grads = tape.gradient(loss, [weight.value for weight in weights])
        model.optimizer.apply(grads, weights)
        return loss * work.size

    @tf.function
    def run(x: Any, y: Any) -> Any:
        return strategy.run(step, args=(x, y))

    data = tf.data.Dataset.from_tensor_slices(work.part()).batch(work.share)
    yield loop(model, lambda steps: data.take(steps).prefetch(2), run)


@contextlib.contextmanager
def torch_ddp(work: Workload) -> Iterator[Train]:
    """Use ``DistributedDataParallel`` around a Keras model, in a loop.

    With the PyTorch backend a Keras model is a ``torch.nn.Module``. The update
    is Keras's, over lists of tensors as in PyTorch's own optimizers, of which
    not all are the same: their Adam has another epsilon.
    """
    import keras
    import torch
    from torch import distributed

    # The ranks are on one machine, whose name may have no address.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{work.folder.absolute()}/torch",
        rank=work.rank,
        world_size=work.size,
    )
    model = work.model.build()
    module = torch.nn.parallel.DistributedDataParallel(model)
    convert, mapped = keras.ops.convert_to_tensor, keras.tree.map_structure
    x, y = mapped(convert, work.part())

    def batches(steps: int) -> Iterator[tuple[Any, Any]]:
        for first in range(0, steps * work.share, work.share):
            rows = itemgetter(slice(first, first + work.share))
            yield mapped(rows, x), mapped(rows, y)

    def step(x: Any, y: Any) -> Any:
        module.zero_grad()
        loss = model.compute_loss(x, y, module(x, training=True))
        loss.backward()
        with torch.no_grad():
            weights = model.trainable_variables
            grads = [weight.value.grad for weight in weights]
            model.optimizer.apply(grads, weights)
        return loss.detach()

    try:
        yield loop(model, batches, step)
    finally:
        distributed.destroy_process_group()


@contextlib.contextmanager
def jax_data_parallel(work: Workload) -> Iterator[Train]:
    """Use ``keras.distribution.DataParallel`` on the JAX backend."""
    import keras

    devices = keras.distribution.list_devices()[: len(work.devices)]
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(devices=devices)
    )
    yield fit(work, work.model.build())


@contextlib.contextmanager
def horovod_raw(work: Workload) -> Iterator[Train]:
    """Use an optimizer written by hand, with Horovod's operations."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    model = work.model.build()
    optimizer = model.optimizer

    class Averaging(type(optimizer)):  # type: ignore[misc]
        """Averages gradients over the ranks before it applies them."""

        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            # Horovod groups dense gradients only.
            means = hvd.grouped_allreduce(
                [tf.convert_to_tensor(grad) for grad in grads], op=hvd.Average
            )
            return super().apply(means, trainable_variables)

    model.optimizer = Averaging.from_config(optimizer.get_config())
    yield fit(work, model)


def _jax_devices(device: str, count: int) -> list[str]:
    """Split the CPU into devices of JAX."""
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={count} "
        "--xla_cpu_multi_thread_eigen=false"
    )
    return [f"cpu:{index}" for index in range(count)]


def _of(backend: str, devices: Callable[[str, int], list[str]]) -> Any:
    """Rows of another backend of Keras."""
    return partial(Row, backend=backend, devices=devices)


def _alone(name: str, row: Any = Row) -> Row:
    """The row of processes that exchange nothing."""
    note = "plain Keras in all processes at the same time, without exchange"
    launch = ("--no-strategy",)
    return row(name, alone, note, Runs.RANKS, launch=launch, exact=False)


def _mirrored(name: str, reduction: str) -> Row:
    train = partial(mirrored, reduction=reduction)
    return Row(name, train, f"MirroredStrategy, {reduction}")


_torch = _of("torch", lambda device, count: ["cpu"])
_jax = _of("jax", _jax_devices)
_STOCK = [
    Row("stock-default", mirrored, "MirroredStrategy"),
    _mirrored("stock-one-device", "ReductionToOneDevice"),
    _mirrored("stock-hierarchical", "HierarchicalCopyAllReduce"),
]
_FIELD = [
    *_STOCK,
    _torch("plain-torch", keras_alone, "Keras on PyTorch", Runs.ONE),
    _jax("plain-jax", keras_alone, "Keras on JAX", Runs.ONE),
    Row(
        "stock-loop",
        stock_loop,
        "MultiWorkerMirroredStrategy in a loop, without metrics and callbacks",
        Runs.RANKS,
    ),
    _jax(
        "jax-data-parallel",
        jax_data_parallel,
        "keras.distribution.DataParallel on JAX",
    ),
    _torch(
        "torch-ddp",
        torch_ddp,
        "Keras on PyTorch in DistributedDataParallel, in a loop without "
        "metrics and callbacks, over tensors",
        Runs.RANKS,
    ),
    Row(
        "horovod-raw",
        horovod_raw,
        "hvd.grouped_allreduce in the optimizer's apply, by hand",
        Runs.RANKS,
        engine="horovod",
    ),
    _alone("compute"),
    _alone("compute-torch", _torch),
    _alone("compute-jax", _jax),
]
FIELD: dict[str, Row] = {row.name: row for row in (*ROWS.values(), *_FIELD)}
_DEFAULT = [
    row.name
    for row in FIELD.values()
    if row.exact and row.name != "distributed-replicated"
]


def _of_backend(name: str, row: Row) -> str:
    """The name of a row, of the backend of another one."""
    return name if row.backend == "tensorflow" else f"{name}-{row.backend}"


def _row(sample: Sample) -> Row:
    return find_row(FIELD, sample.cell.row)


def _plain_ms(sample: Sample, of_row: OfRow) -> float | None:
    return of_row(_of_backend("plain", _row(sample)), 1)


def _efficiency(sample: Sample, of_row: OfRow) -> float | None:
    plain, replicas = _plain_ms(sample, of_row), sample.cell.replicas
    # It is meaningless if devices share cores.
    if plain is None or not 1 < replicas <= usable_cores():
        return None
    return plain / sample.result["step_ms"] / replicas


def _above_compute(sample: Sample, of_row: OfRow) -> float | None:
    row, replicas = _row(sample), sample.cell.replicas
    compute = of_row(_of_backend("compute", row), replicas)
    if compute is None or row.train is alone:
        return None
    return float(sample.result["step_ms"]) - compute


def columns_of(batch: int) -> dict[str, Column]:
    """The columns of the table, for a number of examples in each step."""
    best = [row.name for row in _STOCK]
    return {
        "examples_per_s": Column(
            "examples\n/s",
            "of the global batch, by the median step.",
            lambda sample, of_row: 1e3 * batch / sample.result["step_ms"],
            "{:.0f}",
        ),
        "efficiency": Column(
            "effi-\nciency",
            "throughput relative to n times one device of the same backend; "
            "empty if devices share cores.",
            _efficiency,
            "{:.0%}",
        ),
        "step_ms": COLUMNS["step_ms"],
        "to_stock": Column(
            "÷ best\nstock",
            "time relative to the fastest form of MirroredStrategy in the same "
            "repeat.",
            lambda sample, of_row: ratio(
                sample, [of_row(n, sample.cell.replicas) for n in best]
            ),
            ranges=True,
        ),
        "cost_ms": Column(
            "above\ncompute",
            "milliseconds above the compute row of the same repeat, whose "
            "processes train at the same time without exchanging anything.",
            _above_compute,
            ranges=True,
        ),
        "first_step_s": COLUMNS["first_step_s"],
        "memory_mb": COLUMNS["memory_mb"],
    }


app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def main(
    models: str = "small,large,benchmarks.field:cnn",
    towers: str = "auto",
    strategies: str = "default",
    steps: int = 60,
    batch_size: int = 64,
    repeats: int = 1,
    device: str = "cpu",
    timeout: float = 300,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
    plot: Path | None = None,
) -> None:
    """Compare frameworks on the same model, weights and data.

    The options are those of `keras-towers bench`. On the CPU a device is a
    core, all steps wait for their losses, and a row counts only if these are
    those of one device.
    """
    names = []
    for name in split(strategies):
        there = [n for n in _DEFAULT if not FIELD[n].missing]
        names += there if name == "default" else [name]
    rows = [find_row(FIELD, name) for name in names]
    if device == "gpu":
        rows = [
            row
            for row in rows
            if row.backend == "tensorflow" and row.runs is not Runs.RANKS
        ]
    # Rows that others are relative to come first.
    first = [_of_backend("plain", row) for row in rows]
    first += [
        _of_backend("compute", row) for row in rows if row.runs is Runs.RANKS
    ]
    compare(
        Setting(
            device,
            batch_size,
            steps,
            timeout,
            exact=device == "cpu",
            rows="benchmarks.field:FIELD",
        ),
        ["plain", *sorted(first), *(row.name for row in rows)],
        columns_of(batch_size),
        json_path,
        plot,
        models=models,
        towers=towers,
        processes=towers if device == "cpu" else None,
        repeats=repeats,
    )


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.field")
