"""An unmodified script under a strategy by name."""

import re
import sys

import pytest

from keras_towers.launching import script as launch_script
from tests.launching.jobs import Launched

STRATEGY = """
class Loud:
    def __init__(self, towers=1):
        self.towers = towers
    def __enter__(self):
        print("enter", self.towers)
    def __exit__(self, *error):
        print("leave")
"""

SCRIPT = """
import os, random, sys
import keras
import helper
assert __name__ == "__main__"
assert sys.modules["__main__"].__dict__ is globals()
layer = keras.layers.Dense(3)
layer.build((None, 2))
print("seen", sys.argv, os.path.basename(sys.path[0]), random.random(),
      layer.kernel.numpy().sum(), list({"a", "b", "c", "d"}))
if "fail" in sys.argv:
    def inner():
        raise ValueError("bad data")
    inner()
sys.exit(4)
"""


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "helper.py").write_text("")
    (folder / "script.py").write_text(SCRIPT)
    (tmp_path / "loud_package.py").write_text(STRATEGY)
    info = tmp_path / "loud_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: loud-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[keras_towers.strategies]\nloud = loud_package:Loud\n"
    )

    def run(*arguments, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        return Launched(tmp_path, arguments).finish(60)

    return run


def test_script_sees_what_it_would_alone(run, monkeypatch):
    done = run(
        *("-np", "2", "--strategy", "loud", "--towers", "3"),
        *("there/script.py", "--strategy", "mine"),
        monkeypatch=monkeypatch,
    )
    assert done.code == 4, done.err
    assert done.out.count("enter 3\n") == done.out.count("leave\n") == 2
    seen = re.findall(r"\[\d\] seen (.*)\n", done.out)
    # Random numbers, weights and the order of sets are the same on both.
    assert len(seen) == 2 and seen[0] == seen[1]
    assert seen[0].startswith("['there/script.py', '--strategy', 'mine'] there")
    assert re.search(r"seed \d+\n", done.err)


def test_traceback_is_the_scripts_own(run, monkeypatch):
    done = run(
        *("-np", "1", "--strategy", "loud", "--seed", "1"),
        *("there/script.py", "fail"),
        monkeypatch=monkeypatch,
    )
    assert done.code == 1
    assert "ValueError: bad data" in done.err
    assert re.search(r'script.py", line \d+, in inner', done.err)
    assert "runpy" not in done.err
    assert "launching/script.py" not in done.err
    assert "leave" in done.out


SAVES = """
import sys, tempfile
import keras, numpy as np
import keras_towers as kt
from keras.models import load_model, save_model

rank = kt.HorovodStrategy().rank
x = np.ones((8, 4), "float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(256)])
model.compile("sgd", "mse")


class Saver(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.save(f"{epoch}.keras")
        load_model(f"{epoch}.keras")


checkpoint = keras.callbacks.ModelCheckpoint("best.keras")
model.fit(x, x @ np.ones((4, 256)), epochs=2, verbose=0,
          callbacks=[Saver(), checkpoint])
for _ in range(5):
    model.save_weights("w.weights.h5")
    model.load_weights("w.weights.h5")
    save_model(model, "whole.keras")
    load_model("whole.keras")
model.export("exported", verbose=False)
with tempfile.TemporaryDirectory() as folder:
    model.save(folder + "/own.keras")
    load_model(folder + "/own.keras")
print("saved", flush=True)
model.save("no such folder/model.keras")
"""


@pytest.mark.slow
def test_a_script_that_knows_of_no_ranks_saves_once(tmp_path):
    (tmp_path / "script.py").write_text(SAVES)
    job = Launched(tmp_path, ("-np", "2", "--strategy", "horovod", "script.py"))
    done = job.finish(100)
    assert done.out.count("saved") == 2, done.out + done.err
    assert done.code == 1
    assert "FileNotFoundError" in done.err or "could not save" in done.err
    assert (tmp_path / "best.keras").exists()
    assert (tmp_path / "exported" / "saved_model.pb").exists()


@pytest.mark.parametrize(
    "own",
    [
        "keras_towers.NoOpStrategy()",
        "keras_towers.TowerStrategy(2)",
        "keras_towers.TowerStrategy(2).scope()",
        "tensorflow.distribute.OneDeviceStrategy('/cpu:0').scope()",
    ],
)
def test_a_second_strategy_is_refused(own, tmp_path, monkeypatch, capsys):
    script = tmp_path / "script.py"
    script.write_text(
        f"import keras_towers, tensorflow\nwith {own}: print('inside')\n"
    )
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with pytest.raises(SystemExit, match="1"):
        launch_script.main(["--strategy", "noop", str(script)])
    said = capsys.readouterr()
    assert "inside" not in said.out
    assert "by `keras-towers run --strategy noop`" in said.err
    assert said.err.endswith("a strategy of its own, drop one of them.\n")
