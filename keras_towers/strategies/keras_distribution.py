"""``keras.distribution`` on the TensorFlow backend.

Under a distribution models stay on the towers between calls, until another one
is set; after ``initialize()`` the devices of all ranks are listed.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import keras
import tensorflow as tf

from keras_towers import strategies
from keras_towers.fit import keras_patches
from keras_towers.fit.components import TRAINING
from keras_towers.fit.context import patches, thread_state
from keras_towers.fit.weights.model_binding import strategy_that_runs
from keras_towers.fit.weights.model_state import optimizers_in
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.notices import logger
from keras_towers.jobs import known_engines
from keras_towers.jobs.rendezvous import launchers, separate_training
from keras_towers.strategies.device_mesh import rows_of
from keras_towers.transport import (
    SingleProcess,
    Transport,
    devices as devices_lib,
)

if TYPE_CHECKING:
    from keras_towers.fit.options import Batches
    from keras_towers.strategies.base import BaseStrategy

# The processes that ``initialize`` has joined.
_job: Transport = SingleProcess()

_LAUNCH = "keras-towers run -np 2 script.py"

Distribution: TypeAlias = (
    "keras.distribution.DataParallel | keras.distribution.ModelParallel"
)


def _initialize(
    original: patches.Original,
    job_addresses: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Join the job that a launcher started; numbers given must match it."""
    global _job
    if launchers.detect() is None:
        if num_processes not in (None, 1):
            raise TowerError(
                f"keras.distribution.initialize() got num_processes="
                f"{num_processes}, but no launcher started this process. On "
                f"TensorFlow, the launcher connects processes: `{_LAUNCH}`."
            )
        logger.warning(
            "keras.distribution.initialize() found a single process, because "
            "no launcher started it: `%s` starts two.",
            _LAUNCH,
        )
        return
    horovod = known_engines.HOROVOD
    transport = horovod.load(horovod.transport)()
    for name, number, actual in (
        ("num_processes", num_processes, transport.size),
        ("process_id", process_id, transport.rank),
    ):
        if number not in (None, actual):
            raise TowerError(
                f"keras.distribution.initialize() got {name}={number}, but the "
                f"launcher made it {actual}: leave it out, and the environment "
                f"variable KERAS_DISTRIBUTION_{name.upper()} too."
            )
    devices_lib.share_machine(transport, 1)
    _job = transport


def _list_devices(
    original: patches.Original, device_type: str | None = None
) -> list[str]:
    """List the devices of all processes, such as ``"cpu:0"``."""
    local = original(device_type)
    if not local or _job.size == 1:
        return local
    kind = local[0].partition(":")[0]
    return [f"{kind}:{n}" for n in range(_per_rank(kind) * _job.size)]


def _distribute_tensor(
    original: patches.Original, tensor: tf.Tensor, layout: object
) -> tf.Tensor:
    """Return a tensor: its layout follows from those of weights."""
    return tensor


_BACKEND: dict[str, Callable[..., object]] = {
    "distribute_tensor": _distribute_tensor,
    "get_device_count": lambda original, device_type=None: len(
        keras.distribution.list_devices(device_type)
    ),
    "initialize": _initialize,
    "list_devices": _list_devices,
    "num_processes": lambda original: _job.size,
    "process_id": lambda original: _job.rank,
}
"""Functions that Keras's TensorFlow backend lacks, or limits to one process."""


def _strategy_of(distribution: Distribution) -> BaseStrategy:
    """Return the strategy of a distribution, created only once."""
    sharded = compat.auto_shards(distribution) or _job.size == 1
    batches: Batches = "split" if sharded else "each"
    strategy = _strategies.get(distribution)
    if strategy is None or strategy.batches != batches:
        strategy = _create_strategy(distribution, batches)
        strategy._announce()
        _strategies[distribution] = strategy
    return strategy


