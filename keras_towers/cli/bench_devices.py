"""Preparing TensorFlow's devices inside one benchmark process."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any


class DeviceError(RuntimeError):
    """The machine does not have the devices that were asked for."""


def cpu_threads(towers: int) -> dict[str, int]:
    """Return the threads of a run on the CPU, the same for all strategies."""
    return {"intra_op": 1, "inter_op": max(4, towers)}


def prepare_devices(device: str, towers: int) -> list[str]:
    """Choose the devices to train on; call before TensorFlow starts them.

    On the CPU every tower is one logical device, and an operation gets one
    thread: with more, one device would already use all cores, and the numbers
    would say how well operations share them instead of how towers do.

    Args:
        device: ``"cpu"`` or ``"gpu"``.
        towers: how many devices are needed.

    Returns:
        The names of the devices, as TensorFlow spells them.

    Raises:
        DeviceError: fewer GPUs are visible than were asked for.
    """
    import tensorflow as tf

    if device == "gpu":
        visible = len(tf.config.list_physical_devices("GPU"))
        if visible < towers:
            raise DeviceError(f"{towers} GPUs are needed, {visible} visible")
        return [f"/device:GPU:{index}" for index in range(towers)]
    tf.config.set_visible_devices([], "GPU")
    threads = cpu_threads(towers)
    tf.config.threading.set_intra_op_parallelism_threads(threads["intra_op"])
    tf.config.threading.set_inter_op_parallelism_threads(threads["inter_op"])
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration() for _ in range(towers)],
    )
    return [f"/device:CPU:{index}" for index in range(towers)]


def machine_facts() -> dict[str, Any]:
    """Return what a reader must know to place the numbers."""
    import keras
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    return {
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "horovod": _version("horovod"),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": [detail.get("device_name", "unknown") for detail in details],
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
