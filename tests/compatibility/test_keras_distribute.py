"""Keras's own tests of MirroredStrategy pass with TowerStrategy.

They are run as they come in the installed wheel. In the optimizer's file two
tests look at what Keras does between the replicas, where towers do better, on
purpose: ``KNOWN_DIFFERENCES``. What is claimed there is checked by the cases of
the contract that average and accumulate.
"""

import importlib.util
import json

import keras

from tests.kit import warm
from tests.kit.scripts import python

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
ALLOWED_SKIPS = ["tf_keras not installed"]


def test_tests_of_keras(tmp_path):
    path = tmp_path / "results.json"
    for module in MODULES:
        found = importlib.util.find_spec(
            f"keras.src.backend.tensorflow.{module}"
        )
        assert found, f"Keras {keras.__version__} does not ship {module}.py"
    done = python(
        *("-m", "tests.compatibility.keras_runner", path, *MODULES),
        CUDA_VISIBLE_DEVICES="-1",
        **warm.environment(),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(path.read_text())
    assert {name.split(".")[0] for name in results} == {*MODULES}
    failed = {name: found for name, (found, *_) in results.items() if found}
    # Once one passes, it is no longer a difference: take it off the list.
    assert failed.keys() == KNOWN_DIFFERENCES.keys(), failed
    for name, (errors, skipped, strategies) in results.items():
        assert all("AssertionError" in error for error in errors)
        assert skipped in ([], ALLOWED_SKIPS), name
        assert strategies or skipped, name
