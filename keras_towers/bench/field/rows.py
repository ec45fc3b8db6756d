"""The rows of the field, by name, in the order of the tables.

To add a row, add an entry here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from keras_towers.bench import multi_worker, trainers
from keras_towers.bench.field import rivals
from keras_towers.bench.rows import TOWERS
from keras_towers.bench.trainers import Trainer, Workload

_EXTRA = "pip install 'keras-towers[field]'"
# How to install what is optional.
_INSTALL = {
    "torch": _EXTRA,
    "jax": _EXTRA,
    "horovod": "keras-towers install horovod",
}


class Runs(StrEnum):
    """Where the replicas of a row are.

    Attributes:
        ONE: there is one, on one device.
        DEVICES: in one process, each on a device.
        RANKS: in processes of their own.
    """

    ONE = "one device"
    DEVICES = "devices"
    RANKS = "processes"


@dataclass(frozen=True)
class FieldRow:
    """One way to train in the field.

    Attributes:
        name: its name in options and tables.
        train: prepares one process for training.
        note: a description for the reader of the table.
        runs: where its replicas are.
        backend: the backend of Keras.
        ours: whether it belongs to this package.
        horovod: whether Horovod's launcher starts its processes.
        listed: whether it is a row of the table; others are only what the
            steps of listed ones are divided by.
    """

    name: str
    train: Callable[[Workload], AbstractContextManager[Trainer]]
    note: str
    runs: Runs = Runs.DEVICES
    backend: str = "tensorflow"
    ours: bool = False
    horovod: bool = False
    listed: bool = True

    @property
    def missing(self) -> str:
        """What is not installed and how to install it, or nothing."""
        needs = [self.backend] if self.backend in _INSTALL else []
        for module in [*needs, *["horovod"] * self.horovod]:
            if importlib.util.find_spec(module) is None:
                return f"{module} is not installed: run `{_INSTALL[module]}`"
        return ""

    @property
    def single(self) -> str:
        """The row of the same backend on one device."""
        return f"keras-{self.backend}"

    @property
    def compute(self) -> str:
        """The row of as many processes that exchange nothing."""
        return f"compute-{self.backend}"


BACKENDS = ("tensorflow", "torch", "jax")
REFERENCE = "keras-tensorflow"


def _known(name: str, note: str) -> FieldRow:
    """Create a row as in the benchmark of towers."""
    row = TOWERS.rows[name]
    return FieldRow(name, row.train, note, ours=row.ours)


def _horovod(
    name: str,
    note: str,
    train: Callable[[Workload], AbstractContextManager[Trainer]],
    ours: bool = True,
) -> FieldRow:
    return FieldRow(name, train, note, Runs.RANKS, ours=ours, horovod=True)


_ROWS = (
    *(
        FieldRow(
            f"keras-{backend}",
            trainers.keras_alone,
            "one device" + ", the reference" * (backend == "tensorflow"),
            Runs.ONE,
            backend,
        )
        for backend in BACKENDS
    ),
    _known("stock-default", "MirroredStrategy"),
    _known("stock-one-device", "MirroredStrategy, ReductionToOneDevice"),
    _known("stock-hierarchical", "MirroredStrategy, HierarchicalCopyAllReduce"),
    FieldRow(
        "stock-loop",
        multi_worker.ring_loop,
        "MultiWorkerMirroredStrategy in the loop of TensorFlow's guide, "
        "without metrics and callbacks",
        Runs.RANKS,
    ),
    FieldRow(
        "jax-data-parallel",
        rivals.jax_data_parallel,
        "keras.distribution.DataParallel on JAX",
        backend="jax",
    ),
    FieldRow(
        "torch-ddp",
        rivals.torch_ddp,
        "Keras on PyTorch in DistributedDataParallel, in a loop without "
        "metrics and callbacks, over tensors",
        Runs.RANKS,
        "torch",
    ),
    _horovod(
        "horovod-raw",
        "hvd.grouped_allreduce by hand",
        partial(trainers.keras_alone, wrap=trainers.averaging),
        ours=False,
    ),
    _horovod(
        "horovod-drop-in",
        "keras_towers.horovod.DistributedOptimizer",
        partial(trainers.keras_alone, wrap=trainers.drop_in),
    ),
    _horovod(
        "horovod-strategy", "HorovodStrategy()", trainers.horovod_strategy
    ),
    FieldRow(
        "multi-worker",
        multi_worker.strategy,
        "MultiWorkerTowerStrategy()",
        Runs.RANKS,
        ours=True,
    ),
    _known("towers", "TowerStrategy()"),
    *(
        FieldRow(
            f"compute-{backend}",
            trainers.keras_alone,
            "processes that exchange nothing",
            Runs.RANKS,
            backend,
            listed=False,
        )
        for backend in BACKENDS
    ),
)
ROWS = {row.name: row for row in _ROWS}
LISTED = [row.name for row in _ROWS if row.listed]


def with_divisors(names: Collection[str]) -> list[FieldRow]:
    """Return rows in order, with those that their figures are relative to."""
    wanted = {*names, REFERENCE}
    for name in names:
        row = ROWS[name]
        wanted.add(row.single)
        if row.runs is not Runs.ONE:
            wanted.add(row.compute)
    return [row for row in _ROWS if row.name in wanted]


def split(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Split rows into those that can run, and why the others cannot."""
    missing = {name: ROWS[name].missing for name in names}
    able = [name for name, why in missing.items() if not why]
    return able, {name: why for name, why in missing.items() if why}
