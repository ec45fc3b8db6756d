"""The processes and devices of ``keras.distribution`` on TensorFlow.

``keras.distribution.initialize()`` joins the job that a launcher started. Its
devices are then those of all ranks, numbered as on Keras's other backends: rank
0's first.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_towers import devices as devices_lib
from keras_towers.errors import TowerError

if TYPE_CHECKING:
    from keras_towers.fit.contract import Batches
    from keras_towers.strategies.base import BaseStrategy
    from keras_towers.transport import horovod

logger: logging.Logger = logging.getLogger("keras_towers")

_job: horovod.HorovodTransport | None = None

_LAUNCH = "keras-towers run -np 2 script.py"


def _initialize(
    original: Any,
    job_addresses: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Join the job that a launcher started; the numbers have to be its own."""
    global _job
    from keras_towers.transport import horovod

    if not horovod.was_launched():
        if num_processes not in (None, 1):
            raise TowerError(
                f"keras.distribution.initialize() got num_processes="
                f"{num_processes}, but no launcher started this process. On "
                f"TensorFlow the launcher connects them: `{_LAUNCH}`."
            )
        logger.warning(
            "keras.distribution.initialize() found a single process, because "
            f"no launcher started it: `{_LAUNCH}` starts two."
        )
        return
    from keras_towers.strategies.ranks import share_machine

    transport = horovod.HorovodTransport()
    for name, given, actual in (
        ("num_processes", num_processes, transport.size),
        ("process_id", process_id, transport.rank),
    ):
        if given not in (None, actual):
            raise TowerError(
                f"keras.distribution.initialize() got {name}={given}, but the "
                f"launcher made it {actual}: leave it out, and the environment "
                f"variable KERAS_DISTRIBUTION_{name.upper()} too."
            )
    share_machine(transport, 1)
    _job = transport


def _num_processes(original: Any = None) -> int:
    return 1 if _job is None else _job.size


def _process_id(original: Any = None) -> int:
    return 0 if _job is None else _job.rank


def _list_devices(
    original: Callable[..., list[str]], device_type: str | None = None
) -> list[str]:
    """List the devices of all processes, such as ``"cpu:0"``."""
    own = original(device_type)
    if not own or _job is None or _job.size == 1:
        return own
    kind = own[0].partition(":")[0]
    return [
        f"{kind}:{index}" for index in range(_per_rank(kind) * _num_processes())
    ]


def _device_count(original: Any, device_type: str | None = None) -> int:
    return len(keras.distribution.list_devices(device_type))


BACKEND: dict[str, Callable[..., Any]] = {
    "get_device_count": _device_count,
    "initialize": _initialize,
    "list_devices": _list_devices,
    "num_processes": _num_processes,
    "process_id": _process_id,
}
"""What Keras's TensorFlow backend lacks, or knows of one process only."""


def batches_of(distribution: Any) -> Batches:
    """How a ``DataParallel`` wants its batches distributed over processes."""
    if distribution.auto_shard_dataset or _num_processes() == 1:
        return "split"
    return "each"


def strategy_for(distribution: Any, batches: Batches) -> BaseStrategy:
    """Create the strategy that trains on the devices of a ``DataParallel``."""
    names = [str(name) for name in distribution.device_mesh.devices.flatten()]
    if _job is None or _job.size == 1:
        _refuse_unjoined()
        from keras_towers.strategies.tower import TowerStrategy

        return TowerStrategy(names)
    from keras_towers.strategies.horovod import HorovodStrategy

    own = _own(names, _job.rank, _job.size)
    if batches == "each" and len(own) > 1:
        raise TowerError(
            f"auto_shard_dataset=False needs one device for each process, but "
            f"{', '.join(own)} are this one's: start a process for each device."
        )
    # By number Horovod's own rule holds, which assigns GPUs by local rank.
    kind = "gpu" if tf.config.list_physical_devices("GPU") else "cpu"
    by_number = own == [f"{kind}:0"]
    return HorovodStrategy(
        batches=batches, towers=1 if by_number else list[int | str](own)
    )


def _own(names: list[str], rank: int, size: int) -> list[str]:
    """This rank's part of a job's devices, by their names in this process."""
    found = collections.defaultdict(list)
    for name in names:
        try:
            *_, kind, index = devices_lib.canonical(f"/{name.lstrip('/')}")
        except ValueError:
            raise TowerError(
                f"there is no device {name!r}: keras.distribution.list_devices"
                "() lists them."
            ) from None
        kind = str(kind).lower()
        owner, local = divmod(index, _per_rank(kind))
        found[owner].append(f"{kind}:{local}")
    if sorted(found) != list(range(size)) or (
        len({len(own) for own in found.values()}) > 1
    ):
        raise TowerError(
            f"DataParallel has the devices {', '.join(names)}, but each of the "
            f"{size} processes needs one, or the same number of them. Create "
            "it after keras.distribution.initialize(), and give devices from "
            "keras.distribution.list_devices(), or none for all."
        )
    return found[rank]


def _per_rank(kind: str) -> int:
    """The number of devices of a process; of GPUs, a launcher gives one."""
    if kind == "gpu":
        return 1
    return max(1, len(tf.config.list_logical_devices(kind.upper())))


def _refuse_unjoined() -> None:
    """Keep each process of a job from training a model of its own."""
    from keras_towers.meeting import environments

    member = environments.detect()
    # One of an unknown number may be meant to train by itself.
    if member is None or member.size in (None, 1) or _job is not None:
        return
    raise TowerError(
        f"a launcher started this process as one of several ({member}), which "
        "would each train a model of its own: call "
        f"keras.distribution.initialize() first. {environments.HOW_TO_BE_ALONE}"
    )
