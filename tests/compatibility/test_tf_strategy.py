"""TensorFlow's checks for any strategy pass with TowerStrategy.

``strategy_test_lib`` of the installed TensorFlow holds the checks that its own
``mirrored_strategy_test.py`` (not in the wheel) calls. Here every check runs,
in eager and in graph mode, on as many towers as it is made for; none is left
out but those in ``LEFT_OUT``, which stock MirroredStrategy cannot do either.
"""

import contextlib
import functools
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


class Suite(lib.DistributionTestBase):
    """What does not depend on the number of devices."""

    __test__ = False  # Its checks are collected below.

    def _create_session(self, graph, config, force_gpu):
        # Without a configuration of its own a session has all logical CPUs.
        if config is not None:
            config.device_count["CPU"] = max(towers for _, towers in SUITES)
        return super()._create_session(graph, config, force_gpu)


class OneDevice(Suite, lib.OneDeviceDistributionTestBase):
    """What TensorFlow's own tests run on a MirroredStrategy of one device."""


class TwoDevices(Suite, lib.TwoDeviceDistributionTestBase):
    """What TensorFlow's own tests run on a MirroredStrategy of two devices."""


class OneWorker(Suite, lib.RemoteSingleWorkerMirroredStrategyBase):
    """What TensorFlow's own tests run on all GPUs of a remote worker."""

    towers = 0

    def _get_num_gpus(self):
        return self.towers


SUITES = [
    (OneDevice, 1),
    (TwoDevices, 2),
    (Suite, 4),
    (OneWorker, 2),
    (OneWorker, 4),
]

# Not checks: they take more than a strategy, and checks call them.
HELPERS = {
    "_test_input_fn_iterable",
    "_test_input_fn_iterator",
    "_test_collective_comms",
    "_test_collective_comms_gradients",
    "_test_collective_comms_gradient_tape",
}

V1_ONLY = "skips itself: for strategies of tf.compat.v1 only"
EAGER_ONLY = "made for eager mode: calls numpy()"
TF_GRADIENTS = "skips itself: tf.gradients needs a graph"
CLUSTER = "skips itself: needs a session on another server, so graph mode"
REMOTE = "wants devices of a /job:worker; the towers of a machine are local"

# (check, eager, in a tf.function) -> why it cannot run.
LEFT_OUT = {
    **{
        ("_test_numpy_dataset", eager, inside): V1_ONLY
        for eager in (True, False)
        for inside in (True, False)
    },
    **{
        (f"_test_all_reduce_{op}_gradients", True, False): TF_GRADIENTS
        for op in ("sum", "mean")
    },
    ("_test_minimize_loss_eager", False, False): EAGER_ONLY,
    ("_test_device_and_input_device_are_colocated", True, False): CLUSTER,
    (
        "_test_device_and_input_device_are_colocated_with_function",
        True,
        False,
    ): CLUSTER,
    ("_testDeviceScope", True, False): REMOTE,
    ("_testDeviceScope", False, False): REMOTE,
}


def checks_of(suite: type) -> list[str]:
    """Names of all checks that a test base of the library has."""
    return sorted(
        name
        for name in dir(suite)
        if name.startswith("_test") and name not in HELPERS
    )


def cases() -> list[tuple]:
    """Every check, both modes, and inside a tf.function where it can be."""
    found = []
    for suite, towers in SUITES:
        for name, eager in itertools.product(checks_of(suite), (True, False)):
            # The last suite has all checks of Suite once more.
            if suite is OneWorker and hasattr(Suite, name):
                continue
            parameters = inspect.signature(getattr(suite, name)).parameters
            found.append((suite, towers, name, eager, False))
            if "run_in_function" in parameters:
                found.append((suite, towers, name, eager, True))
    return found


def can_run(case: tuple) -> bool:
    return case[2:] not in LEFT_OUT


def describe(case: tuple) -> str:
    suite, towers, name, eager, inside = case
    mode = "eager" if eager else "graph"
    return f"{suite.__name__}{towers}-{name.lstrip('_')}-{mode}" + (
        "-function" * inside
    )


def devices(towers: int) -> list[str]:
    return [f"/device:CPU:{index}" for index in range(towers)]


def mirrored(towers: int) -> tf.distribute.Strategy:
    # Its default for CPUs breaks down for good, for all strategies of the
    # process, once a collective in a tf.function has failed.
    return tf.distribute.MirroredStrategy(
        devices(towers), tf.distribute.ReductionToOneDevice()
    )


