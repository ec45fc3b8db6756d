"""The rows of the benchmark: how each trains, in one of its processes."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from itertools import starmap
from typing import Any

from keras_towers.bench.models import Workload, Wrap
from keras_towers.engines import ENGINES
from keras_towers.errors import TowerError
from keras_towers.strategies import STRATEGIES, Registered

_BUILT = [e.strategy for e in ENGINES.values() if e.recipe]


@dataclass
class Times:
    """Moments of one training, in seconds."""

    batches: list[float] = field(default_factory=list)
    # And the end of training; none in custom loops, where epochs do nothing.
    epochs: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    first_step_s: float | None = None


@dataclass(frozen=True)
class Trainer:
    """One process of a row, ready to train.

    Attributes:
        train: trains so many steps per epoch and epochs; the last argument is
            whether every step waits for its loss.
        choice: the mode that the strategy has chosen, if it has any.
    """

    train: Callable[[int, int, bool], Times]
    choice: str | None = None


def fit(
    work: Workload, model: Any, choice: str | None = None, whole: bool = False
) -> Trainer:
    """Train with ``fit``, on whole global batches or this process's share."""
    import keras

    data = work.data if whole else work.part()
    batch = work.batch if whole else work.share

    def train(steps: int, epochs: int, waits: bool) -> Times:
        times = Times()
        model.fit(
            *keras.tree.map_structure(lambda a: a[: steps * batch], data),
            batch_size=batch,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=[_recorder(times, waits)],
        )
        return times

    return Trainer(train, choice)


def _recorder(times: Times, waits: bool) -> Any:
    """Create a callback that records one call of ``fit``."""
    import keras

    from keras_towers.fit.calls.callback_roles import NEVER_STOPS

    began = time.perf_counter()
    total = 0.0

    class Recorder(keras.callbacks.Callback):
        """Records when batches and epochs start."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            nonlocal total
            total = 0.0
            times.epochs.append(time.perf_counter())
            times.losses.clear()

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            # From start to start, with the handling of data and metrics.
            times.batches.append(time.perf_counter())

        # Ranks would send a message after each step, to agree to go on.
        setattr(on_train_batch_begin, NEVER_STOPS, True)

        def on_train_end(self, logs: Any = None) -> None:
            times.epochs.append(time.perf_counter())

    class WaitingRecorder(Recorder):
        """Reads each loss, too, for which Keras has to wait."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            nonlocal total
            # Keras gives the mean over the steps of the epoch so far.
            before, total = total, float((logs or {})["loss"]) * (batch + 1)
            times.losses.append(total - before)
            if times.first_step_s is None:
                times.first_step_s = time.perf_counter() - began

        setattr(on_train_batch_end, NEVER_STOPS, True)

    return WaitingRecorder() if waits else Recorder()


@contextlib.contextmanager
def keras_alone(work: Workload, wrap: Wrap | None = None) -> Iterator[Trainer]:
    """Use no strategy; the wrapped optimizer may exchange gradients."""
    yield fit(work, work.model.build(wrap))


@contextlib.contextmanager
def mirrored(work: Workload, reduction: str) -> Iterator[Trainer]:
    """Use ``MirroredStrategy``, with one of its cross-device operations."""
    import tensorflow as tf

    operations = getattr(tf.distribute, reduction)() if reduction else None
    strategy = tf.distribute.MirroredStrategy(work.devices, operations)
    with strategy.scope():
        model = work.model.build()
    yield fit(work, model)


@contextlib.contextmanager
def in_strategy(
    work: Workload, name: str, options: dict[str, Any]
) -> Iterator[Trainer]:
    """Use one of this package's strategies, by name."""
    import keras_towers as kt

    if not work.devices:
        with kt.strategy(name, **options):
            yield fit(work, work.model.build(), whole=True)
        return
    strategy = kt.strategy(name, towers=list(work.devices), **options)
    # The model is built outside of the block, as in the README.
    model = work.model.build()
    with strategy:
        yield fit(work, model, strategy.mode, whole=True)


def prepare_devices(device: str, towers: int) -> list[str]:
    """Set up the devices to train on, before TensorFlow initializes them."""
    import tensorflow as tf

    if device == "gpu":
        return [f"/device:GPU:{index}" for index in range(towers)]
    tf.config.set_visible_devices([], "GPU")
    # With more threads one device would use all cores, and the figures would be
    # those of parallel operations instead of the towers.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(max(4, towers))
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration() for _ in range(towers)],
    )
    return [f"/device:CPU:{index}" for index in range(towers)]


