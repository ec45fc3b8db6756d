"""Chooses the device of a variable: the one with the fewest bytes."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable
from typing import TypeAlias

import keras
import tensorflow as tf

Placement: TypeAlias = Callable[[keras.Variable], str]
"""Returns the name of the device that holds a trained weight and its slots.

It is called once for each weight of a model, in the order of the layers. In a
job of several processes, each has the same weights on its own devices.
"""


class LeastLoadedPlacement:
    """Assigns each variable to the device that holds the fewest bytes so far.

    The loads of any two devices never differ by more than the size of the
    largest variable (not counting small variables on ``small_device``). The
    result depends only on the variables and their order, so it is the same in
    every process. Ties go to the device with fewer variables, then to the
    earlier one.

    Ports tensorpack's ``LeastLoadedDeviceSetter`` (which counts elements, not
    bytes), TensorFlow 1's ``GreedyLoadBalancingStrategy`` with
    ``byte_size_load_fn``, and, with ``small_device``, tensorpack's
    ``OverrideCachingDevice``.

    Args:
        devices: names of the devices to fill.
        small_device: the device of variables smaller than ``small_bytes``,
            to avoid many small reads from all devices; None: small variables
            are assigned like large ones.
        small_bytes: variables of fewer bytes are small.

    Attributes:
        devices: the devices to fill, in order.

    Example:
        >>> place = LeastLoadedPlacement(["/device:GPU:0", "/device:GPU:1"])
        >>> place(keras.Variable(np.zeros((784, 512))))
        '/device:GPU:0'
        >>> place(keras.Variable(np.zeros(512)))
        '/device:GPU:1'
    """

    def __init__(
        self,
        devices: Iterable[str],
        small_device: str | None = None,
        small_bytes: int = 2**18,
    ):
        self.devices: tuple[str, ...] = tuple(devices)
        self._small_device = small_device
        self._small_bytes = small_bytes
        self.clear()

    def __call__(self, variable: keras.Variable) -> str:
        """Return the name of the device that a variable is assigned to."""
        size = byte_size(variable)
        if self._small_device is not None and size < self._small_bytes:
            device = self._small_device
        else:
            device = min(
                self.devices, key=lambda d: (self._bytes[d], self._numbers[d])
            )
        self._bytes[device] += size
        self._numbers[device] += 1
        return device

    @property
    def loads(self) -> dict[str, int]:
        """The bytes that each device holds."""
        return dict(self._bytes)

    def clear(self) -> None:
        """Forget all variables."""
        small = [] if self._small_device is None else [self._small_device]
        self._bytes = dict.fromkeys([*self.devices, *small], 0)
        self._numbers: collections.Counter[str] = collections.Counter()


def byte_size(variable: keras.Variable) -> int:
    """Return the size of a variable in bytes; 0 if unknown, as for strings."""
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
