"""PyTorch's ``DistributedDataParallel`` in one rank of the benchmark."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

from keras_towers.cli.bench_models import CLASSES, SGD
from keras_towers.cli.bench_trainers import Share, Times

# Where the launcher wants the ranks to meet, by Horovod's word for it.
_INTERFACE = "HOROVOD_GLOO_IFACE"


class TorchLoop:
    """A training loop, on one thread.

    Args:
        model: a module, distributed or not.
        data: inputs and labels as tensors.
        batch: examples of a step.
    """

    how: str | None = None

    def __init__(self, model: Any, data: tuple[Any, Any], batch: int):
        import torch

        self._model = model
        self._data = data
        self._batch = batch
        self._loss = torch.nn.CrossEntropyLoss()
        self._optimizer = torch.optim.SGD(
            model.parameters(),
            lr=SGD["learning_rate"],
            momentum=SGD["momentum"],
        )

    def train(self, steps: int, epochs: int = 1) -> Times:
        """Train on the first so many steps, in each epoch."""
        x, y = self._data
        begins = []
        for _ in range(epochs):
            for first in range(0, steps * self._batch, self._batch):
                begins.append(time.perf_counter())
                rows = slice(first, first + self._batch)
                self._optimizer.zero_grad()
                self._loss(self._model(x[rows]), y[rows]).backward()
                self._optimizer.step()
        return Times(begins)

    def witness(self) -> list[float]:
        """Return the last layer's bias."""
        return list(self._model.parameters())[-1].tolist()


@contextlib.contextmanager
def torch_loop(share: Share, exchanges: bool) -> Iterator[TorchLoop]:
    """Make a rank, connected to the others if it exchanges gradients."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build(share.model.input_shape)
    x, y = map(torch.from_numpy, share.part())
    if x.ndim == 4:
        # PyTorch has the channels first.
        x = x.permute(0, 3, 1, 2).contiguous()
    if not exchanges:
        yield TorchLoop(model, (x, y), share.batch)
        return
    meeting = share.meeting
    if _INTERFACE in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ[_INTERFACE]
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting.folder.absolute()}/torch",
        rank=meeting.rank,
        world_size=meeting.size,
    )
    try:
        model = torch.nn.parallel.DistributedDataParallel(model)
        yield TorchLoop(model, (x, y), share.batch)
    finally:
        distributed.destroy_process_group()


def build(input_shape: tuple[int, ...]) -> Any:
    """Build the model of ``bench_models`` that takes such inputs."""
    from torch import nn

    if len(input_shape) == 1:
        width, hidden = {(48,): (32, 3), (1024,): (1024, 8)}[input_shape]
        widths = [*input_shape, *[width] * hidden]
        body = [
            layer
            for before, after in zip(widths, widths[1:], strict=False)
            for layer in (nn.Linear(before, after), nn.ReLU())
        ]
        return nn.Sequential(*body, nn.Linear(width, CLASSES))
    channels = input_shape[-1]
    body = []
    for filters, stride in ((32, 1), (32, 2), (64, 1), (64, 2)):
        body += [
            nn.Conv2d(channels, filters, 3, stride, padding=1),
            nn.ReLU(),
        ]
        channels = filters
    pixels = (input_shape[0] // 4) * (input_shape[1] // 4)
    return nn.Sequential(
        *body,
        nn.Flatten(),
        nn.Linear(channels * pixels, 128),
        nn.ReLU(),
        nn.Linear(128, CLASSES),
    )
