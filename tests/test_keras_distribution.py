"""``keras.distribution`` trains on towers once keras_towers is imported."""

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers import distribution as distribution_lib
from keras_towers import jobs
from tests.kit.compare import (
    assert_exact,
    assert_towers_equal,
    close,
    same_history,
    same_model,
)
from tests.kit.ordinary import Originals, assert_ordinary
from tests.kit.training import X, Y, classifier, fit

ROOT = Path(__file__).parents[1]
DataParallel = keras.distribution.DataParallel
set_distribution = keras.distribution.set_distribution


def first(number: int) -> DataParallel:
    return DataParallel(devices=[f"cpu:{index}" for index in range(number)])


@pytest.fixture(autouse=True)
def end():
    yield
    set_distribution(None)


def towers_of(model) -> list[str]:
    """The devices that hold the model's first weight."""
    value = model.trainable_variables[0]._value
    return [part.device[-5:] for part in getattr(value, "values", [value])]


@pytest.mark.core
@pytest.mark.parametrize("towers", [1, 2, 3, 8])
def test_scope_gives_what_one_device_gives(towers):
    """Also where the last batch is uneven, or smaller than the towers."""

    def act(model):
        return fit(model, x=X[:53], y=Y[:53])

    assert_exact(classifier, act, first(towers).scope())


@pytest.mark.core
def test_set_for_good_and_ended():
    reference, model = classifier(), classifier()
    originals = Originals(model)
    history = fit(reference, epochs=2), fit(reference)
    set_distribution(first(3))
    found = fit(model, epochs=2), fit(model)
    assert_towers_equal(model)
    assert towers_of(model) == ["CPU:0", "CPU:1", "CPU:2"]
    assert not tf.distribute.has_strategy()
    set_distribution(None)
    assert_ordinary(model)
    originals.assert_back()
    for mine, wanted in zip(found, history, strict=True):
        same_history(mine, wanted)
    same_model(model, reference)
    # Each goes on as an ordinary model.
    same_history(fit(model), fit(reference))


def test_every_method_runs_on_the_towers():
    reference, model = classifier(), classifier()

    def results(model):
        train = [model.train_on_batch(X[:7], Y[:7]) for _ in range(3)]
        return [
            train,
            model.test_on_batch(X[:7], Y[:7]),
            model.predict_on_batch(X[:7]),
            model.evaluate(X[:21], Y[:21], verbose=0),
            model.predict(X[:21], verbose=0),
        ]

    wanted = results(reference)
    with first(3).scope():
        found = results(model)
        assert len(towers_of(model)) == 3
    tf.nest.map_structure(close, found, wanted)
    same_model(model, reference)


def test_a_loop_of_calls_traces_once():
    traces = []

    class Counted(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            traces.append(1)
            return super().train_step(data)

    model = Counted()
    model.compile("adam", "mse")
    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    with first(2).scope():
        for _ in range(2):
            model.fit(x, y, verbose=0)
        once = len(traces)
        for _ in range(5):
            model.fit(x, y, verbose=0)
        assert len(traces) == once
    assert int(model.optimizer.iterations) == 7


def test_the_devices_of_a_mesh():
    mesh = keras.distribution.DeviceMesh((2,), ["batch"], ["cpu:5", "cpu:2"])
    seen = set()

    def look(epoch, logs):
        strategy = tf.distribute.get_strategy()
        seen.update(d[-5:] for d in strategy.extended.worker_devices)

    note = keras.callbacks.LambdaCallback(on_epoch_end=look)
    with DataParallel(device_mesh=mesh).scope():
        fit(classifier(), callbacks=[note])
    assert seen == {"CPU:2", "CPU:5"}


def test_default_is_all_devices():
    assert keras.distribution.list_devices() == [f"cpu:{i}" for i in range(8)]
    assert keras.distribution.get_device_count() == 8
    model = classifier()
    with DataParallel().scope():
        fit(model)
        assert len(towers_of(model)) == 8


def test_another_distribution_between_fits():
    reference, model = classifier(), classifier()
    for _ in range(3):
        fit(reference)
    set_distribution(first(2))
    fit(model)
    assert len(towers_of(model)) == 2
    with first(3).scope():
        assert_ordinary(model)
        fit(model)
        assert len(towers_of(model)) == 3
    assert_ordinary(model)
    fit(model)
    assert len(towers_of(model)) == 2
    set_distribution(None)
    same_model(model, reference)


def test_after_an_error_the_model_is_an_ordinary_one():
    model = classifier()

    def stop(epoch, logs):
        raise KeyError("mine")

    note = keras.callbacks.LambdaCallback(on_epoch_end=stop)
    with pytest.raises(KeyError, match="mine"), first(2).scope():
        fit(model, callbacks=[note])
    assert_ordinary(model)
    assert np.isfinite(fit(model)["loss"]).all()


def test_cleared_session_ends_it():
    model = classifier()
    set_distribution(first(2))
    fit(model)
    keras.utils.clear_session()
    fit(model)
    assert_ordinary(model)


def test_own_loop_between_calls():
    """As inside the block of a strategy, a loop by hand is on one device."""

    def act(model):
        fit(model)
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(model(X[:8]) ** 2)
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, variables), variables)
        return fit(model)

    assert_exact(classifier, act, first(3).scope())


