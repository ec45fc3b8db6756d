"""NVIDIA's NCCL, through TensorFlow's op for the GPUs of one process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import tensorflow as tf

from keras_towers.reduction.gradients import Gradient, Gradients
from keras_towers.reduction.sums import copy_to, reduce_in_graph

# The dtypes that TensorFlow's kernel supports.
_DTYPES = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)

_names = itertools.count()


def nccl_all_reduce(
    grads: Gradients, devices: Sequence[str]
) -> list[list[Gradient]]:
    """Sum dense gradients on K physical GPUs of this process with NCCL.

    ``reduce_in_graph`` says which are summed otherwise. Ports mode "nccl" of
    tensorpack's ``SyncMultiGPUTrainerReplicated``.
    """

    def all_reduce(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        name = f"keras_towers_{next(_names)}"
        sums = []
        for device, tensor in zip(devices, tensors, strict=True):
            with tf.device(device):
                sums.append(
                    tf.raw_ops.NcclAllReduce(
                        input=tensor,
                        reduction="sum",
                        num_devices=len(devices),
                        shared_name=name,
                    )
                )
        # An op that waits for its peers hangs if one of them is pruned from the
        # graph because its result is unused: each depends on all of them.
        with tf.control_dependencies(sums):
            return list(map(copy_to, devices, sums))

    return reduce_in_graph(grads, devices, _DTYPES, all_reduce)


def nccl_available(devices: Sequence[str]) -> tuple[bool, str]:
    """Whether NCCL can sum over these devices, and why (not), as a clause.

    It needs a TensorFlow built with GPU support and at least two different
    physical GPUs: NCCL refuses two ranks on one GPU.
    """
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    for device, spec in zip(devices, specs, strict=True):
        if spec.device_type != "GPU":
            return False, f"{device} is not a GPU"
    if len(devices) < 2:
        return False, "it needs at least two GPUs"
    if not tf.test.is_built_with_gpu_support():
        return False, "this TensorFlow is built without support for GPUs"
    physical = _physical_gpus()
    seen: dict[str, str] = {}
    for device, spec in zip(devices, specs, strict=True):
        index = spec.device_index or 0
        if index >= len(physical):
            return False, f"{device} does not exist"
        other = seen.setdefault(physical[index], device)
        if other is not device:
            return False, f"{other} and {device} are on the same physical GPU"
    return True, f"{len(devices)} different physical GPUs"


def _physical_gpus() -> list[str]:
    """The name of the physical GPU of each logical GPU, in order."""
    names = []
    for gpu in tf.config.get_visible_devices("GPU"):
        parts = tf.config.get_logical_device_configuration(gpu)
        names.extend([gpu.name] * max(1, len(parts or ())))
    return names
