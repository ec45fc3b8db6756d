"""The rows of the benchmark: how each trains in one process, and is timed.

TensorFlow's own strategies are compared in ``benchmarks/field.py``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from keras_towers.foundation.errors import TowerError, did_you_mean
from keras_towers.foundation.object_types import JsonObject, Logs
from keras_towers.inspection.bench.models import Workload
from keras_towers.jobs.known_engines import ENGINES, SERVED
from keras_towers.strategies import (
    STRATEGIES,
    RegisteredStrategy,
    check_options,
    parse,
)

if TYPE_CHECKING:
    import keras

_BUILT = [e.strategy for e in ENGINES.values() if e.recipe]


@dataclass
class Times:
    """Moments of one training, in seconds, and its losses.

    Attributes:
        began: when it began.
        batches: when each step began.
        losses: the loss of each step, if steps wait for it.
        first_step_s: seconds until the first loss was available.
        state_bytes: the bytes of all weights and of the optimizer's state.
    """

    began: float = field(default_factory=time.perf_counter)
    batches: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    first_step_s: float | None = None
    state_bytes: int = 0

    def add_loss(self, loss: float) -> None:
        """Record the loss of a step that has just ended."""
        self.losses.append(loss)
        if self.first_step_s is None:
            self.first_step_s = time.perf_counter() - self.began


Train: TypeAlias = Callable[[int, bool], Times]
"""Trains for a number of steps.

The last argument says whether every step waits for its loss.
"""


def fit(work: Workload, model: keras.Model, whole: bool = False) -> Train:
    """Train with ``fit``, on whole global batches or this process's share."""
    import keras

    data = work.data if whole else work.part()
    batch = work.batch if whole else work.share

    def train(steps: int, waits: bool) -> Times:
        times = Times()
        model.fit(
            *keras.tree.map_structure(lambda a: a[: steps * batch], data),
            batch_size=batch,
            shuffle=False,
            verbose=0,
            callbacks=[_recorder(times, waits)],
        )
        times.state_bytes = state_bytes(model)
        return times

    return train


def state_bytes(model: keras.Model) -> int:
    """Return the bytes of all weights and of the optimizer's state."""
    return sum(
        math.prod(v.shape) * np.dtype(v.dtype).itemsize
        for v in (*model.variables, *model.optimizer.variables)
    )


def _recorder(times: Times, waits: bool) -> keras.callbacks.Callback:
    """Create a callback that records one call of ``fit``."""
    import keras

    total = 0.0

    # Measured from start to start, to include input and metrics.
    def begin_batch(batch: int, logs: Logs) -> None:
        times.batches.append(time.perf_counter())

    def end_batch(batch: int, logs: Mapping[str, float]) -> None:
        nonlocal total
        before = total
        # Keras gives the mean over the steps so far.
        total = float(logs["loss"]) * (batch + 1)
        times.add_loss(total - before)

    if keras.backend.backend() == "tensorflow":
        from keras_towers.fit.calls.callback_effects import NEVER_STOPS

        # Otherwise ranks exchange a message after each step: does any stop?
        for method in (begin_batch, end_batch):
            setattr(method, NEVER_STOPS, True)
    return keras.callbacks.LambdaCallback(
        on_train_batch_begin=begin_batch,
        # If this is set, Keras waits for every step.
        on_train_batch_end=end_batch if waits else None,
    )


@contextlib.contextmanager
def keras_alone(work: Workload) -> Iterator[Train]:
    """Use no strategy."""
    yield fit(work, work.model.build())


@contextlib.contextmanager
def in_strategy(
    work: Workload, name: str, options: JsonObject
) -> Iterator[Train]:
    """Use one of this package's strategies, by name."""
    import keras_towers as kt

    if work.devices:
        options = {"towers": list(work.devices), **options}
    with kt.strategy(name, **options):
        yield fit(work, work.model.build(), whole=True)


