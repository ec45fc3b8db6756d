"""Sums and copies on given devices, from which reductions are built.

All are stateless, so that unused ones are pruned from a graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def add_on(device: str, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Sum tensors of equal shape and dtype on one device."""
    with tf.device(device):
        return tf.add_n(list(tensors))


def copy_to(device: str, tensor: tf.Tensor) -> tf.Tensor:
    """Copy a tensor to a device; no copy if it is already there."""
    with tf.device(device):
        return tf.identity(tensor)


def add_and_copy(
    main: str, tensors: Sequence[tf.Tensor], devices: Sequence[str]
) -> list[tf.Tensor]:
    """Sum tensors on one device and copy the sum to K devices."""
    total = add_on(main, tensors)
    return [copy_to(device, total) for device in devices]


def all_or_none(
    tensors: Sequence[tf.Tensor], devices: Sequence[str]
) -> list[tf.Tensor]:
    """Make each tensor wait for all of them.

    An op that waits for its peers hangs if one of them has been pruned from the
    graph because its result is unused. This makes each result depend on all of
    the ops.

    Args:
        tensors: K tensors, one from each peer.
        devices: K device names.

    Returns:
        The K tensors, each on its device.
    """
    with tf.control_dependencies(list(tensors)):
        return [
            copy_to(device, tensor)
            for device, tensor in zip(devices, tensors, strict=True)
        ]


def host_of(device: str) -> str:
    """Return the first CPU of the machine that a device belongs to.

    Example:
        >>> host_of("/job:worker/replica:0/task:3/device:GPU:2")
        '/job:worker/replica:0/task:3/device:CPU:0'
    """
    spec = tf.DeviceSpec.from_string(device)
    return spec.replace(device_type="CPU", device_index=0).to_string()


def same_device(one: str, other: str) -> bool:
    """Whether two names can refer to the same device.

    A part missing from one name matches anything: ``"/device:CPU:1"`` matches
    ``"/job:localhost/replica:0/task:0/device:CPU:1"``. Type and index are
    required.
    """
    a, b = (tf.DeviceSpec.from_string(name) for name in (one, other))
    if None in (a.device_index, b.device_index):
        return False
    parts = ("job", "replica", "task", "device_type", "device_index")
    return all(
        getattr(a, part) == getattr(b, part)
        or None in (getattr(a, part), getattr(b, part))
        for part in parts
    )


def same_devices(some: Sequence[str], others: Sequence[str]) -> bool:
    """Whether two lists name the same devices in the same order."""
    return len(some) == len(others) and all(map(same_device, some, others))
