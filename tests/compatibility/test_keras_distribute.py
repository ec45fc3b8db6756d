"""Keras's own tests of MirroredStrategy pass with TowerStrategy.

They are run as they come in the installed wheel. In the optimizer's file two
tests look at what Keras does between the replicas, where towers do better, on
purpose: ``DIFFERENCES``. What is claimed there is checked by the cases of
the contract that average and accumulate.
"""

import importlib
import json
import pathlib
import sys
import unittest

import pytest
import tensorflow as tf

# Now: it has to be made of the strategy that is about to be replaced.
from keras_towers import TowerStrategy
from tests.kit.sampling import sample_of
from tests.kit.scripts import run_python

pytestmark = pytest.mark.alternate

# By module, which of its tests fail, and why they may.
DIFFERENCES = {
    "distribute_test": {},
    "optimizer_distribute_test": {
        "test_ema": (
            "gives every replica the same tensor object as its gradient, which "
            "TensorFlow takes for one value and does not sum; towers sum what "
            "each of them brings"
        ),
        "test_gradient_accumulation": (
            "expects accumulators to hold each replica's own gradients until "
            "the last step; towers sum first, so that clipping and "
            "accumulation see the gradient of the global batch"
        ),
    },
}
# What a Keras test may be skipped for, by what it says.
ALLOWED_SKIPS = ["tf_keras not installed"]


def every_test(suite):
    """Every test of a suite of suites."""
    for item in suite:
        yield from every_test(item) if hasattr(item, "__iter__") else [item]


def main(name, results):
    """Run a module's tests with another MirroredStrategy.

    It writes, by each test's method: what failed, why it was skipped, and how
    many strategies it has built.

    In a process of its own: those tests throw TensorFlow's context away and
    split the CPU anew in each ``setUp``, which no other test would survive.
    """
    built = []

    def build(devices=None):
        built.append(TowerStrategy(devices))
        return built[-1]

    tf.distribute.MirroredStrategy = build
    report = {}
    module = importlib.import_module(f"keras.src.backend.tensorflow.{name}")
    loaded = unittest.defaultTestLoader.loadTestsFromModule(module)
    for test in every_test(loaded):
        before, result = len(built), unittest.TestResult()
        test.run(result)
        method = test.id().split()[0].rpartition(".")[2]
        here = report.setdefault(method, [[], [], 0])
        here[0] += [text for _, text in result.errors + result.failures]
        here[1] += [why for _, why in result.skipped]
        here[2] += len(built) - before
    pathlib.Path(results).write_text(json.dumps(report))


@pytest.mark.parametrize("module", sample_of(DIFFERENCES))
def test_tests_of_keras_pass(module, tmp_path):
    path = tmp_path / "results.json"
    done = run_python(
        *("-m", "tests.compatibility.test_keras_distribute", module, path),
        CUDA_VISIBLE_DEVICES="-1",
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(path.read_text())
    assert results
    failed = {name: found for name, (found, *_) in results.items() if found}
    # Once one passes, it is no longer a difference: take it off the list.
    assert failed.keys() == DIFFERENCES[module].keys(), failed
    for name, (errors, skipped, strategies) in results.items():
        assert all("AssertionError" in error for error in errors)
        assert skipped in ([], ALLOWED_SKIPS), name
        assert strategies or skipped, name


if __name__ == "__main__":
    main(*sys.argv[1:])
