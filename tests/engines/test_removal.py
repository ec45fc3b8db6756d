"""An engine goes with its folder, and the rest works without it."""

import shutil

import pytest

from keras_towers.engines import ENGINES
from tests.kit.scripts import ROOT, python

TRAINS = """
import sys
import keras, numpy as np
import keras_towers as kt

assert kt.__file__.startswith(sys.argv[1])
towers = kt.virtual_towers(2)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
with kt.TowerStrategy(towers):
    model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
"""

# By engine: a statement that needs it, and its error.
ASKED = {
    "byteps": "import keras_towers as kt; kt.BytePSStrategy()",
    "horovod": "from keras_towers import horovod as hvd",
    "runtime": "import keras_towers as kt; kt.MultiWorkerTowerStrategy()",
}


@pytest.fixture(params=ENGINES)
def removed(request, tmp_path):
    """The name of an engine, and a folder with a package without it."""
    shutil.copytree(
        ROOT / "keras_towers",
        tmp_path / "keras_towers",
        ignore=lambda folder, names: {
            name
            for name in names
            if name == "__pycache__"
            or (name == request.param and folder.endswith("/engines"))
        },
    )
    return request.param, tmp_path


def test_the_rest_works_without_an_engine(removed):
    engine, folder = removed

    def ended(*command):
        return python(*command, PYTHONPATH=str(folder), PYTHONSAFEPATH="1")

    trained = ended("-c", TRAINS, str(folder))
    assert trained.returncode == 0, trained.stderr[-3000:]
    for words in (["--help"], ["run", "--help"], ["install", "--help"]):
        shown = ended("-m", "keras_towers", *words)
        assert shown.returncode == 0, shown.stderr[-3000:]
    checked = ended("-m", "keras_towers", "doctor", "--json")
    title = ENGINES[engine].title
    assert f'"name": "{title}"' not in checked.stdout or engine == "runtime"
    asked = ended("-c", ASKED[engine])
    assert f"there is no keras_towers.engines.{engine}" in asked.stderr
    by_name = f"import keras_towers as kt; kt.strategy({engine!r})"
    if engine != "runtime":
        assert "unknown strategy" in ended("-c", by_name).stderr
