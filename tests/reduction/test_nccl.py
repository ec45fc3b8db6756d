"""NCCL cannot run on CPUs: these tests look at graphs and at reasons."""

import types

import pytest
import tensorflow as tf

from keras_towers.reduction import nccl_all_reduce, nccl_available
from keras_towers.reduction.placed import same_device
from tests.reduction.cases import assert_sums, cpus, make_gradients, ops_of

GPUS = [f"/device:GPU:{k}" for k in range(3)]


def test_one_op_for_each_tower_under_one_name():
    grads = [[tf.ones([2]), tf.ones([])]] * 3
    ops = ops_of(nccl_all_reduce, grads, GPUS)
    found = [op for op in ops if op.type == "NcclAllReduce"]
    assert len(found) == 6
    names = {}
    for op in found:
        assert op.get_attr("num_devices") == 3
        assert op.get_attr("reduction") == b"sum"
        names.setdefault(op.get_attr("shared_name"), []).append(op)
    assert len(names) == 2
    for group in names.values():
        assert all(map(same_device, (op.device for op in group), GPUS))


def test_no_tower_can_be_pruned_alone():
    ops = ops_of(nccl_all_reduce, [[tf.ones([2])]] * 3, GPUS)
    found = {op for op in ops if op.type == "NcclAllReduce"}
    readers = [c for op in found for c in op.outputs[0].consumers()]
    assert len(readers) == 3
    for op in readers:
        assert {op.inputs[0].op, *op.control_inputs} == found


def test_what_nccl_does_not_know_is_added():
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))
    grads = [[slices, tf.ones([2], tf.bfloat16)]] * 3
    types_ = {op.type for op in ops_of(nccl_all_reduce, grads, GPUS)}
    assert "NcclAllReduce" not in types_
    assert "AddN" in types_


def test_eager_code_does_without_nccl():
    grads = make_gradients(3)
    assert_sums(nccl_all_reduce(grads, cpus(3)), grads)


@pytest.mark.parametrize(
    ("devices", "built", "parts", "reason"),
    [
        (cpus(2), True, [1, 1], "/device:CPU:0 is not a GPU"),
        (GPUS[:1], True, [1], "at least two"),
        (GPUS[:2], False, [], "without support for GPUs"),
        (GPUS[:2], True, [1], "/device:GPU:1 does not exist"),
        (GPUS[:2], True, [2], "are on the same physical GPU"),
        (GPUS, True, [1, 2], "GPU:1 and /device:GPU:2 are on the same"),
        (GPUS, True, [1, 1, 1], None),
    ],
)
def test_reasons(monkeypatch, devices, built, parts, reason):
    gpus = [types.SimpleNamespace(name=f"p{i}") for i in range(len(parts))]
    monkeypatch.setattr(tf.test, "is_built_with_gpu_support", lambda: built)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: gpus)
    monkeypatch.setattr(
        tf.config,
        "get_logical_device_configuration",
        lambda gpu: [None] * parts[gpus.index(gpu)],
    )
    available, why = nccl_available(devices)
    assert available == (reason is None)
    assert (reason or "3 different physical GPUs") in why
