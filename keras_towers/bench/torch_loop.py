"""PyTorch's ``DistributedDataParallel`` in one rank of the benchmark."""

# PyTorch is optional.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

from keras_towers.bench.meeting import Meeting
from keras_towers.bench.models import CLASSES, SGD, BenchModel
from keras_towers.bench.trainers import Trainer, Workload, loop, mapped
from keras_towers.errors import TowerError

# The network interface that the launcher chose, in Horovod's variable.
_INTERFACE = "HOROVOD_GLOO_IFACE"


@contextlib.contextmanager
def torch_loop(work: Workload, exchanges: bool) -> Iterator[Trainer]:
    """Create a rank with one thread, connected to the others if needed."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if not isinstance(work.model, BenchModel):
        raise TowerError(f"there is no PyTorch version of: {work.model.title}")
    module = build(work.model)
    x, y = map(torch.from_numpy, work.part())
    if x.ndim == 4:
        # PyTorch expects channels first.
        x = x.permute(0, 3, 1, 2).contiguous()
    if not exchanges:
        yield _loop(work, module, x, y)
        return
    with process_group(work.meeting, "gloo"):
        module = torch.nn.parallel.DistributedDataParallel(module)
        yield _loop(work, module, x, y)


@contextlib.contextmanager
def process_group(meeting: Meeting, backend: str) -> Iterator[None]:
    """Connect this rank to the others, which are on the same machine."""
    from torch import distributed

    # The machine's name may have no address.
    interface = os.environ.get(_INTERFACE, "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    distributed.init_process_group(
        backend,
        init_method=f"file://{meeting.folder.absolute()}/torch",
        rank=meeting.rank,
        world_size=meeting.size,
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()


def batches(
    work: Workload, x: Any, y: Any
) -> Callable[[int], Iterator[tuple[Any, Any]]]:
    """Return what gives a number of batches of this rank's tensors."""

    def first_batches(steps: int) -> Iterator[tuple[Any, Any]]:
        for first in range(0, steps * work.batch, work.batch):
            rows = itemgetter(slice(first, first + work.batch))
            yield mapped(rows, x), mapped(rows, y)

    return first_batches


def _loop(work: Workload, module: Any, x: Any, y: Any) -> Trainer:
    import torch

    loss_of = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        module.parameters(), lr=SGD["learning_rate"], momentum=SGD["momentum"]
    )

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = loss_of(module(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return loop(
        work,
        batches(work, x, y),
        step,
        lambda: list(module.parameters())[-1].tolist(),
    )


def build(model: BenchModel) -> Any:
    """Build the same model in PyTorch."""
    from torch import nn

    *sides, features = model.input_shape
    body: list[Any] = []
    for filters, stride in model.convolutions:
        body += [nn.Conv2d(features, filters, 3, stride, padding=1), nn.ReLU()]
        features = filters
        sides = [math.ceil(side / stride) for side in sides]
    if body:
        body.append(nn.Flatten())
    features *= math.prod(sides)
    for width in model.widths:
        body += [nn.Linear(features, width), nn.ReLU()]
        features = width
    return nn.Sequential(*body, nn.Linear(features, CLASSES))