def _create_strategy(
    distribution: Distribution, batches: Batches
) -> BaseStrategy:
    names = [str(name) for name in distribution.device_mesh.devices.flatten()]
    if _job.size == 1:
        member = separate_training.member_of_job(certainly=True)
        if member is not None and isinstance(_job, SingleProcess):
            cause = "the processes are not connected"
            advice = "Call keras.distribution.initialize() first."
            raise TowerError(separate_training.describe(member, cause, advice))
        from keras_towers.strategies.model_parallel import ModelParallelStrategy
        from keras_towers.strategies.tower import TowerStrategy

        if isinstance(distribution, keras.distribution.ModelParallel):
            return ModelParallelStrategy(
                distribution._layout_map, distribution.batch_dim_name
            )
        return TowerStrategy(names)
    if isinstance(distribution, keras.distribution.ModelParallel):
        layouts = _layouts_of_rank(distribution)
        return strategies.strategy("horovod", batches=batches, layouts=layouts)
    devices = _devices_of_rank(names, _job.rank, _job.size)
    if batches == "each" and len(devices) > 1:
        raise TowerError(
            "auto_shard_dataset=False needs one device for each process, but "
            f"this process has {', '.join(devices)}: start a process for "
            "each device."
        )
    # Given a number, HorovodStrategy assigns GPUs by local rank.
    kind = "gpu" if tf.config.list_physical_devices("GPU") else "cpu"
    by_number = devices == [f"{kind}:0"]
    return strategies.strategy(
        "horovod",
        batches=batches,
        towers=1 if by_number else list[int | str](devices),
    )


def _devices_of_rank(names: list[str], rank: int, size: int) -> list[str]:
    """A rank's share of a job's devices, named as in its own process."""
    of_ranks = collections.defaultdict(list)
    for owner, local in map(_owner_of, names):
        of_ranks[owner].append(local)
    counts = {len(devices) for devices in of_ranks.values()}
    if sorted(of_ranks) != list(range(size)) or len(counts) > 1:
        raise TowerError(
            f"DataParallel has the devices {', '.join(names)}, but each of the "
            f"{size} processes needs one, or the same number of them. Create "
            "it after keras.distribution.initialize(), and give devices from "
            "keras.distribution.list_devices(), or none for all."
        )
    return of_ranks[rank]


