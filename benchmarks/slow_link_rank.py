"""A rank for ``slow_link.py``: ``KIND OPTIONS STEPS``, in a fresh interpreter.

It prints a line when its first steps are over, and then what a step took: the
first ones trace, and meet. PyTorch may be in an environment of its own, which
has nothing else of this repository.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import statistics
import sys
import time
from typing import Any

# Whole rounds of ``sync_every=8``.
WARM_UP = 8
WIDTH, LAYERS, CLASSES, BATCH = 1024, 8, 10, 32
BYTES = 4 * (LAYERS * WIDTH * (WIDTH + 1) + CLASSES * (WIDTH + 1))
PORT = 4100


class Clock:
    """The seconds of each step, but for the first ones."""

    def __init__(self, steps: int):
        self._steps, self._times = steps, list[float]()

    def step_begins(self) -> None:
        """Note it, and print what is due."""
        self._times.append(time.perf_counter())
        done = len(self._times) - 1 - WARM_UP
        if done == 0:
            print("begun", flush=True)
        elif done == self._steps:
            pairs = itertools.pairwise(self._times[WARM_UP:])
            each = [1e3 * (end - begin) for begin, end in pairs]
            found = {
                "median_ms": round(statistics.median(each), 1),
                "mean_ms": round(statistics.mean(each), 1),
            }
            print(json.dumps(found), flush=True)


def copy(rank: int, clock: Clock, steps: int) -> None:
    """Send as many bytes as the gradients have, and wait for an answer."""
    if rank == 0:
        with socket.create_server(("", PORT)) as server:
            connection, _ = server.accept()
        for _ in range(steps):
            left = BYTES
            while left:
                left -= len(connection.recv(min(left, 1 << 20)))
            connection.sendall(b".")
        return
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            connection = socket.create_connection(
                (os.environ["MASTER_ADDR"], PORT)
            )
            break
        time.sleep(0.1)
    for _ in range(steps):
        clock.step_begins()
        connection.sendall(bytes(BYTES))
        connection.recv(1)


def fit(strategy: str, options: Any, clock: Clock, steps: int) -> None:
    """Train in a strategy of the package; ``""``: in none."""
    import keras
    import numpy as np

    import keras_towers as kt

    class Tell(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            clock.step_begins()

    scope = getattr(kt, strategy)(**options) if strategy else None
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(WIDTH, "relu") for _ in range(LAYERS)]
    model = keras.Sequential(
        [keras.Input((WIDTH,)), *hidden, keras.layers.Dense(CLASSES)]
    )
    momentum = 0.0 if "ParameterServer" in strategy else 0.9
    model.compile(
        keras.optimizers.SGD(0.01, momentum),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    batch = BATCH * (scope.num_replicas if scope else 1)
    draw = np.random.default_rng(0)
    x = draw.random((batch * steps, WIDTH), "float32")
    y = draw.integers(CLASSES, size=len(x))
    callbacks = [kt.EveryRank(Tell()) if scope else Tell()]
    with scope or contextlib.nullcontext():
        model.fit(
            *(x, y, batch),
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )


def torch(rank: int, size: int, clock: Clock, steps: int) -> None:
    """Train with ``DistributedDataParallel`` over Gloo."""
    import torch
    from torch import distributed, nn

    torch.set_num_threads(1)
    hidden = [
        layer
        for _ in range(LAYERS)
        for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())
    ]
    model: Any = nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))
    if size > 1:
        address = f"tcp://{os.environ['MASTER_ADDR']}:{PORT}"
        distributed.init_process_group(
            "gloo", init_method=address, rank=rank, world_size=size
        )
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9)
    x, y = torch.rand(BATCH, WIDTH), torch.randint(CLASSES, (BATCH,))
    for _ in range(steps):
        clock.step_begins()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def main(kind: str, options: str, steps: str) -> None:
    """Measure so many steps."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    clock, count = Clock(int(steps)), WARM_UP + int(steps) + 1
    if kind == "socket":
        copy(rank, clock, count)
    elif kind == "torch":
        torch(rank, size, clock, count)
    else:
        fit(kind, json.loads(options), clock, count)


if __name__ == "__main__":
    main(*sys.argv[1:])
