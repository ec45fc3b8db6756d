"""What Horovod is installed, found out without loading it in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

_MARK = "keras-towers-horovod:"
_SCRIPT = f"""
import json
import horovod.tensorflow as hvd
built = dict(
    gloo=bool(hvd.gloo_built()),
    mpi=bool(hvd.mpi_built()),
    nccl=hvd.nccl_built(),
    cuda=bool(hvd.cuda_built()),
)
print({_MARK!r} + json.dumps(built))
"""


@dataclass(frozen=True)
class Found:
    """The installed Horovod.

    Attributes:
        version: of the package.
        tensorflow: the version it was built for, if it says so.
        loads: whether ``import horovod.tensorflow`` works.
        error: why not.
        built: ``gloo``, ``mpi``, ``cuda`` and ``nccl``: False, or True, for
            NCCL its version as a number.
    """

    version: str
    tensorflow: str | None
    loads: bool
    error: str = ""
    built: dict[str, int] = field(default_factory=dict)

    @property
    def engines(self) -> str:
        """What is built in, for people: ``"Gloo, MPI"``."""
        names = {"gloo": "Gloo", "mpi": "MPI", "nccl": "NCCL"}
        have = [name for key, name in names.items() if self.built.get(key)]
        return ", ".join(have) or "nothing"


def look(timeout_s: float = 120) -> Found | None:
    """Look at the installed Horovod in a fresh process.

    Returns:
        What is there, or None if it is not installed.
    """
    try:
        package = metadata.distribution("horovod")
    except metadata.PackageNotFoundError:
        return None
    version, tensorflow = package.version, _built_for(package)
    try:
        ended = subprocess.run(
            # -P: a folder named horovod where the user stands is not it.
            [sys.executable, "-P", "-c", _SCRIPT],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
    except subprocess.TimeoutExpired:
        error = f"it did not load in {timeout_s:.0f} seconds"
        return Found(version, tensorflow, False, error)
    for line in ended.stdout.splitlines():
        if line.startswith(_MARK):
            built = json.loads(line.removeprefix(_MARK))
            return Found(version, tensorflow, True, built=built)
    said = ended.stderr.strip().splitlines()
    error = said[-1] if said else f"exit status {ended.returncode}"
    return Found(version, tensorflow, False, error)


def _built_for(package: metadata.Distribution) -> str | None:
    try:
        path = Path(str(package.locate_file("horovod/metadata.json")))
        return json.loads(path.read_text()).get("tensorflow")
    except (OSError, ValueError):
        return None