def _layouts_of_rank(
    distribution: keras.distribution.ModelParallel,
) -> keras.distribution.LayoutMap:
    """Return the layout map on this rank's rows of a mesh of all devices."""
    layout_map = distribution._layout_map
    rows, axes = rows_of(layout_map.device_mesh, distribution.batch_dim_name)
    owned = [[_owner_of(name) for name in row] for row in rows]
    owners = [{owner for owner, _ in row} for row in owned]
    number = len(rows) // _job.size
    # Examples are numbered in the order of ranks.
    if owners != [{k // number} for k in range(number * _job.size)]:
        raise TowerError(
            f"ModelParallel has a mesh of {len(rows)} x {len(rows[0])} "
            f"devices, which {_job.size} processes cannot share: each process "
            "needs the same number of towers, and all devices of these, in the "
            "order of keras.distribution.list_devices(), because the devices "
            "of a tower exchange within a process. Create the mesh after "
            "keras.distribution.initialize()."
        )
    own = [row for row in owned if row[0][0] == _job.rank]
    shape = [len(own), len(own[0])][: len(axes)]
    names = [name for row in own for _, name in row]
    mesh = keras.distribution.DeviceMesh(shape, axes, names)
    layouts = keras.distribution.LayoutMap(mesh)
    for key, layout in layout_map.items():
        layouts[key] = tuple(layout.axes)
    return layouts


def _owner_of(name: str) -> tuple[int, str]:
    """The rank of a device of the job, and its name there."""
    try:
        *_, kind, index = devices_lib.canonical(f"/{name.lstrip('/')}")
    except ValueError:
        raise TowerError(
            f"there is no device {name!r}: keras.distribution.list_devices"
            "() lists them."
        ) from None
    kind = str(kind).lower()
    owner, local = divmod(index, _per_rank(kind))
    return owner, f"{kind}:{local}"


def _per_rank(kind: str) -> int:
    """The number of devices per process; launchers assign one GPU each."""
    if kind == "gpu":
        return 1
    return max(1, len(tf.config.list_logical_devices(kind.upper())))


_connected: contextlib.ExitStack | None = None
_strategies: weakref.WeakKeyDictionary[Distribution, BaseStrategy] = (
    weakref.WeakKeyDictionary()
)


class _ThreadState(threading.local):
    """The state of a thread; Keras keeps its distribution per thread, too."""

    strategy: BaseStrategy | None = None
    patched: contextlib.ExitStack | None = None
    running = False

    def __init__(self) -> None:
        # Tells other threads of this one's distribution.
        self.block = contextlib.ExitStack()


_thread = _ThreadState()


def connect() -> None:
    """Connect ``keras.distribution`` to towers, after Keras's import."""
    global _connected
    if _connected is None:
        _connected = keras_patches.patch_until_closed(
            _around_call, _around_creation, _set_distribution, _BACKEND
        )


def disconnect() -> None:
    """Undo ``connect``; models on towers become ordinary ones."""
    global _connected
    _move_models_to(None)
    if _connected is not None:
        _connected.close()
    _connected = None


@contextlib.contextmanager
def _around_call(kind: str, model: keras.Model) -> Iterator[None]:
    """Run a call of a model's method under this thread's distribution."""
    distribution = keras.distribution.distribution()
    placed = strategy_that_runs(model, kind) or tf.distribute.has_strategy()
    if kind in TRAINING:
        for optimizer in optimizers_in(getattr(model, "optimizer", None)):
            known_engines.refuse_own_optimizer(optimizer)
        if not placed and not distribution:
            modules = [e.module for e in known_engines.ENGINES.values()]
            separate_training.check_permitted(kind, model.name, modules)
    # A nested call, such as evaluate() inside fit().
    if _thread.running:
        yield
        return
    if distribution is None:
        # Also clear_session() drops a distribution.
        _move_models_to(None)
        yield
        return
    _check_kind(distribution)
    if tf.distribute.has_strategy():
        current = tf.distribute.get_strategy()
        raise TowerError(
            f"a model would train under {type(distribution).__name__} of "
            "keras.distribution and, at the same time, in the scope of "
            f"{type(current).__name__}: leave that scope, or end the "
            "distribution with keras.distribution.set_distribution(None)."
        )
    strategy = _strategy_of(distribution)
    _move_models_to(strategy)
    # Keep Keras from splitting the data over processes: some versions ask only
    # one of these.
    whole = patches.shadowed(
        distribution, {"_is_multi_process": False, "_auto_shard_dataset": False}
    )
    _thread.running = True
    try:
        with whole, strategy.scope():
            yield
    finally:
        _thread.running = False


@contextlib.contextmanager
def _around_creation(variable: keras.Variable) -> Iterator[None]:
    """Divide a weight when it is made, as a strategy does in its block.

    A device may be too small for the model until its first call.
    """
    distribution = keras.distribution.distribution()
    if _thread.running or not isinstance(
        distribution, keras.distribution.ModelParallel
    ):
        yield
        return
    strategy = _strategy_of(distribution)
    if not strategy._update.sharding.divide_new(variable):
        yield
        return
    _move_models_to(strategy)
    with strategy.scope(), strategy._adoption.registering_variable(variable):
        yield


def _set_distribution(
    store: Callable[[], None], distribution: Distribution | None
) -> None:
    """Store a distribution; models of the previous one leave its towers."""
    if distribution is not None:
        _check_kind(distribution)
    if (
        _thread.running
        and distribution is not keras.distribution.distribution()
    ):
        raise TowerError(
            "the distribution was changed while a model trains: change it "
            "before or after the call of fit()."
        )
    store()
    _thread.block.close()
    if distribution is not None:
        _thread.block.enter_context(keras_patches.installed())
    if distribution is not None and distribution.device_mesh.devices.size > 1:
        # clear_session() drops the distributions of all threads.
        kept = compat.global_state.GLOBAL_STATE_TRACKER
        block = thread_state.OpenBlock(
            f"the distribution {type(distribution).__name__} was set",
            "Set it",
            lambda: compat.global_state.GLOBAL_STATE_TRACKER is kept,
        )
        _thread.block.enter_context(thread_state.entered_block(block))
    # Models go to a new strategy when they are called.
    known = None if distribution is None else _strategies.get(distribution)
    _move_models_to(known)


def _move_models_to(strategy: BaseStrategy | None) -> None:
    """Turn models on this thread's last strategy into ordinary ones."""
    last = _thread.strategy
    if last is strategy:
        return
    _thread.strategy = None
    if last is not None:
        assert _thread.patched is not None
        with _thread.patched:
            # After an error, ranks do not wait for one another.
            last.__exit__(*sys.exc_info())
    if strategy is not None:
        _thread.patched = contextlib.ExitStack()
        _thread.patched.enter_context(keras_patches.installed())
        _thread.strategy = strategy
        strategy._adoption.in_block = True


def _check_kind(distribution: object) -> None:
    known = keras.distribution.DataParallel, keras.distribution.ModelParallel
    if not isinstance(distribution, known):
        raise TowerError(
            f"{type(distribution).__name__} is not available on TensorFlow: "
            "use DataParallel or ModelParallel of keras.distribution, or "
            "another backend of Keras."
        )
