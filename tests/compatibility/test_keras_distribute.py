"""Keras's own tests of MirroredStrategy pass with TowerStrategy.

They are run as they come in the installed wheel. In the optimizer's file two
tests look at what Keras does between the replicas, where towers do better, on
purpose: ``KNOWN_DIFFERENCES``. What is claimed there is checked below.
"""

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.compatibility import keras_runner

pytestmark = pytest.mark.core

ROOT = pathlib.Path(__file__).resolve().parents[2]
SECONDS = 240

# Required, and one more that tests the same strategy.
MODULES = ("distribute_test", "optimizer_distribute_test")

KNOWN_DIFFERENCES = {
    "optimizer_distribute_test.test_ema": (
        "gives every replica the same tensor object as its gradient, which "
        "TensorFlow takes for one value and does not sum; towers sum what "
        "each of them brings"
    ),
    "optimizer_distribute_test.test_gradient_accumulation": (
        "expects accumulators to hold each replica's own gradients until the "
        "last step; towers sum first, so that clipping and accumulation see "
        "the gradient of the global batch"
    ),
}

# What a Keras test may be skipped for, by what it says.
ALLOWED_SKIPS = ("tf_keras not installed",)


def shipped(module: str) -> bool:
    """Whether the installed Keras says that it has the test module."""
    files = importlib.metadata.files("keras") or []
    path = f"keras/src/backend/tensorflow/{module}.py"
    return any(str(file) == path for file in files)


def names() -> list[str]:
    """The tests of the modules that are there."""
    return [
        keras_runner.short_name(test)
        for module in MODULES
        if shipped(module)
        for test in keras_runner.tests_of(module)
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    """What came of every test, run once in a process of their own."""
    path = tmp_path_factory.mktemp("keras") / "results.json"
    modules = [module for module in MODULES if shipped(module)]
    # The timeout ends only this process.
    done = subprocess.run(
        [sys.executable, "-m", keras_runner.__name__, path, "tower", *modules],
        cwd=ROOT,
        env={
            **os.environ,
            "KERAS_BACKEND": "tensorflow",
            "CUDA_VISIBLE_DEVICES": "-1",
        },
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(path.read_text())


@pytest.mark.parametrize("module", MODULES)
def test_module_is_in_the_wheel(module):
    if not shipped(module):
        pytest.skip(f"Keras {keras.__version__} does not ship {module}.py")
    tests = keras_runner.tests_of(module)
    assert tests, f"{module} of Keras {keras.__version__} holds no test"


def test_every_test_has_run(results):
    assert sorted(results) == sorted(names())
    there = {name for name in KNOWN_DIFFERENCES if shipped(name.split(".")[0])}
    assert there <= set(results)


@pytest.mark.parametrize("name", names())
def test_keras_test(name, results):
    result = results[name]
    if name in KNOWN_DIFFERENCES:
        # Once it passes, it is no longer a difference: take it off the list.
        assert result["outcome"] == "failed"
        assert "AssertionError" in result["detail"]
        return
    if result["outcome"] == "skipped" and result["detail"] in ALLOWED_SKIPS:
        pytest.skip(result["detail"])
    assert result["outcome"] == "passed", result["detail"]
    assert set(result["strategies"]) == {"TowerStrategy"}


STRATEGIES = {
    "mirrored": lambda names: tf.distribute.MirroredStrategy(
        names, tf.distribute.ReductionToOneDevice()
    ),
    "tower": kt.TowerStrategy,
}


def apply_steps(kind: str, steps: int, same_object: bool, **options):
    """Weights after some steps of SGD on a gradient of ones, 2 replicas."""
    strategy = STRATEGIES[kind](["/device:CPU:0", "/device:CPU:1"])
    with strategy.scope():
        variable = keras.Variable([[8.0, 9.0]])
        optimizer = keras.optimizers.SGD(learning_rate=1.0, **options)
        ones = tf.ones([1, 2])

        def step():
            grad = ones if same_object else tf.identity(ones)
            optimizer.apply_gradients([(grad, variable)])

        for _ in range(steps):
            strategy.run(step)
        return variable.numpy()


def test_averages_differ_only_for_one_tensor_object():
    ema = {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3}
    mirrored = apply_steps("mirrored", 3, same_object=False, **ema)
    for same_object in (False, True):
        np.testing.assert_allclose(
            apply_steps("tower", 3, same_object, **ema), mirrored, rtol=1e-6
        )
    other = apply_steps("mirrored", 3, same_object=True, **ema)
    assert not np.allclose(other, mirrored)


@pytest.mark.parametrize("steps", [2, 3])
def test_accumulation_gives_the_same_weights(steps):
    both = [
        apply_steps(kind, steps, True, gradient_accumulation_steps=3)
        for kind in STRATEGIES
    ]
    np.testing.assert_allclose(both[0], both[1], rtol=1e-6)
    moved = 2.0 if steps == 3 else 0.0
    np.testing.assert_allclose(both[1], [[8.0 - moved, 9.0 - moved]])
