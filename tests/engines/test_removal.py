"""An engine goes with its folder and its name in a line of the table."""

import os
import shutil

import pytest

from keras_towers.jobs.known_engines import ENGINES
from tests.kit.sampling import sample_of
from tests.kit.scripts import ROOT, run_python

pytestmark = pytest.mark.alternate

WORKS = """
import sys
import keras, numpy as np
import keras_towers as kt
from keras_towers.cli.main import app
from typer.testing import CliRunner

assert kt.__file__.startswith(sys.argv[1])
for words in ([], ["run"], ["install"]):
    assert CliRunner().invoke(app, [*words, "--help"]).exit_code == 0
towers = kt.virtual_towers(2)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
with kt.TowerStrategy(towers):
    model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
print("works")
"""

# By engine: a statement that needs it.
NEEDS = {
    "byteps": "kt.BytePSStrategy()",
    "horovod": "from keras_towers import horovod as hvd",
    "runtime": "kt.MultiWorkerTowerStrategy()",
}


@pytest.mark.parametrize("engine", sample_of(ENGINES, 3))
def test_the_rest_works_without_an_engine(engine, tmp_path):
    package = tmp_path / "keras_towers"
    shutil.copytree(ROOT / "keras_towers", package)
    shutil.rmtree(package / "engines" / engine)
    table = package / "jobs" / "known_engines.py"
    names = [name.upper() for name in ENGINES]
    kept = [name for name in names if name != engine.upper()]
    whole = table.read_text()
    without = whole.replace(f"({', '.join(names)})", f"({', '.join(kept)})")
    assert without != whole
    table.write_text(without)
    ended = run_python(
        *("-c", WORKS + NEEDS[engine], str(tmp_path)),
        PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}",
        PYTHONSAFEPATH="1",
    )
    assert ended.stdout == "works\n", ended.stderr[-3000:]
    assert f"keras_towers.engines.{engine}" in ended.stderr
