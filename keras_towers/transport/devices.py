"""The devices of the towers, and a rank's share of its machine."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Iterable
from typing import Any, TypeAlias

import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.foundation.byte_sizes import parse_bytes
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.settings import ENV_DEVICE_MEMORY, ENV_OWN_GPUS
from keras_towers.foundation.system import usable_cores
from keras_towers.jobs.rendezvous.tf_config import Cluster
from keras_towers.transport import Transport


def virtual_towers(towers: int, memory_limit: int | None = None) -> list[str]:
    """Split the CPU, or the first GPU, into logical devices for testing.

    Call it before TensorFlow initializes its devices: before the first tensor,
    variable or model. The logical devices share the hardware, so this shows
    whether a script works on several towers, not how fast it would be on
    separate devices.

    Args:
        towers: number of logical devices, at least 1.
        memory_limit: MiB of GPU memory per logical device; required to split a
            GPU instead of the CPU.

    Returns:
        The names of the devices. Strategies use them by default, even if there
        are GPUs.

    Raises:
        TowerError: ``towers`` is not a positive whole number, or TensorFlow
            has already started with fewer devices.

    Example:
        >>> import keras_towers as kt
        >>> kt.virtual_towers(4)
        ['/device:CPU:0', '/device:CPU:1', '/device:CPU:2', '/device:CPU:3']
    """
    number = as_whole_number(towers)
    if number is None or number < 1:
        raise TowerError(
            f"virtual_towers got {towers!r}: give a whole number, 1 or more."
        )
    kind = "CPU"
    if memory_limit is not None and tf.config.list_physical_devices("GPU"):
        kind = "GPU"
    wanted = tf.config.LogicalDeviceConfiguration(
        memory_limit=memory_limit if kind == "GPU" else None
    )
    physical = tf.config.list_physical_devices(kind)[0]
    try:
        tf.config.set_logical_device_configuration(physical, [wanted] * number)
    except RuntimeError:
        have = len(_local_names(kind))
        if have < number:
            raise TowerError(
                f"virtual_towers({number}) was called too late: TensorFlow has "
                f"started with {have} {kind} device(s). Call it before the "
                "first tensor, variable or model is created, or give "
                f"`keras-towers run` --towers {number}."
            ) from None
    _made[:] = [f"/device:{kind}:{index}" for index in range(number)]
    return [*_made]


# The last result of virtual_towers().
_made: list[str] = []


Towers: TypeAlias = (
    int | list[int] | list[str] | list[int | str] | tuple[int | str, ...]
)
"""A number of devices, GPU ids or device names. A string is none of these."""


def devices_of(towers: Towers | None) -> list[str]:
    """Convert a user's ``towers`` to names like ``"/device:GPU:0"``."""
    gpus, cpus = _local_names("GPU"), _local_names("CPU")
    split_cpu = bool(_made) and all_on_host(_made)
    visible = cpus if split_cpu else gpus or cpus
    if towers is None:
        return visible[: len(_made) or None]
    number = as_whole_number(towers)
    if number is not None:
        if not 1 <= number <= len(visible):
            several = f"1 to {len(visible)}, or None for all"
            raise TowerError(
                f"towers={number} is not allowed: the visible devices are "
                f"{', '.join(visible)}. Give {several if visible[1:] else 1}, "
                "or call keras_towers.virtual_towers(n) before anything else "
                "to split the CPU for testing."
            )
        return visible[:number]
    if not isinstance(towers, (list, tuple)) or not towers:
        raise TowerError(
            f"towers={towers!r} is not allowed: give a number of towers, a "
            "list of GPU ids or device names, or None for all devices."
        )
    names = [_name(tower, gpus, cpus) for tower in towers]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise TowerError(
            f"towers={towers!r} names {', '.join(repeated)} more than once: "
            "every tower needs its own device."
        )
    return names


def _local_names(kind: str) -> list[str]:
    """Return the names of this process's logical devices of a kind."""
    names = [d.name for d in tf.config.list_logical_devices(kind)]
    # A worker's list also contains the devices of its parameter servers.
    return [n for n in names if tf.DeviceSpec.from_string(n).job != "ps"]


