"""Sums and copies with a place: the ops that reductions are made of.

All are stateless, so that what nobody reads is pruned from a graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def add_on(device: str, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Add tensors of one shape and dtype up on one device."""
    with tf.device(device):
        return tf.add_n(list(tensors))


def copy_to(device: str, tensor: tf.Tensor) -> tf.Tensor:
    """Have a tensor on a device; no bytes move where it is there already."""
    with tf.device(device):
        return tf.identity(tensor)


def all_or_none(
    tensors: Sequence[tf.Tensor], devices: Sequence[str]
) -> list[tf.Tensor]:
    """Make each tensor wait for all of them.

    An op that waits for its peers never ends if the graph has lost one of
    them because nobody reads its result. After this, whoever reads one of the
    results keeps all of the ops.

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
    """Name the first CPU of the machine that a device belongs to.

    Example:
        >>> host_of("/job:worker/replica:0/task:3/device:GPU:2")
        '/job:worker/replica:0/task:3/device:CPU:0'
    """
    spec = tf.DeviceSpec.from_string(device)
    return spec.replace(device_type="CPU", device_index=0).to_string()


def same_device(one: str, other: str) -> bool:
    """Whether two names may mean one device.

    A part that one name leaves open matches any: ``"/device:CPU:1"`` is
    ``"/job:localhost/replica:0/task:0/device:CPU:1"``. Type and index must be
    there.
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
