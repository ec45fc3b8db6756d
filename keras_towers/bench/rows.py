"""The rows of the benchmark, by name, in the order of the table."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import starmap

from keras_towers.bench import trainers
from keras_towers.bench.trainers import Trainer, Workload
from keras_towers.errors import TowerError
from keras_towers.strategies import STRATEGIES, Registered

_ENGINES = ("byteps", "horovod")


class Runs(StrEnum):
    """The place of a row's replicas."""

    ONE = "one device"
    DEVICES = "devices"
    RANKS = "processes"


@dataclass(frozen=True)
class Row:
    """One way to train."""

    name: str
    train: Callable[[Workload], AbstractContextManager[Trainer]]
    note: str = ""
    runs: Runs = Runs.DEVICES
    ours: bool = False
    stock: bool = False
    default: bool = True
    backend: str = "tensorflow"
    # The module that connects its processes, if not TensorFlow.
    engine: str = ""
    servers: int = 0
    # Whether its processes exchange nothing.
    alone: bool = False
    # Whether towers take their batches in bursts, so that only a mean over
    # several rounds is a meaningful rate.
    bursts: bool = False
    devices: Callable[[str, int], list[str]] = trainers.prepare_devices

    @property
    def missing(self) -> str:
        """Why the row cannot be measured here; empty if it can."""
        # Whether TensorFlow is there is asked for all rows.
        for module in {self.engine, self.backend} - {"", "tensorflow"}:
            if importlib.util.find_spec(module) is None:
                how = "keras-towers" if module in _ENGINES else "pip"
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
            byteps = self.engine == "byteps"
            return [*number, *(["--servers", "1"] if byteps else [])]
        servers = ["--ps", str(self.servers)] if self.servers else []
        alone = ["--no-strategy"] if self.alone else []
        return [*servers, *alone, "--workers", str(processes)]


def _stock(name: str, reduction: str = "") -> Row:
    train = partial(trainers.mirrored, reduction=reduction)
    note = f"MirroredStrategy{', ' * bool(reduction)}{reduction}"
    return Row(name, train, note, stock=True)


def _registered(name: str, strategy: Registered) -> Row:
    """Create the row of one of this package's strategies."""
    return Row(
        name,
        partial(trainers.in_strategy, name=name, options={}),
        f"{strategy.kind}()",
        Runs.DEVICES if strategy.one_process else Runs.RANKS,
        ours=True,
        default=name not in ("noop", "distributed-replicated"),
        engine=name if name in _ENGINES else "",
        servers=int("ps" in strategy.roles),
        # Every tower takes a whole batch.
        bursts=name == "async",
    )


ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        Row("plain", trainers.keras_alone, "plain Keras", Runs.ONE),
        _stock("stock-default"),
        _stock("stock-one-device", "ReductionToOneDevice"),
        _stock("stock-hierarchical", "HierarchicalCopyAllReduce"),
        Row(
            "compute",
            trainers.keras_alone,
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
    train = partial(trainers.in_strategy, name=known, options=options)
    return replace(row, name=name, train=train, note="", servers=servers)
