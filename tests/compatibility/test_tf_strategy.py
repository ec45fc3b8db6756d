"""TensorFlow's checks for any strategy pass with TowerStrategy.

``strategy_test_lib`` of the installed TensorFlow holds the checks that its own
``mirrored_strategy_test.py`` (not in the wheel) calls. Here every check runs,
in eager and in graph mode. Some skip themselves, or are made for one mode or
for remote devices: none ends otherwise than with stock MirroredStrategy.
"""

import contextlib
import inspect
import itertools
import random
import socket
import sys
import types
import unittest

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute import strategy_test_lib as lib
from tensorflow.python.eager import context
from tensorflow.python.framework import ops

import keras_towers as kt
from tests.kit.sampling import sample_of

pytestmark = pytest.mark.alternate


class Suite(lib.DistributionTestBase):
    """What does not depend on the number of devices."""

    __test__ = False  # Its checks are collected below.
    towers = 2

    def _create_session(self, graph, config, force_gpu):
        # Without a configuration of its own a session has all logical CPUs.
        if config is not None:
            config.device_count["CPU"] = self.towers
        return super()._create_session(graph, config, force_gpu)

    def _get_num_gpus(self):
        return self.towers


class OneDevice(Suite, lib.OneDeviceDistributionTestBase):
    """What TensorFlow's own tests run on a MirroredStrategy of one device."""

    towers = 1


class TwoDevices(Suite, lib.TwoDeviceDistributionTestBase):
    """What TensorFlow's own tests run on a MirroredStrategy of two devices."""


class OneWorker(Suite, lib.RemoteSingleWorkerMirroredStrategyBase):
    """What TensorFlow's own tests run on all GPUs of a remote worker."""


# Not checks: they take more than a strategy, and checks call them.
HELPERS = ("_test_input_fn", "_test_collective_comms")


def checks_of(suite):
    """Names of all checks that a test base of the library has."""
    return {
        name
        for name in dir(suite)
        if name.startswith("_test") and not name.startswith(HELPERS)
    }


def cases():
    """Every check, in both modes, and inside a tf.function where it can be."""
    seen = {OneDevice: set(), TwoDevices: set(), OneWorker: checks_of(Suite)}
    for suite, others in seen.items():
        for name, eager in itertools.product(
            sorted(checks_of(suite) - others), ("eager", "graph")
        ):
            yield suite, name, eager, {}
            parameters = inspect.signature(getattr(suite, name)).parameters
            if "run_in_function" in parameters:
                yield suite, name, eager, {"run_in_function": True}


def run(make, suite, name, eager, arguments):
    """Run one check as TensorFlow's test runner would, and say how it went."""
    devices = [f"/device:CPU:{index}" for index in range(suite.towers)]

    class Test(suite):
        def runTest(self):
            with contextlib.ExitStack() as stack:
                if eager == "graph":
                    stack.enter_context(ops.Graph().as_default())
                    stack.enter_context(context.graph_mode())
                getattr(self, name)(make(devices), **arguments)

    result = unittest.TestResult()
    Test().run(result)
    for outcome in ("skipped", "errors", "failures"):
        for _, detail in getattr(result, outcome):
            return outcome, detail
    return "passed", ""


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch):
    """Undo the seeds that TensorFlow's TestCase sets, and find it a port."""
    state, numpys = random.getstate(), np.random.get_state()
    seed = context.global_seed()
    # A package that TensorFlow uses in tests only, and does not require.
    stub = types.SimpleNamespace(pick_unused_port=_free_port)
    monkeypatch.setitem(sys.modules, "portpicker", stub)
    yield
    random.setstate(state)
    np.random.set_state(numpys)
    context.set_global_seed(seed)


def _free_port():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def mirrored(devices):
    # Its default for CPUs breaks down for good, for all strategies of the
    # process, once a collective in a tf.function has failed.
    return tf.distribute.MirroredStrategy(
        devices, tf.distribute.ReductionToOneDevice()
    )


def test_no_check_is_forgotten():
    known = set().union(*map(checks_of, (OneDevice, TwoDevices, OneWorker)))
    for base in vars(lib).values():
        if isinstance(base, type) and issubclass(base, unittest.TestCase):
            assert checks_of(base) <= known, base


def named(case):
    suite, name, mode, arguments = case
    return "-".join([suite.__name__, name.lstrip("_"), mode, *arguments])


# A function in a graph is what it is outside of one.
ONCE = [
    pytest.param(case) for case in cases() if case[2] == "eager" or not case[3]
]


@pytest.mark.parametrize("case", sample_of(ONCE, 4), ids=named)
def test_checks_of_tensorflow_pass(case):
    outcome, detail = run(kt.TowerStrategy, *case)
    if outcome != "passed":
        assert run(mirrored, *case)[0] == outcome, detail