def prepare_devices(device: str, towers: int) -> list[str]:
    """Set up the devices to train on, before TensorFlow initializes them."""
    import tensorflow as tf

    from keras_towers.transport.devices import virtual_towers

    if device == "gpu":
        return [f"/device:GPU:{index}" for index in range(towers)]
    tf.config.set_visible_devices([], "GPU")
    # With more threads, one device would use all cores, and the figures would
    # show parallel operations instead of parallel towers.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(max(4, towers))
    return virtual_towers(towers)


class Runs(StrEnum):
    """Where a row's replicas run."""

    ONE = "one device"
    DEVICES = "devices"
    RANKS = "processes"


@dataclass(frozen=True)
class Row:
    """One way to train.

    Attributes:
        name: its name on the command line.
        train: prepares the training of one process.
        note: its explanation below the table.
        runs: where its replicas run.
        backend: Keras's backend.
        engine: the module that connects its processes, unless TensorFlow does.
        servers: number of parameter servers.
        launch: more options of ``keras-towers run``.
        exact: whether its losses have to be those of one device.
        towers: the number of towers of each process, if it is an option.
        devices: prepares a number of devices of a kind, and returns their
            names.
    """

    name: str
    train: Callable[[Workload], AbstractContextManager[Train]]
    note: str = ""
    runs: Runs = Runs.DEVICES
    backend: str = "tensorflow"
    engine: str = ""
    servers: int = 0
    launch: tuple[str, ...] = ()
    exact: bool = True
    towers: int = 1
    devices: Callable[[str, int], list[str]] = prepare_devices

    @property
    def missing(self) -> str:
        """Why the row cannot be measured here; empty if it can.

        All rows need TensorFlow, which is not checked.
        """
        for module in {self.engine, self.backend} - {"", "tensorflow"}:
            if importlib.util.find_spec(module) is None:
                how = "keras-towers" if module in _BUILT else "pip"
                return (
                    f"{module} is not installed: run `{how} install {module}`"
                )
        return ""

    def launcher(self, processes: int) -> list[str]:
        """Options of ``keras-towers run`` that start the processes."""
        # On this machine, even inside an allocation of other hosts.
        here = ["-H", f"localhost:{processes}"]
        if self.engine:
            needs_servers = ENGINES[self.engine].servers
            servers = ["--servers", "1"] if needs_servers else []
            return ["-np", str(processes), *here, *servers]
        # Jobs with parameter servers are always here.
        where = ["--ps", str(self.servers)] if self.servers else here
        return [*where, *self.launch, "--workers", str(processes)]


def _registered(name: str, strategy: RegisteredStrategy) -> Row:
    """Create the row of one of this package's strategies."""
    return Row(
        name,
        partial(in_strategy, name=name, options={}),
        f"{strategy.kind}()",
        Runs.RANKS if strategy.engine else Runs.DEVICES,
        engine=name if name in _BUILT else "",
        servers=int(strategy.engine is SERVED),
        exact=name not in ("async", "noop", "distributed-parameter-server"),
    )


ROWS: dict[str, Row] = {
    "plain": Row("plain", keras_alone, "plain Keras", Runs.ONE),
    **{name: _registered(name, s) for name, s in STRATEGIES.items()},
}


def find_row(rows: Mapping[str, Row], name: str) -> Row:
    """Return a row by name, with options as ``tower:mode=host``, or raise."""
    known, options = parse(name)
    if known not in rows or (options and known not in STRATEGIES):
        raise TowerError(
            f"unknown strategy '{name}'; choose {', '.join(rows)}, or one of "
            "them with options, such as tower:mode=host"
            f"{did_you_mean(known, rows)}"
        )
    row = rows[known]
    if not options:
        return row
    # An option of the job, not of the strategy: sync-replicas:ps=2.
    servers = options.pop("ps", row.servers)
    check_options(known, options)
    train = partial(in_strategy, name=known, options=options)
    towers = options.get("towers")
    return replace(
        row,
        name=name,
        train=train,
        note="",
        servers=servers,
        towers=towers if isinstance(towers, int) else 1,
    )