class Runs(StrEnum):
    """The place of a row's replicas."""

    ONE = "one device"
    DEVICES = "devices"
    RANKS = "processes"


@dataclass(frozen=True)
class Row:
    """One way to train.

    Attributes:
        name: its name on the command line.
        train: makes the trainer of one process.
        note: what stands below the table.
        runs: where its replicas are.
        ours: whether it is a strategy of this package.
        stock: whether it is a strategy of TensorFlow.
        default: whether it is measured where no row is named.
        backend: of Keras.
        engine: the module that connects its processes, if not TensorFlow.
        servers: number of parameter servers.
        alone: whether its processes exchange nothing.
        bursts: whether towers take their batches in bursts, so that only a mean
            over several rounds is a meaningful rate.
        devices: prepares as many devices of a kind, and returns their names.
    """

    name: str
    train: Callable[[Workload], AbstractContextManager[Trainer]]
    note: str = ""
    runs: Runs = Runs.DEVICES
    ours: bool = False
    stock: bool = False
    default: bool = True
    backend: str = "tensorflow"
    engine: str = ""
    servers: int = 0
    alone: bool = False
    bursts: bool = False
    devices: Callable[[str, int], list[str]] = prepare_devices

    @property
    def missing(self) -> str:
        """Why the row cannot be measured here; empty if it can.

        TensorFlow is needed for all rows, and not looked for.
        """
        for module in {self.engine, self.backend} - {"", "tensorflow"}:
            if importlib.util.find_spec(module) is None:
                how = "keras-towers" if module in _BUILT else "pip"
                return (
                    f"{module} is not installed: run `{how} install {module}`"
                )
        return ""

    @property
    def plain(self) -> str:
        """The name of the row of the same backend on one device."""
        return f"plain{self._backend}"

    @property
    def compute(self) -> str:
        """The name of the row of as many processes without an exchange."""
        return f"compute{self._backend}"

    @property
    def _backend(self) -> str:
        return "" if self.backend == "tensorflow" else f"-{self.backend}"

    def launcher(self, processes: int) -> list[str]:
        """Options of ``keras-towers run`` that start the processes."""
        if self.engine:
            # On this machine, also in an allocation of others.
            number = ["-np", str(processes), "-H", f"localhost:{processes}"]
            needs_servers = ENGINES[self.engine].servers
            return [*number, *(["--servers", "1"] if needs_servers else [])]
        servers = ["--ps", str(self.servers)] if self.servers else []
        alone = ["--no-strategy"] if self.alone else []
        return [*servers, *alone, "--workers", str(processes)]


def _stock(name: str, reduction: str = "") -> Row:
    train = partial(mirrored, reduction=reduction)
    note = "MirroredStrategy"
    if reduction:
        note += f", {reduction}"
    return Row(name, train, note, stock=True)


def _registered(name: str, strategy: Registered) -> Row:
    """Create the row of one of this package's strategies."""
    return Row(
        name,
        partial(in_strategy, name=name, options={}),
        f"{strategy.kind}()",
        Runs.DEVICES if strategy.one_process else Runs.RANKS,
        ours=True,
        default=name not in ("noop", "distributed-replicated"),
        engine=name if name in _BUILT else "",
        servers=int("ps" in strategy.roles),
        # Every tower takes a whole batch.
        bursts=name == "async",
    )


ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        Row("plain", keras_alone, "plain Keras", Runs.ONE),
        _stock("stock-default"),
        _stock("stock-one-device", "ReductionToOneDevice"),
        _stock("stock-hierarchical", "HierarchicalCopyAllReduce"),
        Row(
            "compute",
            keras_alone,
            "plain Keras in all processes at the same time, without exchange",
            Runs.RANKS,
            alone=True,
        ),
        *starmap(_registered, STRATEGIES.items()),
    )
}


def find(rows: Mapping[str, Row], name: str) -> Row:
    """Return a row by name, with options as in ``tower:mode=cpu``, or raise."""
    known, *texts = name.split(":")
    if known not in rows or (texts and known not in STRATEGIES):
        raise TowerError(
            f"unknown strategy '{name}'; choose {', '.join(rows)}, or one of "
            "them with options, such as tower:mode=cpu"
        )
    options = {}
    for text in texts:
        key, _, value = text.partition("=")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    if not options:
        return rows[known]
    row = rows[known]
    # Not of the strategy, but of the job, as in sync-replicas:ps=2.
    servers = options.pop("ps", row.servers)
    train = partial(in_strategy, name=known, options=options)
    return replace(row, name=name, train=train, note="", servers=servers)
