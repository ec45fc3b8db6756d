"""The field: other frameworks, loops by hand, and which of them count.

A row counts only if its losses are those of one device, after MLPerf's rule
that figures of speed are compared only between trainings that reach the same
result. The whole beginning of the curve has to agree, because a wrong mean
over replicas shows in the second step.
"""

# PyTorch and JAX are optional.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from keras_towers.bench import report
from keras_towers.bench.compare import Comparison
from keras_towers.bench.models import Workload
from keras_towers.bench.report import COLUMNS, Column, Spread
from keras_towers.bench.rows import (
    ROWS,
    Row,
    Runs,
    Times,
    Trainer,
    fit,
    keras_alone,
)
from keras_towers.bench.runner import Sample
from keras_towers.errors import TowerError

REFERENCE, FROZEN = "plain", "plain-frozen"
# Of two losses, relative to the reference's. Other orders of summation stay far
# below it; a mean over other examples, or another optimizer, far above.
TOLERANCE = 1e-3
# How many times that training has to change the losses, so that half of its
# effect does not pass for all of it.
_TELLING = 2
FIELD_COLUMNS = {
    "examples_per_s": Column(
        "examples\n/s", "of the global batch, by the median step.", "{:.0f}"
    ),
    "efficiency": Column(
        "effi-\nciency",
        "throughput relative to n times one device of the same backend; none "
        "where devices share cores.",
        "{:.0f} %",
        100,
    ),
    **{
        name: COLUMNS[name]
        for name in ("step_ms", "cost_ms", "first_step_s", "memory_mb")
    },
}


class Field(Comparison):
    """A comparison in which only rows with the reference's losses count."""

    columns = FIELD_COLUMNS

    def results(self) -> list[dict[str, Any]]:
        """Return one result per row, model and number of devices."""
        refused = self._refused()
        results = report.summarize(self.rows, self.samples, refused)
        devices = len(self.facts["gpus"])
        if self.setting.device == "cpu":
            devices = self.facts["cores"]
        for result in results:
            throughput = inverse(result["step_ms"], 1e3 * self.setting.batch)
            count, plain = result["replicas"], result["to_plain"]
            divides = 1 < count <= devices
            result["examples_per_s"] = throughput
            efficiency = inverse(plain, 1 / count) if divides else None
            result["efficiency"] = efficiency
        return [r for r in results if r["row"] != FROZEN]

    def _refused(self) -> dict[tuple[str, int, str], str]:
        """Say why rows do not count, by model, number of devices and name."""
        ran = {
            (s.cell.model, s.cell.row, s.cell.repeat): s.result
            for s in self.samples
            if s.cell.replicas == 1
        }
        refused = {}
        for sample in self.samples:
            cell = sample.cell
            if self.rows[cell.row].alone or cell.row == FROZEN:
                continue
            reference, still = (
                ran.get((cell.model, name, cell.repeat), {})
                for name in (REFERENCE, FROZEN)
            )
            if why := why_not(sample, reference, still):
                refused[cell.key] = why
        return refused


def inverse(spread: Spread | None, factor: float) -> Spread | None:
    """Divide a factor by what was measured."""
    if spread is None:
        return None
    return Spread(
        factor / spread.median, factor / spread.high, factor / spread.low
    )


def why_not(
    sample: Sample, reference: Mapping[str, Any], frozen: Mapping[str, Any]
) -> str:
    """Say why a sample does not count, or nothing.

    Args:
        sample: the sample.
        reference: the reference's result; empty: it failed.
        frozen: its result where weights stay as they are.
    """
    if sample.error:
        return "failed"
    if not reference or not frozen:
        return "the reference failed"
    why = difference(sample.result["losses"], reference["losses"])
    if why or sample.cell.row == REFERENCE:
        return why
    return undecided(reference["losses"], frozen["losses"])


def difference(losses: Sequence[float], reference: Sequence[float]) -> str:
    """Say where two curves differ first, or nothing if they agree.

    Args:
        losses: the loss of each step, as a mean over the global batch.
        reference: the losses to agree with.

    Example:
        >>> difference([2.3, 1.0], [2.3, 2.1])
        'loss differs from step 2 on (1.000 against 2.100)'
    """
    if not reference:
        return "the reference has no losses"
    if len(losses) != len(reference):
        return f"{len(losses)} losses, against {len(reference)}"
    for step, (mine, other) in enumerate(
        zip(losses, reference, strict=True), 1
    ):
        # Infinity is no loss to agree on, and NaN agrees with nothing.
        if not (math.isfinite(other) and _close(mine, other)):
            shown = f"{mine:.3f} against {other:.3f}"
            if f"{mine:.3f}" == f"{other:.3f}":
                shown = f"{mine:.7g} against {other:.7g}"
            return f"loss differs from step {step} on ({shown})"
    return ""


def undecided(reference: Sequence[float], frozen: Sequence[float]) -> str:
    """Say why equal curves would not show that a row trains, or nothing.

    Args:
        reference: the loss of each step.
        frozen: the same, where weights stay as they are.

    Example:
        >>> undecided([2.3, 2.2999, 2.2998], [2.3, 2.3, 2.3])
        'training changes the loss by at most 0.0087% in 3 steps, ...'
    """
    moved = max(
        (
            abs(mine - other) / abs(other) if other else math.inf
            for mine, other in zip(frozen, reference, strict=True)
            if mine != other
        ),
        default=0.0,
    )
    if not moved < _TELLING * TOLERANCE:
        return ""
    return (
        f"training changes the loss by at most {100 * moved:.2g}% in "
        f"{len(reference)} steps, which would not show a row that does not "
        "train: use a larger learning rate, which takes no longer"
    )


def _close(mine: float, other: float) -> bool:
    return abs(mine - other) <= TOLERANCE * abs(other)


def loop(
    batches: Callable[[int], Iterable[tuple[Any, Any]]],
    step: Callable[[Any, Any], Any],
    model: Any,
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

    return Trainer(train, model)


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
    yield loop(lambda steps: data.take(steps).prefetch(2), run, model)


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
        yield loop(batches, step, model)
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


def _drop_in(optimizer: Any) -> Any:
    """Return the optimizer of a script written for Horovod."""
    from keras_towers import horovod as hvd

    hvd.init()
    return hvd.DistributedOptimizer(optimizer)


def _frozen(optimizer: Any) -> Any:
    """Make an optimizer leave the weights as they are."""
    optimizer.apply = lambda *args, **kwargs: None
    return optimizer


def _jax_devices(device: str, count: int) -> list[str]:
    """Split a CPU into devices of JAX, or check that it sees the GPUs."""
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
    """Use the CPU, or check that PyTorch sees the GPUs."""
    if device == "cpu":
        return ["cpu"]
    import torch

    return _gpus("torch", torch.cuda.device_count(), count)


def _gpus(backend: str, seen: int, count: int) -> list[str]:
    if seen < count:
        raise TowerError(
            f"{backend} sees {seen} GPUs instead of {count}: install its build "
            "for GPUs"
        )
    return [f"gpu:{index}" for index in range(count)]


_DEVICES = {"torch": _torch_devices, "jax": _jax_devices}
_FIELD = [
    Row(
        "plain-frozen",
        partial(keras_alone, wrap=_frozen),
        "plain Keras, whose weights stay as they are",
        Runs.ONE,
    ),
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
    Row(
        "horovod-drop-in",
        partial(keras_alone, wrap=_drop_in),
        "keras_towers.horovod.DistributedOptimizer",
        Runs.RANKS,
        ours=True,
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
