"""The field: other frameworks, and loops by hand.

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

from keras_towers.bench.models import Workload, classifier
from keras_towers.bench.rows import (
    ROWS,
    Row,
    Runs,
    Times,
    Train,
    fit,
    keras_alone,
)
from keras_towers.bench.runner import Setting
from keras_towers.cli.bench import compare
from keras_towers.cli.main import Command


def wide() -> Any:
    """Build a 9-layer perceptron with 25 million parameters.

    ``--models benchmarks.field:wide`` trains it.
    """
    import keras

    body = [keras.layers.Dense(1808, activation="relu") for _ in range(8)]
    return classifier([keras.Input((1024,)), *body])


def loop(
    batches: Callable[[int], Iterable[tuple[Any, Any]]],
    step: Callable[[Any, Any], Any],
) -> Train:
    """Train with a custom loop, without metrics and callbacks."""

    def train(steps: int, epochs: int, waits: bool) -> Times:
        times = Times()
        for _ in range(epochs):
            for x, y in batches(steps):
                times.batches.append(time.perf_counter())
                loss = step(x, y)
                if waits:
                    times.add_loss(float(loss))
        return times

    return train


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
    yield loop(lambda steps: data.take(steps).prefetch(2), run)


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
        yield loop(batches, step)
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
    return partial(
        Row,
        backend=backend,
        devices=devices,
        plain=f"plain-{backend}",
        compute=f"compute-{backend}",
    )


_torch = _of("torch", lambda device, count: ["cpu"])
_jax = _of("jax", _jax_devices)
_FIELD = [
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
    *(
        row(
            f"compute-{backend}",
            keras_alone,
            "processes that exchange nothing",
            Runs.RANKS,
            alone=True,
            default=False,
        )
        for backend, row in (("torch", _torch), ("jax", _jax))
    ),
]
# Their losses are not those of one device.
_OTHERS = ("async", "noop", "distributed-parameter-server")
FIELD: dict[str, Row] = {
    row.name: row
    for row in (*ROWS.values(), *_FIELD)
    if row.name not in _OTHERS
}

_COLUMNS = (
    "examples_per_s",
    "efficiency",
    "step_ms",
    "cost_ms",
    "first_step_s",
    "memory_mb",
)
app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def main(
    models: str = "small,large,cnn",
    towers: str = "auto",
    strategies: str = "default",
    steps: int = 60,
    batch_size: int = 64,
    repeats: int = 1,
    timeout: float = 300,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Compare frameworks on the same model, weights and data.

    The options are those of `keras-towers bench`. A row counts only if its
    losses are those of one device. A device is a core of the CPU, and all steps
    wait for their losses.
    """
    compare(
        Setting(
            "cpu",
            batch_size,
            steps,
            timeout,
            exact=True,
            rows="benchmarks.field:FIELD",
        ),
        _COLUMNS,
        json_path,
        models=models,
        towers=towers,
        processes=towers,
        strategies=f"plain,{strategies}",
        repeats=repeats,
    )


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.field")
