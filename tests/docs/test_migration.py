"""The names and options of the page on migration exist; its scripts run."""

import ast
import contextlib
import functools
import inspect
import re
import shlex
import shutil
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.docs import migration
from tests.kit.long import long_but
from tests.kit.scripts import ROOT, inherited
from tests.launching.jobs import Launched

SCRIPTS = migration.scripts()
PIECES = migration.pieces()
STRATEGIES = [getattr(kt, n) for n in kt.__all__ if n.endswith("Strategy")]
# They are made without other processes.
ALONE = "Tower", "ParameterServerTower", "AsyncTower", "NoOp"

# What the scripts start with; n is the number of processes.
BEGIN = """
import keras
import numpy as np

import keras_towers as kt

n = 2
x = np.random.default_rng(0).random((192, 20), "float32")
y = x.sum(axis=1, keepdims=True)


def make_model():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((20,)), *layers])


"""
# How a process of a job hands in its model.
END = """

import os
np.savez(f"model-{os.getpid()}.npz", *model.get_weights())
"""
_BLOCK = re.compile(r"with kt\.\w+\(.*\):")


def test_names_in_the_tables_exist():
    for piece in PIECES:
        whole = re.match(r"kt((?:\.\w+)+)", piece)
        names = whole[1].split(".")[1:] if whole else []
        functools.reduce(getattr, names, kt)
        if of_strategy := re.match(r"strategy\.(\w+)", piece):
            assert any(hasattr(kind, of_strategy[1]) for kind in STRATEGIES)


def test_strategies_in_the_tables_take_their_options():
    calls = [re.search(r"\w+Strategy\(.*\)", piece) for piece in PIECES]
    for piece in [call[0] for call in calls if call]:
        call = ast.parse(piece).body[0].value
        kind = getattr(kt, call.func.id)
        options = {word.arg: word.value for word in call.keywords}
        inspect.signature(kind).bind(*call.args, **options)
        if (
            kind.__name__.removesuffix("Strategy") in ALONE
            and "..." not in piece
        ):
            given = {n: ast.literal_eval(v) for n, v in options.items()}
            kind(*[migration.DEVICES] * len(call.args), **given)
    options = inspect.signature(kt.SyncReplicasStrategy).parameters
    assert {"replicas_to_aggregate", "total_num_replicas"} <= options.keys()
    assert "variable_averages" in options


def test_devices_are_those_of_tensorflow():
    for given in ([], [migration.DEVICES]):
        stock = tf.distribute.MirroredStrategy(*given)
        found = kt.TowerStrategy(*given).extended.worker_devices
        assert found == stock.extended.worker_devices


def run_here(code, **names):
    """Run a script in this process; the weights of its model."""
    namespace = {"tf": tf, "kt": kt, "devices": migration.DEVICES, **names}
    exec(BEGIN + code, namespace)
    return namespace["model"].get_weights()


def on_one_device(name):
    """The weights of a script without its strategy."""
    code = _BLOCK.sub("with contextlib.nullcontext():", SCRIPTS[name].after)
    code = re.sub(r"keras\.distribution\.set_.*", "", code)
    if "each" in name:
        # Each of two towers draws a batch.
        code = code.replace("batch_size=32", "batch_size=64")
    return run_here(code, contextlib=contextlib)


def assert_close(found, wanted):
    for mine, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    long_but(
        lambda name: name == "TowerStrategy(devices)",
        [
            *("TowerStrategy(devices)", 'TowerStrategy(2, batches="each")'),
            "DataParallel()",
        ],
    ),
)
def test_scripts_of_one_process(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = run_here(SCRIPTS[name].after)
    keras.distribution.set_distribution(None)
    assert_close(found, on_one_device(name))
    if name == "TowerStrategy(devices)":
        # What stood there before.
        assert_close(run_here(SCRIPTS[name].before), found)


def models_of(folder):
    """The weights that each process of a job has ended with."""
    models = []
    for path in sorted(folder.glob("model-*.npz")):
        with np.load(path) as found:
            models.append([found[name] for name in found.files])
    return models


def run_job(folder, code, command):
    """Run a script as its page says; the weights of all processes."""
    # TensorFlow hears of the task when keras_towers is imported.
    warm = "MultiWorker" not in code
    (folder / "train.py").write_text(BEGIN + code + END)
    program, run, *arguments = shlex.split(command)
    assert (program, run) == ("keras-towers", "run")
    done = Launched(folder, tuple(arguments), warm=warm).finish(120)
    assert done.code == 0, done.out + done.err
    return models_of(folder)


JOBS = [
    ("HorovodStrategy()", "horovod", None),
    ("MultiWorkerTowerStrategy()", None, None),
    ("BytePSStrategy()", "byteps", None),
    ("SyncReplicasStrategy(replicas_to_aggregate=2)", None, None),
    ("HorovodStrategy()", "horovod", "horovod.keras"),
    ("BytePSStrategy()", "byteps", "byteps.tensorflow.keras"),
]


# Other jobs of each engine are in tests/processes.
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("name", "engine", "import_of"), JOBS)
def test_scripts_of_several_processes(
    name, engine, import_of, tmp_path, monkeypatch
):
    """With another import ranks read every second row, and train the same."""
    if engine:
        pytest.importorskip(f"{engine}.common")
    script = SCRIPTS[name]
    code = script.after
    if import_of:
        parts = script.before.split(f"import {import_of} as")
        code = "import tensorflow as tf\n" + parts[0]
        code += f"import keras_towers.{engine} as" + parts[1]
    models = run_job(tmp_path, code, script.command)
    assert len(models) == 2
    monkeypatch.chdir(tmp_path)
    wanted = on_one_device(name)
    for found in models:
        assert_close(found, wanted)


@pytest.mark.slow
@pytest.mark.long
def test_asynchronous_workers_of_a_parameter_server(tmp_path):
    """They learn, and end with the same model."""
    name = "DistributedParameterServerStrategy(sync=False)"
    script = SCRIPTS[name]
    one, other = run_job(tmp_path, script.after, script.command)
    assert_close(one, other)
    begun = run_here("model = make_model()")
    pairs = zip(one, begun, strict=True)
    assert any(np.abs(after - before).max() > 1e-3 for after, before in pairs)


@pytest.mark.slow
@pytest.mark.long
def test_horovodrun(tmp_path):
    pytest.importorskip("horovod.common")
    path = shutil.which("horovodrun") or f"{sys.prefix}/bin/horovodrun"
    script = SCRIPTS["HorovodStrategy()"].after
    (tmp_path / "train.py").write_text(BEGIN + script + END)
    done = subprocess.run(
        [path, "-np", "2", sys.executable, "train.py"],
        cwd=tmp_path,
        env={**inherited(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    one, other = models_of(tmp_path)
    assert_close(one, other)
