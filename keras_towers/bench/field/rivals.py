"""How Keras trains on PyTorch and on JAX over several devices."""

# PyTorch and JAX are optional.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from keras_towers.bench.trainers import (
    Trainer,
    Workload,
    bias,
    fit,
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
    from torch import distributed

    meeting = work.meeting
    # All ranks are on this machine, whose name may have no address.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"file://{meeting.folder.absolute()}/torch",
        rank=meeting.rank,
        world_size=meeting.size,
    )
    try:
        yield _loop(work)
    finally:
        distributed.destroy_process_group()


def _loop(work: Workload) -> Trainer:
    import keras
    import torch

    model = work.model.build()
    module = torch.nn.parallel.DistributedDataParallel(model)
    data = [mapped(keras.ops.convert_to_tensor, part) for part in work.part()]

    def batches(steps: int) -> Iterator[Any]:
        for first in range(0, steps * work.batch, work.batch):
            rows = slice(first, first + work.batch)
            yield [mapped(itemgetter(rows), part) for part in data]

    def step(x: Any, y: Any) -> Any:
        module.zero_grad()
        loss = model.compute_loss(x, y, module(x, training=True))
        loss.backward()
        with torch.no_grad():
            weights = model.trainable_variables
            grads = [weight.value.grad for weight in weights]
            model.optimizer.apply(grads, weights)
        return loss.detach()

    return loop(work, batches, step, lambda: bias(model))
