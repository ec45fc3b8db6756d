"""Without TensorFlow, or on another backend: what to do, from everywhere."""

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest

from keras_towers import _requirements

pytestmark = pytest.mark.core

# Says of every name of the package what happens to who asks for it first.
ASK = """
import importlib, json, pkgutil, sys
import keras_towers as kt

def said(ask, *args):
    try:
        ask(*args)
    except Exception as error:
        return [type(error).__name__, str(error)]

found = {name: said(getattr, kt, name) for name in kt.__all__}
found["strategy('tower')"] = said(kt.strategy, "tower")
walk = pkgutil.walk_packages(kt.__path__, "keras_towers.", lambda name: None)
for module in walk:
    if not module.name.endswith("__main__"):
        found[module.name] = said(importlib.import_module, module.name)
print(json.dumps(found))
"""

HIDE = """
import importlib.util, sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "tensorflow":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name == "tensorflow" else find_spec(name, package)
)
"""

# A Keras that says that it runs on another backend: not all are installed.
OTHER = """
import keras
keras.backend.backend = lambda: "jax"
"""

PUBLIC = [
    "TowerStrategy",
    "strategy('tower')",
    "keras_towers.callbacks",
    "keras_towers.collectives",
    "keras_towers.devices",
    "keras_towers.elastic",
    "keras_towers.horovod",
    "keras_towers.placement",
    "keras_towers.reduction",
    "keras_towers.strategies.tower",
    "keras_towers.towers",
    "keras_towers.transport",
    "keras_towers.verification",
]


def run(*command, **environment):
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.parametrize(
    ("before", "backend", "advised"),
    [
        (HIDE, "tensorflow", ("keras-towers[cpu]", "keras-towers[gpu]")),
        (OTHER, "tensorflow", ("'jax'", "KERAS_BACKEND=tensorflow")),
        # Keras would fail to import it, and not say what to set.
        ("", "torch", ("'torch'", "KERAS_BACKEND=tensorflow")),
    ],
    ids=["no TensorFlow", "another backend", "one that is not installed"],
)
def test_every_entrance(before, backend, advised):
    ended = run("-c", before + ASK, KERAS_BACKEND=backend)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert set(PUBLIC) <= {name for name, error in found.items() if error}
    for name, error in found.items():
        if error:
            kind, message = error
            assert kind == "CompatibilityError", (name, error)
            assert all(part in message for part in advised), (name, message)
    assert not found["keras_towers.cli.main"]


def test_bench_on_another_backend():
    ended = run("-m", "keras_towers.cli.main", "bench", KERAS_BACKEND="torch")
    assert ended.returncode == 1
    (line,) = ended.stderr.strip().splitlines()
    assert line.startswith("keras-towers bench: ")
    assert "KERAS_BACKEND=tensorflow" in line


def test_packages_of_a_module():
    (found,) = _requirements.packages("pytest").items()
    assert found == ("pytest", metadata.version("pytest"))
    assert not _requirements.packages("no_such_module")
