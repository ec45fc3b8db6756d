"""The installed packages, and the devices of this machine.

A separate process, ``python -m keras_towers.cli.installed``, imports TensorFlow
and Keras and reports their state as JSON: an import that crashes does not crash
who asks.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform

from keras_towers.foundation import import_hooks, settings
from keras_towers.foundation.commands import NoAnswer, ask_python
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import JsonObject
from keras_towers.foundation.system import cpu, usable_cores


def nccl_state() -> str:
    """Try NCCL; return as JSON why it cannot be tried, or fails."""
    import tensorflow as tf

    from keras_towers.reduction.collective_ops import (
        CollectiveOps,
        failure_of,
        nccl_available,
    )

    names = [gpu.name for gpu in tf.config.list_logical_devices("GPU")]
    possible, obstacle = nccl_available(names)
    state = {"obstacle": "" if possible else obstacle, "failure": ""}
    if possible:
        state["failure"] = failure_of(CollectiveOps(), names)
    return json.dumps(state | {"version": _nccl_version()})


def _nccl_version() -> str:
    """Return the version of the NCCL that TensorFlow loads, or ""."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except OSError:
        return ""
    major, rest = divmod(number.value, 10_000)
    return ".".join(map(str, (major, *divmod(rest, 100))))


def tensorflow_state(timeout_s: float = settings.IMPORT_S) -> JsonObject:
    """Run this module in a fresh process; return facts, or an ``"error"``."""
    environment = {
        "KERAS_BACKEND": "tensorflow",
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    module = ["-m", "keras_towers.cli.installed"]
    try:
        return ask_python(module, timeout_s, environment)
    except NoAnswer as error:
        return {"error": str(error)}


def machine_facts(timeout_s: float) -> JsonObject:
    """Return the facts that put measurements in context, or raise an error."""
    import_hooks.check_tensorflow()
    state = tensorflow_state(timeout_s)
    error = state.get("error") or state.get("keras_error")
    if error:
        raise TowerError(f"cannot start: {error}")
    versions = {
        name: next(iter(import_hooks.packages(name).values()), None)
        for name in ("horovod", "torch", "jax")
    }
    return {
        "tensorflow": state["tensorflow"],
        "keras": state["keras"],
        **versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": cpu().get("model name", platform.machine()),
        "cores": usable_cores(),
        "gpus": state["gpus"],
    }


def describe_machine(facts: JsonObject) -> str:
    """Describe the machine of a measurement, for a caption."""
    versions = ", ".join(
        f"{name} {facts[name.lower()]}"
        for name in ("TensorFlow", "Keras", "Horovod", "Torch", "JAX", "Python")
        if facts.get(name.lower())
    )
    devices = ", ".join(facts["gpus"]) or "no GPU"
    cores = f"{facts['processor']}, {facts['cores']} cores"
    return f"{cores}, {devices}; {versions}"


def _collect_facts() -> JsonObject:
    """Import TensorFlow, Keras and this package; report versions and errors."""
    facts: JsonObject = {
        "packages": {
            "TensorFlow": import_hooks.packages("tensorflow"),
            "Keras": import_hooks.packages("keras"),
        },
        "backend": os.environ.get("KERAS_BACKEND", "tensorflow"),
    }
    failed = "error"
    try:
        import tensorflow as tf

        get_details = tf.config.experimental.get_device_details
        facts["tensorflow"] = tf.__version__
        facts["built_with_cuda"] = tf.test.is_built_with_cuda()
        facts["gpus"] = [
            get_details(gpu).get("device_name", "GPU")
            for gpu in tf.config.list_physical_devices("GPU")
        ]
        failed = "keras_error"
        import keras

        facts["keras"] = keras.__version__
        facts["backend"] = keras.backend.backend()
        failed = "compat_error"
        from keras_towers.foundation import compat

        facts["tested_versions"] = compat.TESTED_VERSIONS
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        facts[failed] = f"{type(error).__name__}: {lines[0]}"
    return facts


if __name__ == "__main__":
    print(json.dumps(_collect_facts()))
