"""Where reductions sum and who waits for whom, as their graphs say.

NCCL cannot run on CPUs: of it there is only the graph, and the reasons.
"""

import types

import pytest
import tensorflow as tf

from keras_towers.devices import same_devices
from keras_towers.reduction import (
    CollectiveAllReduce,
    hierarchical_all_reduce,
    nccl_all_reduce,
    nccl_available,
    sum_at_variables,
    sum_on_host,
    sum_on_towers,
)
from tests.reduction.cases import (
    assert_placed,
    assert_sums,
    cpus,
    make_gradients,
    ops_of,
)

GPUS = [f"/device:GPU:{k}" for k in range(3)]


def places(ops):
    return [tf.DeviceSpec.from_string(op.device).device_index for op in ops]


def sums_of(ops, size):
    """The ops of a graph that add vectors of that size."""
    adds = [op for op in ops if op.type == "AddN"]
    return [op for op in adds if op.outputs[0].shape == [size]]


@pytest.mark.core
@pytest.mark.parametrize(
    ("reduce", "expected"),
    [(sum_on_host, [0, 0, 0, 0]), (sum_on_towers, [0, 1, 2, 0])],
)
def test_where_gradients_are_added(reduce, expected):
    row = [tf.ones([i + 1]) for i in range(4)]
    ops = ops_of(reduce, [row] * 3, cpus(3))
    assert [places(sums_of(ops, i + 1)) for i in range(4)] == [
        [place] for place in expected
    ]


def test_sums_at_the_places_of_weights():
    grads = make_gradients(3)
    where = cpus(2) * (len(grads[0]) // 2)
    sums = sum_at_variables(grads, cpus(3), where)
    assert_sums([sums] * 3, grads)
    assert_placed([[total] for total in sums], where)


def test_main_devices_rotate_and_groups_do_not_mix():
    row = [tf.ones([i + 1]) for i in range(6)]
    ops = ops_of(hierarchical_all_reduce, [row] * 8, cpus(8))
    for index in range(6):
        adds = sums_of(ops, index + 1)
        inside = [op for op in adds if len(op.inputs) == 4]
        across = [op for op in adds if len(op.inputs) == 2]
        assert places(inside) == places(across) == [index % 4, 4 + index % 4]
        sources = [{tensor.op for tensor in op.inputs} for op in across]
        # In whichever order: the groups have the same bits.
        assert sources == [set(inside)] * 2


def test_nccl_has_an_op_for_each_tower_and_none_can_be_pruned():
    row = [tf.ones([2]), tf.ones([])]
    found = {}
    for op in ops_of(nccl_all_reduce, [row] * 3, GPUS):
        if op.type == "NcclAllReduce":
            assert op.get_attr("num_devices") == 3
            assert op.get_attr("reduction") == b"sum"
            found.setdefault(op.get_attr("shared_name"), []).append(op)
    assert len(found) == 2
    for group in found.values():
        assert same_devices([op.device for op in group], GPUS)
        readers = [c for op in group for c in op.outputs[0].consumers()]
        assert len(readers) == 3
        for op in readers:
            assert {op.inputs[0].op, *op.control_inputs} == {*group}


@pytest.mark.parametrize(
    ("reduce", "devices", "dtype"),
    [
        (nccl_all_reduce, GPUS, tf.bfloat16),
        (CollectiveAllReduce(cpus(3)), cpus(3), tf.complex64),
    ],
)
def test_what_the_ops_do_not_know_is_added(reduce, devices, dtype):
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))
    row = [slices, tf.ones([2], dtype), tf.ones([0, 2])]
    row = [*row, tf.TensorSpec([None], tf.float32)]
    kinds = [op.type for op in ops_of(reduce, [row] * 3, devices)]
    assert not {"NcclAllReduce", "CollectiveReduceV2"} & {*kinds}
    assert kinds.count("AddN") == 3


def test_in_eager_code_everything_is_added():
    grads = make_gradients(3)
    assert_sums(nccl_all_reduce(grads, cpus(3)), grads)


@pytest.mark.parametrize(
    ("devices", "parts", "reason"),
    [
        (cpus(2), [1, 1], "/device:CPU:0 is not a GPU"),
        (GPUS[:1], [1], "at least two"),
        (GPUS[:2], [1], "/device:GPU:1 does not exist"),
        (GPUS, [1, 2], "GPU:1 and /device:GPU:2 are on the same"),
        (GPUS, [1, 1, 1], None),
    ],
)
def test_nccl_needs_different_physical_gpus(
    monkeypatch, devices, parts, reason
):
    gpus = [types.SimpleNamespace(name=f"p{i}") for i in range(len(parts))]
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: gpus)
    monkeypatch.setattr(
        tf.config,
        "get_logical_device_configuration",
        lambda gpu: [None] * parts[gpus.index(gpu)],
    )
    available, why = nccl_available(devices)
    assert available == (reason is None)
    assert (reason or "3 different physical GPUs") in why
