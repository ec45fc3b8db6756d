"""The machine of the benchmark, and what of it a process uses."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from keras_towers import _imports
from keras_towers.doctor import probe
from keras_towers.errors import TowerError
from keras_towers.meeting.environments import tf_config
from keras_towers.system import usable_cores


def prepare_devices(device: str, towers: int) -> list[str]:
    """Set up the devices to train on; call before TensorFlow initializes them.

    On the CPU every tower is a logical device, and each operation gets one
    thread. With more threads one device would already use all cores, and the
    results would reflect intra-op parallelism instead of the towers.

    Returns:
        The names of the devices.
    """
    import tensorflow as tf

    if device == "gpu":
        return [f"/device:GPU:{index}" for index in range(towers)]
    tf.config.set_visible_devices([], "GPU")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(max(4, towers))
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration() for _ in range(towers)],
    )
    return [f"/device:CPU:{index}" for index in range(towers)]


def use_cores(count: int) -> None:
    """Run this process on as many cores as there are replicas.

    Communication threads too: on spare cores those would be free. Must precede
    the backends' core count.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def own_rank(processes: int) -> int:
    """Return the rank that the launcher sets; a single process has none."""
    if processes == 1:
        return 0
    task = tf_config.from_environment()
    return task.rank if task else int(os.environ["HOROVOD_RANK"])


def machine_facts(timeout_s: float) -> dict[str, Any]:
    """Return the facts about this machine that put the figures in context.

    Args:
        timeout_s: the time limit for starting TensorFlow in seconds.

    Raises:
        CompatibilityError: TensorFlow is not installed, or is not Keras's
            backend.
        TowerError: TensorFlow or Keras cannot be imported.
    """
    _imports.check()
    found = probe.look(timeout_s)
    error = found.get("error") or found.get("keras_error")
    if error:
        raise TowerError(f"cannot start: {error}")
    return {
        "tensorflow": found["tensorflow"],
        "keras": found["keras"],
        "horovod": _version("horovod"),
        "torch": _version("torch"),
        "jax": _version("jax"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor_name(),
        "cores": usable_cores(),
        "gpus": found["gpus"],
    }


def describe_machine(facts: dict[str, Any]) -> str:
    """Describe what figures were measured on, for a caption."""
    versions = ", ".join(
        f"{name} {facts[name.lower()]}"
        for name in ("TensorFlow", "Keras", "Horovod", "Torch", "JAX", "Python")
        if facts.get(name.lower())
    )
    devices = ", ".join(facts["gpus"]) or "no GPU"
    cores = f"{facts['processor']}, {facts['cores']} cores"
    return f"{cores}, {devices}; {versions}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor_name() -> str:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    named = re.search(r"model name\s*: (.+)", text)
    return named[1] if named else platform.machine()
