"""Importing keras_towers is cheap, in any order, and on any backend."""

import importlib.util

import numpy as np
import pytest

from keras_towers import _imports
from tests.kit.compare import assert_all_close
from tests.kit.scripts import run_python

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
    print(home.strategy.num_towers if home else 0)
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


def test_the_command_runs_without_tensorflow():
    """``python -m keras_towers`` launches ranks, which need it themselves."""
    refuse = """
import runpy, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name not in ("keras", "tensorflow"), f"imports {name}"

sys.meta_path.insert(0, Refuse())
sys.argv[1:] = ["run", "--help"]
runpy.run_module("keras_towers", run_name="__main__", alter_sys=True)
"""
    done = run_python("-c", refuse)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "keras-towers run" in done.stdout


def test_keras_can_be_imported_before_keras_towers():
    called = []
    _imports.after_keras(lambda: called.append("at once"))
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
