"""An engine goes with its folder and its name in a line of the table."""

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

# By engine: a statement that needs it.
NEEDS = {
    "byteps": "import keras_towers as kt; kt.BytePSStrategy()",
    "horovod": "from keras_towers import horovod as hvd",
    "runtime": "import keras_towers as kt; kt.MultiWorkerTowerStrategy()",
}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_rest_works_without_an_engine(engine, tmp_path):
    package = tmp_path / "keras_towers"
    shutil.copytree(
        ROOT / "keras_towers",
        package,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.rmtree(package / "engines" / engine)
    table = package / "engines" / "__init__.py"
    names = [name.upper() for name in ENGINES]
    kept = [name for name in names if name != engine.upper()]
    whole = table.read_text()
    without = whole.replace(f"({', '.join(names)})", f"({', '.join(kept)})")
    assert without != whole
    table.write_text(without)

    def ended(*command):
        return python(*command, PYTHONPATH=str(tmp_path), PYTHONSAFEPATH="1")

    trained = ended("-c", TRAINS, str(tmp_path))
    assert trained.returncode == 0, trained.stderr[-3000:]
    for words in (["--help"], ["run", "--help"], ["install", "--help"]):
        shown = ended("-m", "keras_towers", *words)
        assert shown.returncode == 0, shown.stderr[-3000:]
    needed = ended("-c", NEEDS[engine])
    assert f"keras_towers.engines.{engine}" in needed.stderr
