"""Which device holds a variable: the one with the fewest bytes."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

logger: logging.Logger = logging.getLogger("keras_towers")

# tensorpack keeps variables of fewer than 64 Ki elements on one device.
SMALL_BYTES = 64 * 1024 * 4


@dataclasses.dataclass(frozen=True)
class Placed:
    """A variable by its name, its bytes (0: unknown) and its device."""

    name: str
    bytes: int
    device: str


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
            are assigned like others.
        small_bytes: the size in bytes from which a variable is large.

    Attributes:
        devices: the devices to fill, in order.
        placed: every ``Placed`` variable, in the order of the calls.

    Example:
        >>> place = LeastLoadedPlacement(["/device:GPU:0", "/device:GPU:1"])
        >>> place("dense/kernel", (784, 512), "float32")
        '/device:GPU:0'
        >>> place("dense/bias", (512,), "float32")
        '/device:GPU:1'
    """

    def __init__(
        self,
        devices: Iterable[str],
        small_device: str | None = None,
        small_bytes: int = SMALL_BYTES,
    ):
        self.devices: tuple[str, ...] = tuple(devices)
        self.placed: list[Placed] = []
        self._small_device = small_device
        self._small_bytes = small_bytes
        self.clear()

    def __call__(self, name: str, shape: Any, dtype: Any) -> str:
        """Assign a device to a variable.

        Args:
            name: its name.
            shape: its shape, which may be partly known, or None.
            dtype: its dtype.

        Returns:
            The name of the device.
        """
        size = byte_size(shape, dtype)
        if size is None:
            logger.warning(
                "the size of variable %r with shape %s and dtype %s is "
                "unknown: it counts as 0 bytes when variables are placed",
                name,
                shape,
                tf.as_dtype(dtype).name,
            )
        bytes_ = size or 0
        small = size is not None and size < self._small_bytes
        if self._small_device is not None and small:
            device = self._small_device
        else:
            device = min(
                self.devices, key=lambda d: (self._bytes[d], self._numbers[d])
            )
        self._bytes[device] += bytes_
        self._numbers[device] += 1
        self.placed.append(Placed(name, bytes_, device))
        return device

    def of(self, variable: keras.Variable) -> str:
        """Assign a device to a Keras variable."""
        return self(variable.path, variable.shape, variable.dtype)

    @property
    def loads(self) -> dict[str, int]:
        """The bytes that each device holds."""
        return dict(self._bytes)

    def clear(self) -> None:
        """Forget all variables."""
        self.placed.clear()
        known = [*self.devices]
        if self._small_device is not None:
            known.append(self._small_device)
        self._bytes = dict.fromkeys(known, 0)
        self._numbers = dict.fromkeys(known, 0)

    def describe(self) -> str:
        """Return a table of the variables and bytes on each device.

        Example:
            >>> print(place.describe())
            device         variables      bytes
            /device:GPU:0          1  1,605,632
            /device:GPU:1          1      2,048
        """
        rows = [("device", "variables", "bytes")]
        for device, bytes_ in self._bytes.items():
            rows.append((device, f"{self._numbers[device]:,}", f"{bytes_:,}"))
        first, second, third = (
            max(map(len, column)) for column in zip(*rows, strict=True)
        )
        return "\n".join(
            f"{device:<{first}}  {number:>{second}}  {bytes_:>{third}}"
            for device, number, bytes_ in rows
        )


def byte_size(shape: Any, dtype: Any) -> int | None:
    """The size of a variable in bytes, None if its shape or dtype has none."""
    shape, item_bytes = tf.TensorShape(shape), tf.as_dtype(dtype).size
    if not shape.is_fully_defined() or not item_bytes:
        return None
    return math.prod(shape.as_list()) * item_bytes
