"""An unmodified script under a strategy by name."""

import os
import re
import sys
from unittest import mock

import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.jobs.launching import script as launch_script
from keras_towers.jobs.launching.script import Setup
from keras_towers.jobs.rendezvous import separate_training
from keras_towers.strategies.base import BaseStrategy
from keras_towers.transport import SingleProcess, devices
from tests.kit.processes import Launched
from tests.kit.scripts import parse_variables, run_python
from tests.kit.training import X, Y, linear

pytestmark = pytest.mark.alternate

SCRIPT = """
import os, random, sys
import keras, numpy as np
import helper
import tensorflow as tf

# These are refused once TensorFlow has started.
threads = tf.config.threading
threads.set_intra_op_parallelism_threads(1)
threads.set_inter_op_parallelism_threads(2)
(cpu,) = tf.config.list_physical_devices("CPU")
halves = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, halves)
import keras_towers as kt

assert __name__ == "__main__"
assert sys.modules["__main__"].__dict__ is globals()
rank = kt.HorovodStrategy().rank
x = np.ones((8, 4), "float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(256)])
model.compile("sgd", "mse")
print("seen", sys.argv, os.path.basename(sys.path[0]), random.random(),
      model.get_weights()[0].sum(), os.environ["PYTHONHASHSEED"], flush=True)
checkpoint = keras.callbacks.ModelCheckpoint("best.keras")
model.fit(x, x @ np.ones((4, 256)), epochs=2, verbose=0,
          callbacks=[checkpoint])
model.save("whole.keras")
keras.models.load_model("whole.keras")
model.export("exported", verbose=False)
print("saved", flush=True)
assert threads.get_intra_op_parallelism_threads() == 1
assert len(tf.config.list_logical_devices("CPU")) == 2
"""


@pytest.mark.alternate(turn=1)
@pytest.mark.slow
def test_script_sees_what_it_would_alone_and_saves_once(tmp_path):
    (tmp_path / "there").mkdir()
    for name, text in (("helper", ""), ("script", SCRIPT)):
        (tmp_path / "there" / f"{name}.py").write_text(text)
    arguments = "there/script.py", "--strategy", "mine"
    strategy = "horovod:compression=none:average=True"
    options = "-np", "2", "--strategy", strategy, *arguments
    done = Launched(tmp_path, *options).finish(200)
    assert done.code == 0, done.out + done.err
    assert "never connected" not in done.err
    seen = re.findall(r"\[\d\] seen (.*)\n", done.out)
    # Random numbers, weights and the order of sets are the same on both.
    assert len(seen) == 2 and seen[0] == seen[1]
    assert seen[0].startswith(f"{list(arguments)} there")
    assert re.search(r"seed \d+\n", done.err)
    assert seen[0].endswith(" 0")
    assert done.out.count("saved") == 2
    assert (tmp_path / "best.keras").exists()
    assert (tmp_path / "exported" / "saved_model.pb").exists()


# A strategy of somebody else.
LOUD = """
import contextlib

@contextlib.contextmanager
def loud(towers=1, at=""):
    print("enter", towers, at)
    try:
        yield
    finally:
        print("leave")
"""
ENTRY_POINTS = "[keras_towers.strategies]\nloud = loud_package:loud\n"


@pytest.fixture
def under(tmp_path, monkeypatch, capsys):
    """Run a script under a strategy, in this process; its output."""
    for name in ("last_type", "last_value", "last_traceback"):
        monkeypatch.setattr(sys, name, None, raising=False)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(devices, "_made", [])
    (tmp_path / "loud_package.py").write_text(LOUD)
    metadata = tmp_path / "loud_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: loud-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    script = tmp_path / "script.py"

    def run(source, as_is=False, **setup):
        script.write_text(source)
        with pytest.raises(SystemExit, match="1"):
            if as_is:
                launch_script.run_as_is([str(script)])
            else:
                launch_script.main(Setup(**setup), str(script))
        return capsys.readouterr()

    return run


def test_traceback_is_the_scripts_own(under):
    source = """
def inner():
    raise ValueError("bad data")
inner()
"""
    said = under(source, strategy="loud", towers=3, options={"at": "once"})
    assert said.out == "enter 3 once\nleave\n"
    assert "ValueError: bad data" in said.err
    assert 'script.py", line 3, in inner' in said.err
    assert "runpy" not in said.err
    assert "jobs/launching/script.py" not in said.err


