"""Runs test modules of the installed Keras with another MirroredStrategy.

A process of its own: those tests throw TensorFlow's context away and split the
CPU anew in each ``setUp``, which no other test would survive.

Usage: python -m tests.compatibility.keras_runner RESULTS STRATEGY MODULE...
"""

from __future__ import annotations

import importlib
import json
import pathlib
import sys
import unittest

import tensorflow as tf

# Now: it has to be made of the strategy that is about to be replaced.
from keras_towers import TowerStrategy

KERAS_TESTS = "keras.src.backend.tensorflow"


def short_name(test: unittest.TestCase) -> str:
    """``module.method`` of a test, its parameters left out."""
    module = type(test).__module__.rpartition(".")[2]
    return f"{module}.{test.id().split()[0].rpartition('.')[2]}"


def tests_of(module_name: str) -> list[unittest.TestCase]:
    """Every test of a test module of the installed Keras."""
    module = importlib.import_module(f"{KERAS_TESTS}.{module_name}")
    suites = [unittest.defaultTestLoader.loadTestsFromModule(module)]
    found: list[unittest.TestCase] = []
    while suites:
        for item in suites.pop():
            if isinstance(item, unittest.TestSuite):
                suites.append(item)
            else:
                found.append(item)
    return found


def replace_mirrored(kind: str) -> list[str]:
    """Put a strategy in place of MirroredStrategy.

    Args:
        kind: "tower", or "mirrored" to only count what is built.

    Returns:
        A list that the class of every strategy built is appended to.
    """
    stock = tf.distribute.MirroredStrategy
    built: list[str] = []

    def build(devices=None, cross_device_ops=None):
        if kind == "mirrored":
            strategy = stock(devices, cross_device_ops)
        else:
            assert cross_device_ops is None, "towers have a mode instead"
            strategy = TowerStrategy(devices)
        built.append(type(strategy).__name__)
        return strategy

    tf.distribute.MirroredStrategy = build
    return built


def run(test: unittest.TestCase) -> dict[str, str]:
    """Run one test: what came of it, and why."""
    result = unittest.TestResult()
    test.run(result)
    for outcome, reports in (
        ("failed", [*result.errors, *result.failures]),
        ("skipped", result.skipped),
    ):
        if reports:
            return {"outcome": outcome, "detail": reports[0][1]}
    return {"outcome": "passed", "detail": ""}


def main(results: str, kind: str, *modules: str) -> None:
    """Run all tests of the modules, and write what came of them."""
    built = replace_mirrored(kind)
    report = {}
    for module in modules:
        for test in tests_of(module):
            before = len(built)
            report[short_name(test)] = {
                **run(test),
                "strategies": built[before:],
            }
    pathlib.Path(results).write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
