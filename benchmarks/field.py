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
from typing import Any

import typer

from keras_towers.bench.models import Workload
from keras_towers.bench.rows import (
    ROWS,
    Row,
    Runs,
    Times,
    Trainer,
    fit,
    keras_alone,
)
from keras_towers.bench.runner import Setting
from keras_towers.cli.bench import (
    BatchSize,
    Device,
    JsonPath,
    Models,
    On,
    Repeats,
    Steps,
    Strategies,
    Timeout,
    Towers,
    compare,
)
from keras_towers.cli.command import Command
from keras_towers.errors import TowerError


def loop(
    batches: Callable[[int], Iterable[tuple[Any, Any]]],
    step: Callable[[Any, Any], Any],
) -> Trainer:
    """Train with a custom loop, without metrics and callbacks."""

    def train(steps: int, epochs: int, waits: bool) -> Times:
        times = Times()
        start = time.perf_counter()
        for _ in range(epochs):
            times.losses.clear()
            for x, y in batches(steps):
                times.batches.append(time.perf_counter())
                loss = step(x, y)
                if waits:
                    times.losses.append(float(loss))
                if times.first_step_s is None:
                    times.first_step_s = time.perf_counter() - start
        return times

    return Trainer(train)


@contextlib.contextmanager
def stock_loop(work: Workload) -> Iterator[Trainer]:
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
def torch_ddp(work: Workload) -> Iterator[Trainer]:
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
        "nccl" if torch.cuda.is_available() else "gloo",
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
def jax_data_parallel(work: Workload) -> Iterator[Trainer]:
    """Use ``keras.distribution.DataParallel`` on the JAX backend."""
    import keras

    devices = keras.distribution.list_devices()[: len(work.devices)]
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(devices=devices)
    )
    yield fit(work, work.model.build())


def _averaging(optimizer: Any) -> Any:
    """Return a hand-written optimizer based on Horovod's operations."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    class Averaging(type(optimizer)):  # type: ignore[misc]
        """Averages gradients over the ranks before it applies them."""

        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            # Horovod groups dense gradients only.
            means = hvd.grouped_allreduce(
                [tf.convert_to_tensor(grad) for grad in grads], op=hvd.Average
            )
            return super().apply(means, trainable_variables)

    hvd.init()
    return Averaging.from_config(optimizer.get_config())


def _jax_devices(device: str, count: int) -> list[str]:
    """Split a CPU into devices of JAX, or name the GPUs."""
    if device == "cpu":
        os.environ["XLA_FLAGS"] = (
            f"--xla_force_host_platform_device_count={count} "
            "--xla_cpu_multi_thread_eigen=false"
        )
        return [f"cpu:{index}" for index in range(count)]
    import jax

    seen = jax.device_count() if jax.default_backend() == "gpu" else 0
    return _gpus("jax", seen, count)


def _torch_devices(device: str, count: int) -> list[str]:
    if device == "cpu":
        return ["cpu"]
    import torch

    return _gpus("torch", torch.cuda.device_count(), count)


def _gpus(backend: str, seen: int, count: int) -> list[str]:
    # Both would train on the CPU.
    if seen < count:
        raise TowerError(f"{backend} sees {seen} of {count} GPUs")
    return [f"gpu:{index}" for index in range(count)]


_DEVICES = {"torch": _torch_devices, "jax": _jax_devices}
_FIELD = [
    *(
        Row(
            f"plain-{backend}",
            keras_alone,
            f"Keras on {backend}, one device",
            Runs.ONE,
            backend=backend,
            devices=devices,
        )
        for backend, devices in _DEVICES.items()
    ),
    Row(
        "stock-loop",
        stock_loop,
        "MultiWorkerMirroredStrategy in a loop, without metrics and callbacks",
        Runs.RANKS,
    ),
    Row(
        "jax-data-parallel",
        jax_data_parallel,
        "keras.distribution.DataParallel on JAX",
        backend="jax",
        devices=_jax_devices,
    ),
    Row(
        "torch-ddp",
        torch_ddp,
        "Keras on PyTorch in DistributedDataParallel, in a loop without "
        "metrics and callbacks, over tensors",
        Runs.RANKS,
        backend="torch",
        devices=_torch_devices,
    ),
    Row(
        "horovod-raw",
        partial(keras_alone, wrap=_averaging),
        "hvd.grouped_allreduce in the optimizer's apply, by hand",
        Runs.RANKS,
        engine="horovod",
    ),
    *(
        Row(
            f"compute-{backend}",
            keras_alone,
            "processes that exchange nothing",
            Runs.RANKS,
            backend=backend,
            alone=True,
            default=False,
            devices=devices,
        )
        for backend, devices in _DEVICES.items()
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
    models: Models = "small,large,cnn",
    towers: Towers = "auto",
    strategies: Strategies = "default",
    steps: Steps = 60,
    batch_size: BatchSize = 64,
    repeats: Repeats = 1,
    device: On = Device.AUTO,
    timeout: Timeout = 300,
    json_path: JsonPath = None,
) -> None:
    """Compare frameworks on the same model, weights and data.

    A row counts only if its losses are those of one device. On CPUs a device is
    a core, and all steps wait for their losses.
    """
    compare(
        FIELD,
        Setting(
            device,
            batch_size,
            steps,
            timeout,
            repeats,
            frameworks=True,
            rows="benchmarks.field:FIELD",
        ),
        _COLUMNS,
        json_path,
        models=models,
        towers=towers,
        processes=towers,
        strategies=f"plain,{strategies}",
    )


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.field")