ALONE = """
import keras, numpy as np
x = np.ones((8, 4), "float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
before = model.get_weights()[0]
model.predict(x, verbose=0)
try:
    model.fit(x, x.sum(1), verbose=0)
finally:
    print("trained", (model.get_weights()[0] != before).any())
"""
ADVICE = "add --strategy horovod", "with kt.HorovodStrategy():", "--no-strategy"


def test_training_without_a_strategy_is_refused(under, monkeypatch):
    monkeypatch.setattr(separate_training, "_reason", None)
    said = under(ALONE, suggested="horovod")
    assert said.out == "trained False\n"
    assert "TowerError: fit of model 'sequential" in said.err
    assert all(part in said.err for part in ADVICE)
    # Any strategy will do, and what the script connects by itself.
    for other in (kt.TowerStrategy(2), tf.distribute.OneDeviceStrategy("CPU")):
        with other.scope():
            assert linear().train_on_batch(X, Y) > 0
    engine = mock.Mock()
    engine.size.side_effect = [ValueError("not initialized"), 2]
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", engine)
    with pytest.raises(kt.TowerError, match="train_on_batch of model"):
        linear().train_on_batch(X, Y)
    assert linear().train_on_batch(X, Y) > 0
    # One that connects ranks permits it, though there is a single one now.
    monkeypatch.delitem(sys.modules, "horovod.tensorflow")
    with pytest.raises(kt.TowerError, match="train_on_batch of model"):
        linear().train_on_batch(X, Y)
    BaseStrategy(["/cpu:0"], transport=SingleProcess())
    assert linear().train_on_batch(X, Y) > 0


def test_what_another_launcher_starts_may_not_train_alone(under, monkeypatch):
    monkeypatch.setattr(separate_training, "_reason", None)
    step = "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1"
    for name, value in parse_variables(step).items():
        monkeypatch.setenv(name, value)
    # Set before it is deleted, so that this is undone.
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    said = under(ALONE, as_is=True)
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "1"
    assert said.out == "trained False\n"
    assert "this process is rank 1 of 2 that srun started, and" in said.err
    assert "`keras-towers run --strategy horovod`" in said.err


SHOWS = """
import os, sys
assert sys.modules["__main__"].__dict__ is globals()
print(sys.argv, __name__, __spec__ and __spec__.name, sys.path[0])
print("keras_towers" in sys.modules, "keras" in sys.modules)
"""


@pytest.mark.parametrize("words", [["./run"], ["-m", "inside.run"]])
def test_the_package_runs_a_script_as_python_does(words, tmp_path):
    # Although it has the name of a command.
    (tmp_path / "run").write_text(SHOWS)
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "run.py").write_text(SHOWS)
    words = [*words, "-np", "2", "--help"]
    alone = run_python(*words, folder=tmp_path)
    ours = run_python("-m", "keras_towers", *words, folder=tmp_path)
    wanted = alone.stdout.replace("False False", "True False")
    assert ours.stdout == wanted != alone.stdout, alone.stderr + ours.stderr
    assert not ours.stderr


@pytest.mark.alternate(turn=4)
def test_a_job_that_would_train_several_models_fails(run):
    done = run("-np 2", ALONE)
    assert done.code == 1
    assert "trained True" not in done.out
    assert all(part in done.err for part in ADVICE)


def test_separate_models_are_permitted(run):
    done = run("-np 2 --no-strategy", "import sys\nprint(*sys.argv)")
    assert done.code == 0
    assert done.out.count("] script.py\n") == 2
    assert not done.err


@pytest.mark.parametrize(
    "own",
    [
        "keras_towers.NoOpStrategy()",
        "tensorflow.distribute.OneDeviceStrategy('/cpu:0').scope()",
    ],
)
def test_a_second_strategy_is_refused(own, under):
    source = f"import keras_towers, tensorflow\nwith {own}: print('inside')\n"
    said = under(source, strategy="noop")
    assert "inside" not in said.out
    assert "by `keras-towers run --strategy noop`" in said.err
    assert said.err.endswith(
        "or a DistributedOptimizer, leave one of them out.\n"
    )


# It runs on one device as well, up to the call that is refused.
SPLIT = """
import keras, numpy as np
import keras_towers as kt
print(len(kt.virtual_towers(3)), "devices")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.ones((6, 4)), np.ones((6, 1)), verbose=0)
kt.virtual_towers(4)
"""


def test_towers_split_the_cpu_before_the_script_begins(run):
    done = run("-np 1 --strategy tower --towers 3", SPLIT)
    assert done.out == "3 devices\n", done.err
    assert "TowerStrategy: 3 towers (/device:CPU:0 to" in done.err
    # Too late in the script, so the command has an option for it.
    assert "or give `keras-towers run` --towers 4" in done.err