def tower(towers: int) -> tf.distribute.Strategy:
    return kt.TowerStrategy(devices(towers))


def run(case: tuple, make) -> tuple[str, str]:
    """Run one check as TensorFlow's test runner would, and say how it went."""
    suite, towers, name, eager, inside = case
    arguments = {"run_in_function": True} if inside else {}

    class Test(suite):
        def runTest(self):
            self.towers = towers
            with contextlib.ExitStack() as stack:
                if not eager:
                    stack.enter_context(ops.Graph().as_default())
                    stack.enter_context(context.graph_mode())
                getattr(self, name)(make(towers), **arguments)

    result = unittest.TestResult()
    Test().run(result)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    if result.errors or result.failures:
        return "failed", (result.errors + result.failures)[0][1]
    return "passed", ""


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch):
    """Undo the seeds that TensorFlow's TestCase sets, and find it a port."""
    states = random.getstate(), np.random.get_state()
    seed = context.global_seed()
    # A package that TensorFlow uses in tests only, and does not require.
    stub = types.SimpleNamespace(pick_unused_port=_free_port)
    monkeypatch.setitem(sys.modules, "portpicker", stub)
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    context.set_global_seed(seed)


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as server:
        server.bind(("", 0))
        return server.getsockname()[1]


def test_no_check_is_forgotten():
    bases = [
        value
        for value in vars(lib).values()
        if isinstance(value, type) and issubclass(value, unittest.TestCase)
    ]
    known = {name for suite, _ in SUITES for name in checks_of(suite)}
    for base in bases:
        assert set(checks_of(base)) <= known, base
    assert {name for name, *_ in LEFT_OUT} <= known
    running = {case[2] for case in cases() if can_run(case)}
    assert known - running == {"_testDeviceScope", "_test_numpy_dataset"}


@pytest.mark.parametrize(
    "case", [case for case in cases() if can_run(case)], ids=describe
)
def test_check(case):
    outcome, detail = run(case, tower)
    assert outcome == "passed", detail


@pytest.mark.parametrize(
    "case", [case for case in cases() if not can_run(case)], ids=describe
)
def test_stock_cannot_run_what_is_left_out(case):
    outcome, detail = run(case, mirrored)
    assert outcome in ("skipped", "failed")
    # It ends in the same way with towers.
    assert run(case, tower)[0] == outcome, detail


def _input_function(dataset_or_function, case, towers):
    """An input function that checks what it is told."""
    return case._input_fn_to_test_input_context(
        dataset_or_function,
        expected_num_replicas_in_sync=towers,
        expected_num_input_pipelines=1,
        expected_input_pipeline_id=0,
    )


def _rows(towers: int) -> list[list[int]]:
    return [[k + i for k in range(towers)] for i in range(0, 12, towers)]


@pytest.mark.parametrize("towers", [1, 2, 4])
def test_datasets_from_function(towers):
    case = Suite()
    function = _input_function(lambda: tf.data.Dataset.range(12), case, towers)
    case._test_input_fn_iterable(tower(towers), function, _rows(towers))


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("towers", [1, 2, 4])
def test_input_iterator_over_a_dataset(towers, eager):
    def check(case, strategy):
        function = _input_function(
            lambda: tf.data.Dataset.range(12), case, towers
        )
        case._test_input_fn_iterator(
            strategy.make_input_fn_iterator(function),
            strategy.extended.worker_devices,
            _rows(towers),
        )

    suite = type("Input", (Suite,), {"check": check})
    outcome, detail = run((suite, towers, "check", eager, False), tower)
    assert outcome == "passed", detail


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("towers", [1, 2, 4])
@pytest.mark.parametrize("make", [tower, mirrored])
def test_reduce_axis_of_ragged_replicas(make, towers, dtype):
    # Replica k has k + 1 elements k, so that a mean has to count elements.
    def values(replica):
        k = replica.replica_id_in_sync_group
        return tf.constant([k] * (k + 1), dtype)

    strategy = make(towers)
    distributed = strategy.experimental_distribute_values_from_function(values)
    reduce = functools.partial(strategy.reduce, value=distributed, axis=0)
    total = sum(k * (k + 1) for k in range(towers))
    count = sum(k + 1 for k in range(towers))
    assert float(reduce("SUM")) == total
    assert float(reduce("MEAN")) == pytest.approx(total / count)
