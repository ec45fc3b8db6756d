import pytest
import tensorflow as tf

from keras_towers.reduction.placed import (
    all_or_none,
    host_of,
    same_device,
    same_devices,
)
from tests.reduction.cases import cpus

FULL = "/job:localhost/replica:0/task:0"


def test_host_is_on_the_same_machine():
    assert host_of("/device:GPU:3") == "/device:CPU:0"
    assert host_of("/job:worker/task:2/device:GPU:1") == (
        "/job:worker/task:2/device:CPU:0"
    )


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("/device:CPU:1", f"{FULL}/device:CPU:1", True),
        ("CPU:1", "/device:CPU:1", True),
        ("/device:CPU:1", "/device:CPU:2", False),
        ("/device:CPU:1", "/device:GPU:1", False),
        ("/task:0/device:CPU:1", "/task:1/device:CPU:1", False),
        ("", "", False),
        (FULL, "/device:CPU:0", False),
    ],
)
def test_names_of_one_device(one, other, same):
    assert same_device(one, other) is same
    assert same_device(other, one) is same


def test_lists_of_devices():
    assert same_devices(["CPU:0", "CPU:1"], cpus(2))
    assert not same_devices(["CPU:1", "CPU:0"], cpus(2))
    assert not same_devices(["CPU:0"], cpus(2))


def test_who_reads_one_waits_for_all():
    @tf.function
    def step(tensors):
        return all_or_none([t + 1.0 for t in tensors], cpus(3))[0]

    graph = step.get_concrete_function([tf.ones([])] * 3).graph
    added = {op for op in graph.get_operations() if op.type == "AddV2"}
    (result,) = graph.outputs
    assert added <= ancestors(result.op)
    assert step([tf.ones([])] * 3).numpy() == 2.0


def ancestors(op):
    """All ops that an op waits for."""
    before = {tensor.op for tensor in op.inputs} | set(op.control_inputs)
    return before.union(*map(ancestors, before))
