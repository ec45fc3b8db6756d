"""The rows of the benchmark, by name, in the order of the tables.

To add a row, add an entry here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from keras_towers.bench import multi_worker, trainers
from keras_towers.bench.torch_loop import torch_loop
from keras_towers.bench.trainers import Trainer, Workload

if TYPE_CHECKING:
    from keras_towers.reduction.compression import CompressionName

# The values of TowerStrategy's ``mode`` and HorovodStrategy's ``compression``,
# repeated here because the modules that define them import TensorFlow.
MODES = ("cpu", "gpu", "hierarchical", "collective", "nccl")
COMPRESSIONS: tuple[CompressionName, ...] = (
    "none",
    "fp16",
    "fp16-shards",
    "bf16",
    "fp16-feedback",
    "bf16-feedback",
)
RAW = "horovod-raw"
# Strategies over parameter servers.
SERVED = {
    "sync-replicas": "SyncReplicasStrategy",
    "distributed-parameter-server": "DistributedParameterServerStrategy",
}


@dataclass(frozen=True)
class Row:
    """One way to train.

    Attributes:
        name: its name in options and tables.
        train: prepares one process for training.
        note: a description for the reader of the table.
        ours: whether it belongs to this package.
        stock: whether it is one of TensorFlow's own.
        default: whether it is measured by default.
        needs: the module that must be installed for it.
        alone: the row in which the same processes exchange nothing, relative to
            which communication overhead is measured; None: this row exchanges
            nothing.
        servers: number of parameter servers beside the processes.
        bursts: whether towers take their batches in bursts, so that only a
            mean over several rounds is a meaningful rate.
        strategy: creates the strategy on given devices, if adoption can be
            timed.
        launcher: more options of the launcher of its processes.
    """

    name: str
    train: Callable[[Workload], AbstractContextManager[Trainer]]
    note: str = ""
    ours: bool = False
    stock: bool = False
    default: bool = True
    needs: str | None = None
    alone: str | None = None
    servers: int = 0
    bursts: bool = False
    strategy: Callable[[Sequence[str]], Any] | None = None
    launcher: tuple[str, ...] = ()


def _strategy(name: str, devices: Sequence[str], **options: Any) -> Any:
    import keras_towers as kt

    return kt.strategy(name, towers=list(devices), **options)


def _towers(name: str, registered: str, mode: str = "", **more: Any) -> Row:
    """Create the row of one of this package's strategies."""
    options = {"mode": mode} if mode else {}
    strategy = partial(_strategy, registered, **options)
    train = partial(trainers.towers, make=strategy)
    return Row(name, train, ours=True, strategy=strategy, **more)


def _stock(name: str, reduction: str | None = None) -> Row:
    train = partial(trainers.mirrored, reduction=reduction)
    return Row(name, train, stock=True)


def _ranks(name: str, train: Callable[..., Any], **more: Any) -> Row:
    """Create the row of Keras in processes that exchange gradients."""
    return Row(name, train, alone="compute", **more)


