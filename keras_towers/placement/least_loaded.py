"""Which device holds a variable: the one with the fewest bytes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import math
import operator
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from keras_towers.devices import canonical
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

    It ports tensorpack's ``LeastLoadedDeviceSetter`` (which counts
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
        TowerError: no device, a name that is none, a doubled one, or
            ``small_bytes`` that is no whole number of 0 or more.

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
        known = checked_devices("devices", devices)
        self.devices = tuple(known)
        if small_device is not None:
            # Its load counts under one name, also if that is written otherwise.
            names = {_parts(name): name for name in known}
            small_device = names.get(_parts(small_device), small_device)
            known.append(small_device)
        self.placed: list[Placed] = []
        self._small_device = small_device
        self._small_bytes = _checked_bytes(small_bytes)
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


def checked_devices(argument: str, devices: Any) -> list[str]:
    """Make a list of what a user gave as names of devices.

    Args:
        argument: what it was given as.
        devices: what was given.

    Raises:
        TowerError: no device, a name that is none, or a doubled one.
    """
    several = isinstance(devices, Iterable) and not isinstance(devices, str)
    names = list(devices) if several else []
    if not names:
        given = names if several else devices
        raise TowerError(
            f"{argument}={given!r} names no devices: give a list of at least "
            "one name, such as '/device:CPU:0'."
        )
    numbers = collections.Counter(map(_parts, names))
    doubled = dict.fromkeys(n for n in names if numbers[_parts(n)] > 1)
    if doubled:
        raise TowerError(
            f"{argument}={names!r} has {', '.join(doubled)} more than once: "
            "name each device once."
        )
    return names


def _parts(name: Any) -> tuple:
    """What a device's name says, alike for all ways to write the name.

    Raises:
        TowerError: it is not the name of a device.
    """
    if isinstance(name, str) and name.startswith("/"):
        with contextlib.suppress(ValueError):
            parts = canonical(name)
            if parts[3] is not None or "/job:" in name:
                return parts
    raise TowerError(
        f"{name!r} is not the name of a device: give one such as "
        "'/device:GPU:0' or '/job:ps/task:1/device:CPU:0'."
    )


def _checked_bytes(small_bytes: Any) -> int:
    try:
        number = operator.index(small_bytes)
    except TypeError:
        number = -1
    if number < 0 or isinstance(small_bytes, bool):
        raise TowerError(
            f"small_bytes={small_bytes!r} is not allowed: give a whole number "
            "of bytes, 0 or more."
        )
    return number
