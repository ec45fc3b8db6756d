"""What a session on GPUs runs on."""

import platform
import shutil
from importlib import metadata

from keras_towers import subprocesses
from keras_towers.doctor import checks

_QUERY = "index,name,memory.total,compute_cap,driver_version"
_GROUPS = ("Versions", "Devices", "Engines")


def rows() -> list[tuple[str, str]]:
    """Names and values: what ``keras-towers doctor`` finds, and more."""
    found = [
        (finding.name, finding.value)
        for finding in checks.look()
        if finding.group in _GROUPS
    ]
    return [
        ("system", platform.platform()),
        *found,
        ("TensorFlow is built with", _built_with()),
        ("NVIDIA's packages", _nvidia_packages() or "none"),
    ]


def gpus() -> str:
    """The GPUs, their memory, and how they are connected."""
    return "\n\n".join(
        _said("nvidia-smi", *arguments)
        for arguments in (
            (f"--query-gpu={_QUERY}", "--format=csv"),
            ("topo", "-m"),
        )
    )


def _built_with() -> str:
    # The doctor has found that it can be imported.
    import tensorflow as tf

    built = tf.sysconfig.get_build_info()
    wanted = ("cuda_version", "cudnn_version", "cuda_compute_capabilities")
    values = [f"{name} {built[name]}" for name in wanted if name in built]
    return ", ".join(values) or "no CUDA"


def _nvidia_packages() -> str:
    """CUDA, cuDNN and NCCL, which TensorFlow loads, are packages."""
    versions = {
        package.metadata["Name"]: package.version
        for package in metadata.distributions()
    }
    return ", ".join(
        f"{name} {version}"
        for name, version in sorted(versions.items())
        if name.startswith("nvidia-")
    )


def _said(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return f"{command[0]}: not found"
    ended = subprocesses.run(command, timeout_s=30)
    return (ended.stdout + ended.stderr).rstrip()
