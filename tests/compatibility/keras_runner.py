"""Runs test modules of the installed Keras with another MirroredStrategy.

A process of its own: those tests throw TensorFlow's context away and split the
CPU anew in each ``setUp``, which no other test would survive.

Usage: python -m tests.compatibility.keras_runner RESULTS MODULE...
"""

import importlib
import json
import pathlib
import sys
import unittest

import tensorflow as tf

# Now: it has to be made of the strategy that is about to be replaced.
from keras_towers import TowerStrategy


def tests_of(suite):
    """Every test of a suite of suites."""
    for item in suite:
        yield from tests_of(item) if hasattr(item, "__iter__") else [item]


def main(results, *modules):
    """Run all tests of the modules, and write what came of them.

    Of each test, by ``module.method``: what failed, why it was skipped, and how
    many strategies it has built.
    """
    built = []

    def build(devices=None):
        built.append(TowerStrategy(devices))
        return built[-1]

    tf.distribute.MirroredStrategy = build
    report = {}
    for name in modules:
        module = importlib.import_module(f"keras.src.backend.tensorflow.{name}")
        for test in tests_of(
            unittest.defaultTestLoader.loadTestsFromModule(module)
        ):
            before, result = len(built), unittest.TestResult()
            test.run(result)
            method = test.id().split()[0].rpartition(".")[2]
            failed = [detail for _, detail in result.errors + result.failures]
            skipped = [why for _, why in result.skipped]
            here = report.setdefault(f"{name}.{method}", [[], [], 0])
            here[:] = (
                here[0] + failed,
                here[1] + skipped,
                here[2] + len(built) - before,
            )
    pathlib.Path(results).write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
