"""How Keras trains on PyTorch and on JAX over several devices."""

# PyTorch and JAX are optional.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from keras_towers.bench.torch_loop import batches, process_group
from keras_towers.bench.trainers import (
    Trainer,
    Workload,
    fit,
    last_weights,
    loop,
    mapped,
)
from keras_towers.errors import TowerError


def check_gpus(backend: str, count: int) -> None:
    """Check that a backend uses GPUs, since it would use the CPU otherwise.

    Raises:
        TowerError: it sees fewer than are needed.
    """
    if backend == "torch":
        import torch

        seen = torch.cuda.device_count()
    else:
        import jax

        seen = jax.device_count() if jax.default_backend() == "gpu" else 0
    if seen < count:
        raise TowerError(
            f"{backend} sees {seen} GPUs instead of {count}: install its build "
            "for GPUs"
        )


@contextlib.contextmanager
def jax_data_parallel(work: Workload) -> Iterator[Trainer]:
    """Use ``keras.distribution.DataParallel`` on the JAX backend."""
    import keras

    devices = keras.distribution.list_devices()[: len(work.devices)]
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(devices=devices)
    )
    yield fit(work, work.model.build())


@contextlib.contextmanager
def torch_ddp(work: Workload) -> Iterator[Trainer]:
    """Use ``DistributedDataParallel`` around a Keras model, in a loop.

    With the PyTorch backend a Keras model is a ``torch.nn.Module``. The update
    is Keras's, over lists of tensors as in PyTorch's own optimizers, of which
    not all are the same: their Adam has another epsilon.
    """
    import torch

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    with process_group(work.meeting, backend):
        yield _loop(work)


def _loop(work: Workload) -> Trainer:
    import keras
    import torch

    model = work.model.build()
    module = torch.nn.parallel.DistributedDataParallel(model)
    x, y = (mapped(keras.ops.convert_to_tensor, part) for part in work.part())

    def step(x: Any, y: Any) -> Any:
        module.zero_grad()
        loss = model.compute_loss(x, y, module(x, training=True))
        loss.backward()
        with torch.no_grad():
            weights = model.trainable_variables
            grads = [weight.value.grad for weight in weights]
            model.optimizer.apply(grads, weights)
        return loss.detach()

    return loop(work, batches(work, x, y), step, lambda: last_weights(model))