def as_whole_number(value: Any) -> int | None:
    """Convert a whole number of any type to ``int``; None otherwise."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _name(tower: int | str, gpus: list[str], cpus: list[str]) -> str:
    known = [*gpus, *cpus]
    number = as_whole_number(tower)
    if number is not None:
        wanted = f"/device:GPU:{number}"
    else:
        # Also "gpu:1" and "/gpu:1" are "/device:GPU:1".
        wanted = f"/{str(tower).removeprefix('/')}"
    for name in known:
        # In a cluster, names contain this process's task.
        spec = tf.DeviceSpec.from_string(name)
        task = spec.replace(device_type=None, device_index=None)
        with contextlib.suppress(ValueError):
            if canonical(wanted, task) == canonical(name):
                return name
    hint = ""
    if number is not None and not gpus:
        hint = " Numbers are GPU ids, and no GPU is visible."
    raise TowerError(
        f"there is no device {tower!r}. Visible: {', '.join(known)}.{hint}"
    )


def canonical(
    name: str, task: tf.DeviceSpec | None = None
) -> tuple[str, int, int, str | None, int]:
    """Parse a device's name: job, replica, task, type, index; or ValueError.

    Args:
        name: the name, which may lack some of these.
        task: replaces the parts that the name lacks.
    """
    spec = tf.DeviceSpec.from_string(name)
    if task is not None:
        spec = task.make_merged_spec(spec)
    return (
        spec.job or "localhost",
        spec.replica or 0,
        spec.task or 0,
        spec.device_type,
        spec.device_index or 0,
    )


def memory_of(devices: Iterable[str]) -> list[int | None]:
    """Return the bytes of memory of each device; None if unknown.

    ``KERAS_TOWERS_DEVICE_MEMORY`` gives them; otherwise, for a GPU, they are
    the bytes that TensorFlow may allocate.
    """
    given = os.environ.get(ENV_DEVICE_MEMORY, "")
    names = [*devices]
    if given:
        size = parse_bytes(f"{ENV_DEVICE_MEMORY}={given}", given)
        return [size or None for _ in names]
    if all_on_host(names):
        # It is shared, and what TensorFlow reports of it is not a limit.
        return [None for _ in names]
    memory = compat.memory_of_devices()
    return [memory.get(short_name(n)) if "GPU" in n else None for n in names]


def all_on_host(devices: Iterable[str]) -> bool:
    """Whether all devices are CPUs, which share the host's memory."""
    return all("CPU" in device.upper() for device in devices)


def short_name(device: str) -> str:
    """Return the name of a device without job and task."""
    return device[device.index("/device") :] if "/device" in device else device


def host_of(device: str) -> str:
    """Return the first CPU of the machine that a device belongs to."""
    spec = tf.DeviceSpec.from_string(device)
    return spec.replace(device_type="CPU", device_index=0).to_string()


def same_device(one: str, other: str) -> bool:
    """Whether two device names have an index and agree in all common parts."""
    a, b = (tf.DeviceSpec.from_string(name) for name in (one, other))
    if None in (a.device_index, b.device_index):
        return False
    return a.make_merged_spec(b) == b.make_merged_spec(a)


def share_machine(place: Transport | Cluster, towers: Towers) -> Towers:
    """Claim this rank's share of cores and GPUs; return its devices.

    A number of towers is assigned by local rank, unless the launcher shows each
    rank its own GPUs. Other GPUs are hidden from TensorFlow.
    """
    if place.local_size > 1 and "TF_NUM_INTRAOP_THREADS" not in os.environ:
        threads = tf.config.threading
        # Fails once TensorFlow has started; the launcher sets it earlier.
        with contextlib.suppress(RuntimeError):
            if threads.get_intra_op_parallelism_threads() == 0:
                threads.set_intra_op_parallelism_threads(
                    max(1, usable_cores() // place.local_size)
                )
    gpus = tf.config.list_physical_devices("GPU")
    if not isinstance(towers, int) or not gpus:
        return towers
    shows_own = os.environ.get(ENV_OWN_GPUS)
    first = 0 if shows_own else place.local_rank * towers
    if first + towers > len(gpus):
        raise TowerError(
            f"rank {place.rank} has local rank {place.local_rank} and "
            f"needs {towers} GPU(s), but its machine has only {len(gpus)}: "
            f"start at most {len(gpus) // towers} processes there."
        )
    share = gpus[first : first + towers]
    # If TensorFlow has already started, the other GPUs stay visible but unused.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices(share, "GPU")
    if tf.config.get_visible_devices("GPU") == share:
        return list(range(towers))
    return list(range(first, first + towers))
