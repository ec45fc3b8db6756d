"""Which device holds a variable: the one with the fewest bytes."""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_towers.errors import TowerError

logger = logging.getLogger("keras_towers")

# tensorpack caches variables of fewer than 64 Ki numbers beside each other.
SMALL_BYTES = 64 * 1024 * 4


@dataclasses.dataclass(frozen=True)
class Placed:
    """A variable that has a device.

    Attributes:
        name: its name; a number is added to one that is there already.
        bytes: its size, 0 where that is not known.
        device: the device.
    """

    name: str
    bytes: int
    device: str


class LeastLoadedPlacement:
    """Gives every variable the device that holds the fewest bytes so far.

    After any number of variables the fullest and the emptiest device differ by
    no more bytes than the largest variable has, small ones on a device of
    their own aside. The same variables in the same order get the same devices
    in every process; in another order they may get others. Of devices with
    equal loads, the one with fewer variables is taken, then the earlier one.

    It carries over tensorpack's ``LeastLoadedDeviceSetter`` (which counts
    numbers, not bytes), TensorFlow 1's ``GreedyLoadBalancingStrategy`` with
    ``byte_size_load_fn``, and with ``small_device`` tensorpack's
    ``OverrideCachingDevice``.

    Args:
        devices: names of the devices to fill.
        small_device: where variables below ``small_bytes`` go, so that not
            every device is asked for a few bytes each; None: nowhere else.
        small_bytes: how many bytes make a variable a large one.

    Attributes:
        devices: the devices to fill, in their order.
        placed: every ``Placed`` variable, in the order of the calls.

    Raises:
        TowerError: no device, a name that is none, or a doubled one.

    Example:
        >>> place = LeastLoadedPlacement(["/device:GPU:0", "/device:GPU:1"])
        >>> place("dense/kernel", (784, 512), "float32")
        '/device:GPU:0'
        >>> place("dense/bias", (512,), "float32")
        '/device:GPU:1'
    """

    def __init__(
        self,
        devices: Sequence[str],
        small_device: str | None = None,
        small_bytes: int = SMALL_BYTES,
    ):
        if isinstance(devices, str) or not devices:
            raise TowerError(
                f"devices={devices!r} names no devices: give a list of at "
                "least one name, such as '/device:CPU:0'."
            )
        known = list(devices)
        if small_device is not None:
            known.append(small_device)
        for name in known:
            _check_device(name)
        doubled = [n for n, c in collections.Counter(devices).items() if c > 1]
        if doubled:
            raise TowerError(
                f"devices={list(devices)!r} has {', '.join(doubled)} more than "
                "once: name each device once."
            )
        self.devices = tuple(devices)
        self.placed: list[Placed] = []
        self._small_device = small_device
        self._small_bytes = small_bytes
        self._bytes = dict.fromkeys(known, 0)
        self._numbers = dict.fromkeys(known, 0)
        self._names: dict[str, Placed] = {}

    def __call__(self, name: str, shape: Any, dtype: Any) -> str:
        """Give a variable its device.

        Args:
            name: what it is called in ``describe()`` and warnings.
            shape: its shape, also a partly known one, or None.
            dtype: its dtype.

        Returns:
            The name of the device.
        """
        size = byte_size(shape, dtype)
        if size is None:
            logger.warning(
                "variable %r of shape %s and dtype %s has a size that is not "
                "known: it is counted as 0 bytes where variables are placed",
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
        placed = Placed(self._own_name(name), bytes_, device)
        self._names[placed.name] = placed
        self.placed.append(placed)
        return device

    @property
    def loads(self) -> dict[str, int]:
        """The bytes that each device holds."""
        return dict(self._bytes)

    def device_of(self, name: str) -> str:
        """Say where a variable was placed.

        Args:
            name: its name; the second of one name is called ``name_1``.

        Raises:
            TowerError: none of this name was placed.
        """
        if name not in self._names:
            raise TowerError(
                f"no variable {name!r} was placed. Placed were: "
                f"{', '.join(self._names) or 'none'}."
            )
        return self._names[name].device

    def clear(self) -> None:
        """Begin anew: none of the variables is there any more."""
        self.placed.clear()
        self._names.clear()
        self._bytes = dict.fromkeys(self._bytes, 0)
        self._numbers = dict.fromkeys(self._numbers, 0)

    def describe(self) -> str:
        """Say what each device holds, as a table.

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

    def _own_name(self, name: str) -> str:
        own, number = name, 0
        while own in self._names:
            number += 1
            own = f"{name}_{number}"
        return own


def byte_size(shape: Any, dtype: Any) -> int | None:
    """The number of bytes of a variable, None where they are not known.

    Args:
        shape: its shape, also a partly known one, or None.
        dtype: its dtype; strings and handles have no known size.

    Example:
        >>> byte_size((784, 512), "float32")
        1605632
    """
    shape, each = tf.TensorShape(shape), tf.as_dtype(dtype).size
    if not shape.is_fully_defined() or not each:
        return None
    return math.prod(shape.as_list()) * each


def _check_device(name: Any) -> None:
    try:
        if not isinstance(name, str):
            raise ValueError
        spec = tf.DeviceSpec.from_string(name)
    except ValueError:
        spec = None
    if spec is None or spec.device_type is None and spec.job is None:
        raise TowerError(
            f"{name!r} is not the name of a device: give one such as "
            "'/device:GPU:0' or '/job:ps/task:1/device:CPU:0'."
        )
