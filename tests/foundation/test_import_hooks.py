"""Importing keras_towers: in any order, on any backend, without TensorFlow."""

import importlib.util
import json

import numpy as np
import pytest

from keras_towers.foundation import import_hooks
from tests.kit.compare import assert_all_close
from tests.kit.scripts import run_python

pytestmark = pytest.mark.alternate

FIRST = """
import importlib.util, sys
import keras_towers

assert not {"keras", "tensorflow"} & sys.modules.keys()
# Looking for Keras is not importing it.
assert importlib.util.find_spec("keras")
import keras
"""

# For every backend of Keras.
SCRIPT = """
import numpy as np

if keras.backend.backend() == "tensorflow":
    keras_towers.virtual_towers(4)
distribution = keras.distribution.DataParallel()
assert distribution.device_mesh.devices.size == 4
random = np.random.default_rng(0)
x, y = random.normal(size=(64, 5)), random.integers(0, 3, 64)
model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
model.set_weights([random.normal(size=w.shape) for w in model.weights])
model.compile(
    keras.optimizers.SGD(0.1, momentum=0.9),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
with distribution.scope():
    model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    home = getattr(model, "distribute_strategy", None)
    print(home.num_towers if home else 0)
np.savez(sys.argv[1], *model.get_weights())
"""


def weights_by(backend, path, imports=FIRST):
    """The number of towers, and the weights that the script ends with."""
    done = run_python(
        *("-c", imports + SCRIPT, str(path)),
        KERAS_BACKEND=backend,
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(path) as found:
        return int(done.stdout), [found[name] for name in found.files]


@pytest.fixture(scope="module")
def by_tensorflow(tmp_path_factory):
    """Likewise, where keras_towers is imported before Keras."""
    # Keras may also come with a module of the package.
    inside = (
        "import keras_towers.engines.runtime.tensorflow_task\nimport keras\n"
    )
    path = tmp_path_factory.mktemp("by") / "weights.npz"
    first = FIRST.replace("import keras\n", inside)
    return weights_by("tensorflow", path, first)


def test_keras_towers_can_be_imported_before_keras(by_tensorflow):
    towers, _ = by_tensorflow
    assert towers == 4


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("run --help", 0, "keras-towers run"),
        ("run -np 2 --strategy horovod:a=1 s.py", 2, "has no option 'a'"),
        ("run -np 2 --strategy tower:mode=fast s.py", 2, "mode='fast' is not"),
        ("run --ps 1 --workers 1 s.py", 0, ""),
        ("plan s.py:build --towers 2", 2, "leave out .py, as in s:build"),
        ("plan none:build --towers 2", 2, "no module named 'none'"),
        ("bench --models half:build", 2, "half.py, line 1: '(' was never"),
    ],
)
def test_the_command_runs_without_tensorflow(words, code, said, tmp_path):
    """``python -m keras_towers`` launches ranks, which need it themselves."""
    refuse = f"""
import runpy, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name not in ("keras", "tensorflow"), f"imports {{name}}"

sys.meta_path.insert(0, Refuse())
sys.argv[1:] = {words.split()}
runpy.run_module("keras_towers", run_name="__main__", alter_sys=True)
"""
    (tmp_path / "s.py").touch()
    (tmp_path / "half.py").write_text("(")
    done = run_python("-c", refuse, folder=tmp_path)
    assert done.returncode == code, done.stderr[-3000:]
    assert said in done.stdout + done.stderr


def test_keras_can_be_imported_before_keras_towers():
    called = []
    import_hooks.after_keras(lambda: called.append("at once"))
    assert called == ["at once"]


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_one_script_runs_on_every_backend(backend, by_tensorflow, tmp_path):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    path = tmp_path / "weights.npz"
    _, found = by_tensorflow
    # There, keras_towers changes nothing.
    for imports in (FIRST, "import sys, keras"):
        _, wanted = weights_by(backend, path, imports)
        assert_all_close(found, wanted, 1e-5)


# ---- without TensorFlow, or on another backend, everything says what to do --

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

NEED_IT = {
    "TowerStrategy",
    "strategy('tower')",
    "keras_towers.fit.current_tower",
}


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


def test_what_asks_for_every_name_needs_no_engine():
    ask = """
import inspect, pydoc, rlcompleter
import keras_towers as kt
from keras_towers import *

members = dict(inspect.getmembers(kt))
assert members.keys() >= {"HorovodStrategy", "BytePSStrategy"}
assert "TowerStrategy" in pydoc.plain(pydoc.render_doc(kt))
completer = rlcompleter.Completer({"kt": kt})
assert completer.complete("kt.Hor", 0) == "kt.HorovodStrategy("
assert completer.complete("kt.e", 0) == "kt.elastic"
assert not {"horovod", "byteps"} & sys.modules.keys()
for name in ("horovod", "byteps"):
    try:
        getattr(kt, name)
    except kt.TowerError as error:
        print(error)
"""
    hide = HIDE.replace('"tensorflow" else', '("horovod", "byteps") else')
    hide = hide.replace("name ==", "name in").partition("sys.modules")[0]
    ended = run_python("-c", hide + ask)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert len(lines) == 2 and all("keras-towers install" in s for s in lines)