_TOWERS = (
    Row("plain", trainers.keras_alone),
    _stock("stock-default"),
    _stock("stock-one-device", "ReductionToOneDevice"),
    _stock("stock-hierarchical", "HierarchicalCopyAllReduce"),
    _towers("towers", "tower"),
    *(
        _towers(f"towers-{mode}", "tower", mode, default=False)
        for mode in MODES
    ),
    _towers("parameter-server", "parameter-server"),
    _towers(
        "async",
        "async",
        bursts=True,
        note="a step is the mean over several rounds of its towers",
    ),
)
_PROCESSES = (
    Row(
        "compute",
        trainers.keras_alone,
        "plain Keras in all processes at the same time, without exchange",
    ),
    _ranks(
        RAW,
        partial(trainers.keras_alone, wrap=trainers.averaging),
        note="hvd.grouped_allreduce in the optimizer's apply, by hand",
    ),
    _ranks(
        "horovod-drop-in",
        partial(trainers.keras_alone, wrap=trainers.drop_in),
        note="keras_towers.horovod.DistributedOptimizer",
        ours=True,
    ),
    _ranks(
        "strategy",
        trainers.horovod_strategy,
        note="HorovodStrategy(); strategy-NAME: with compression=NAME",
        ours=True,
    ),
    *(
        _ranks(
            f"strategy-{name}",
            partial(trainers.horovod_strategy, compression=name),
            ours=True,
        )
        for name in COMPRESSIONS
    ),
    _ranks(
        "sharded",
        partial(trainers.horovod_strategy, updates="sharded"),
        note='HorovodStrategy(updates="sharded")',
        ours=True,
    ),
    _ranks(
        "byteps",
        trainers.byteps_strategy,
        note="BytePSStrategy() with one server, on the same cores",
        ours=True,
        needs="byteps",
        launcher=("--servers", "1"),
    ),
    _ranks(
        "multi-worker",
        multi_worker.strategy,
        note="MultiWorkerTowerStrategy(); multi-worker-ring: with "
        'compression="none", as between machines',
        ours=True,
    ),
    _ranks(
        "multi-worker-ring",
        partial(multi_worker.strategy, compression="none"),
        ours=True,
    ),
    *(
        _ranks(
            f"{name}-{servers}ps",
            partial(trainers.served, name=name),
            note=f"{cls}() with {servers} parameter server"
            f"{'s' * (servers > 1)}",
            ours=True,
            servers=servers,
            default=servers == 1,
        )
        for name, cls in SERVED.items()
        for servers in (1, 2)
    ),
    _ranks(
        "stock-loop",
        multi_worker.ring_loop,
        note="MultiWorkerMirroredStrategy's ring in the training loop of "
        "TensorFlow's guide, because fit crashes under it on Keras 3",
    ),
    Row("torch-compute", partial(torch_loop, exchanges=False), needs="torch"),
    Row(
        "torch-ddp",
        partial(torch_loop, exchanges=True),
        "DistributedDataParallel on gloo in a loop; its cost is relative to "
        "torch-compute, the same loop in every process without exchange",
        needs="torch",
        alone="torch-compute",
    ),
)


@dataclass(frozen=True)
class Suite:
    """Rows that are compared with each other, with any number of replicas.

    Attributes:
        kind: the kind of its cells.
        replica: the word for one replica.
        replicas: the word for several, and the option for their numbers.
        least: the smallest allowed number of replicas.
        models: the models that are trained by default.
        row_key: the JSON key of the row's name.
        choice_key: the JSON key of the choice that a row made.
        columns: the columns of its results, from those ``results`` computes.
        rows: the rows by name, in the order of the tables.
    """

    kind: str
    replica: str
    replicas: str
    least: int
    models: tuple[str, ...]
    row_key: str
    choice_key: str
    columns: tuple[str, ...]
    rows: dict[str, Row]

    def default_rows(self) -> list[str]:
        """Return the names of the rows measured by default."""
        return [
            row.name
            for row in self.rows.values()
            if row.default
            and (row.needs is None or importlib.util.find_spec(row.needs))
        ]


_RATIOS = ("to_plain", "to_stock_default", "to_best_stock", "best_stock")
_OVER = ("", "_to_plain", "_to_best_stock")
_START = ("first_step_s", "memory_mb")
TOWERS = Suite(
    kind="training",
    replica="tower",
    replicas="towers",
    least=1,
    models=("small", "large", "cnn"),
    row_key="strategy",
    choice_key="mode",
    columns=(
        *("step_ms", *_RATIOS, "epoch_cost_s"),
        *(f"{name}{of}" for name in _START for of in _OVER),
    ),
    rows={row.name: row for row in _TOWERS},
)
PROCESSES = Suite(
    kind="processes",
    replica="process",
    replicas="processes",
    least=2,
    models=("large",),
    row_key="row",
    choice_key="how",
    columns=("step_ms", "cost_ms", "to_raw", "epoch_cost_s", *_START),
    rows={row.name: row for row in _PROCESSES},
)
SUITES = {suite.kind: suite for suite in (TOWERS, PROCESSES)}
