"""Without TensorFlow, or on another backend: what to do, from everywhere."""

import json

import pytest

from tests.kit.scripts import run_python

# Says of every name of the package what happens to who asks for it first.
ASK = """
import importlib, json, pkgutil
import keras_towers as kt
from keras_towers.cli.main import app
from typer.testing import CliRunner

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
bench = CliRunner().invoke(app, ["bench"])
print(json.dumps([found, bench.exit_code, bench.output]))
"""

# TensorFlow cannot be found, nor imported.
HIDE = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name == "tensorflow" else find_spec(name, package)
)
sys.modules["tensorflow"] = None
"""

# What says that it is a Keras on another backend: not all are installed.
OTHER = """
import sys, types
keras = sys.modules["keras"] = types.ModuleType("keras")
keras.backend = types.SimpleNamespace(backend=lambda: "jax")
"""

NEED_IT = {"TowerStrategy", "strategy('tower')", "keras_towers.towers"}


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
def test_every_name_of_the_package_says_what_is_missing(
    before, backend, advised
):
    ended = run_python("-c", before + ASK, KERAS_BACKEND=backend)
    assert ended.returncode == 0, ended.stderr
    found, code, output = json.loads(ended.stdout)
    errors = {name: error for name, error in found.items() if error}
    assert errors.keys() >= NEED_IT
    for name, (kind, message) in errors.items():
        assert kind == "CompatibilityError", (name, message)
        assert all(part in message for part in advised), (name, message)
    assert not found["keras_towers.cli.main"]
    # A command says it in one line.
    (line,) = output.strip().splitlines()
    assert line.startswith("keras-towers bench: ") and code == 1
    assert all(part in line for part in advised)