def test_model_parallel_is_refused():
    mesh = keras.distribution.DeviceMesh((2, 4), ["batch", "model"])
    layouts = keras.distribution.LayoutMap(mesh)
    parallel = keras.distribution.ModelParallel(layout_map=layouts)
    with pytest.raises(kt.TowerError, match="ModelParallel is not available"):
        set_distribution(parallel)
    assert keras.distribution.distribution() is None


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: kt.TowerStrategy(2),
        lambda: kt.TowerStrategy(1),
        lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope(),
    ],
)
def test_conflict_with_a_strategy(strategy):
    model = classifier()
    set_distribution(first(2))
    with (
        strategy(),
        pytest.raises(kt.TowerError, match="leave that scope"),
    ):
        fit(model)
    fit(model)
    assert len(towers_of(model)) == 2


def test_not_changed_while_a_model_trains():
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: set_distribution(None)
    )
    with (
        pytest.raises(kt.TowerError, match="while a model trains"),
        first(2).scope(),
    ):
        fit(classifier(), callbacks=[note])


def test_unknown_devices():
    with (
        pytest.raises(kt.TowerError, match="no device 'gpu:7'"),
        DataParallel(devices=["gpu:7"]).scope(),
    ):
        fit(classifier())


def test_validation_and_callbacks_see_the_distribution():
    distribution, seen = first(2), []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(
            keras.distribution.distribution()
        )
    )
    with distribution.scope():
        fit(classifier(), callbacks=[note], validation_data=(X[:9], Y[:9]))
    assert seen and all(one is distribution for one in seen)


def test_can_be_undone():
    method = keras.Model.fit
    inside = method.__wrapped__
    # Without keras_towers, Keras 3.14 cannot create it.
    distribution = first(2)
    distribution_lib.disconnect()
    try:
        assert keras.Model.fit.__wrapped__ is not inside
        assert not distribution_lib.is_connected()
        model = classifier()
        with distribution.scope():
            fit(model)
            assert len(towers_of(model)) == 1
        assert not hasattr(keras.src.backend.distribution_lib, "num_processes")
    finally:
        distribution_lib.connect()
    assert keras.Model.fit is method


class Joined:
    """A job as a rank knows it."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size


def test_devices_of_a_job(monkeypatch):
    monkeypatch.setattr(jobs, "_job", Joined(rank=1, size=2))
    names = keras.distribution.list_devices()
    assert names == [f"cpu:{index}" for index in range(16)]
    assert keras.src.backend.distribution_lib.num_processes() == 2
    assert jobs._own(names, 1, 2) == [f"cpu:{index}" for index in range(8)]
    assert jobs._own(["gpu:0", "gpu:1"], 1, 2) == ["gpu:0"]
    for wrong in (["cpu:0"], ["cpu:0", "cpu:8", "cpu:9"], ["cpu:0", "cpu:16"]):
        with pytest.raises(kt.TowerError, match="each of the 2 processes"):
            jobs._own(wrong, 1, 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [({}, None), ({"num_processes": 2}, "no launcher started")],
)
def test_initialize_without_a_launcher(monkeypatch, caplog, given, said):
    for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    if said is None:
        with caplog.at_level(logging.WARNING, "keras_towers"):
            keras.distribution.initialize(**given)
        assert "keras-towers run" in caplog.text
        return
    with pytest.raises(kt.TowerError, match=said):
        keras.distribution.initialize(**given)


def test_launched_but_not_initialized(monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with (
        pytest.raises(kt.TowerError, match="initialize"),
        first(2).scope(),
    ):
        fit(classifier())


def _python(code: str, *arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


TOWERS_OF_FIT = """
kt.virtual_towers(2)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
with keras.distribution.DataParallel().scope():
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    print(len(model.trainable_variables[0]._value.values))
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import keras, numpy as np, keras_towers as kt",
        pytest.param(
            "import keras_towers as kt, numpy as np, keras",
            marks=pytest.mark.long,
        ),
        # Looking for Keras is not importing it.
        "import importlib.util, keras_towers as kt, numpy as np\n"
        "assert importlib.util.find_spec('keras')\nimport keras",
    ],
)
def test_any_order_of_imports(imports):
    assert _python(imports + TOWERS_OF_FIT) == "2"


def test_import_stays_cheap():
    code = """
import sys, keras_towers
print([name for name in ("tensorflow", "keras") if name in sys.modules])
"""
    assert _python(code) == "[]"


# One script for every backend of Keras; imports keras_towers or does not.
SCRIPT = """
import sys

if sys.argv[2] == "with":
    import keras_towers
import keras
import numpy as np

if keras.backend.backend() == "tensorflow":
    keras_towers.virtual_towers(4)
keras.distribution.set_distribution(keras.distribution.DataParallel())
print(keras.distribution.distribution().device_mesh.devices.size)
random = np.random.default_rng(0)
x = random.normal(size=(64, 5)).astype("float32")
y = random.integers(0, 3, 64)
model = keras.Sequential(
    [
        keras.Input((5,)),
        keras.layers.Dense(8, activation="tanh", name="a"),
        keras.layers.Dense(3, name="b"),
    ]
)
model.set_weights(
    [random.normal(size=w.shape).astype("float32") for w in model.weights]
)
model.compile(
    keras.optimizers.SGD(0.1, momentum=0.9),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
keras.distribution.set_distribution(None)
np.savez(sys.argv[1], *model.get_weights())
"""


def _weights_by(backend: str, path, with_towers: str = "with"):
    replicas = _python(
        SCRIPT,
        str(path),
        with_towers,
        KERAS_BACKEND=backend,
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )
    with np.load(path) as found:
        return int(replicas), [found[name] for name in found.files]


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_one_script_on_other_backends(backend, tmp_path):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    replicas, found = _weights_by("tensorflow", tmp_path / "tensorflow.npz")
    assert replicas == 4
    # There, keras_towers changes nothing.
    for with_towers in ("with", "without"):
        _, wanted = _weights_by(backend, tmp_path / "b.npz", with_towers)
        for mine, other in zip(found, wanted, strict=True):
            close(mine, other, 1e-5)


def test_one_script_on_one_device(tmp_path):
    """What the script of the other backends gives with no distribution."""
    replicas, found = _weights_by("tensorflow", tmp_path / "towers.npz")
    assert replicas == 4
    one = "keras.distribution.set_distribution(None)\nmodel.fit"
    code = SCRIPT.replace("model.fit", one)
    path = tmp_path / "one.npz"
    _python(code, str(path), "with", KERAS_BACKEND="tensorflow")
    with np.load(path) as wanted:
        for mine, name in zip(found, wanted.files, strict=True):
            close(mine, wanted[name])
