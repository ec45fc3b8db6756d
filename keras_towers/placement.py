"""Which device holds a variable: the one with the fewest bytes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from keras_towers.devices import as_whole_number, canonical
from keras_towers.errors import TowerError

logger: logging.Logger = logging.getLogger("keras_towers")

# tensorpack keeps variables of fewer than 64 Ki elements on one device.
SMALL_BYTES = 64 * 1024 * 4


@dataclasses.dataclass(frozen=True)
class Placed:
    """A variable by its own name, its bytes (0: unknown) and its device."""

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

    Raises:
        TowerError: no devices, an invalid or repeated device name, or a
            ``small_bytes`` that is not a whole number of at least 0.

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
        known = _checked_devices(devices)
        self.devices: tuple[str, ...] = tuple(known)
        if small_device is not None:
            # Count its load under one name, even if it is spelled differently.
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
        """Assign a device to a variable.

        Args:
            name: its name for ``device_of`` and warnings.
            shape: its shape, which may be partly known, or None.
            dtype: its dtype.

        Returns:
            The name of the device.
        """
        size = byte_size(shape, dtype)
        if size is None:
            logger.warning(
                "the size of variable %r with shape %s and dtype %s is not "
                "known: it is counted as 0 bytes when placing variables",
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
        """Return the device of a variable.

        Args:
            name: its name; the second one with that name is ``name_1``.

        Raises:
            TowerError: no variable with this name was placed.
        """
        if name not in self._names:
            raise TowerError(
                f"no variable {name!r} was placed. Placed variables: "
                f"{', '.join(self._names) or 'none'}."
            )
        return self._names[name].device

    def clear(self) -> None:
        """Forget all variables."""
        self.placed.clear()
        self._names.clear()
        self._bytes = dict.fromkeys(self._bytes, 0)
        self._numbers = dict.fromkeys(self._numbers, 0)

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

    def _own_name(self, name: str) -> str:
        own, number = name, 0
        while own in self._names:
            number += 1
            own = f"{name}_{number}"
        return own


def byte_size(shape: Any, dtype: Any) -> int | None:
    """The size of a variable in bytes, None if its shape or dtype has none."""
    shape, each = tf.TensorShape(shape), tf.as_dtype(dtype).size
    if not shape.is_fully_defined() or not each:
        return None
    return math.prod(shape.as_list()) * each


def _checked_devices(devices: Any) -> list[str]:
    """Return device names as a list; refuse none, and those named twice."""
    several = isinstance(devices, Iterable) and not isinstance(devices, str)
    names = list(devices) if several else []
    if not names:
        given = names if several else devices
        raise TowerError(
            f"devices={given!r} names no devices: give a list of at least "
            "one name, such as '/device:CPU:0'."
        )
    numbers = collections.Counter(map(_parts, names))
    doubled = dict.fromkeys(n for n in names if numbers[_parts(n)] > 1)
    if doubled:
        raise TowerError(
            f"devices={names!r} has {', '.join(doubled)} more than once: "
            "name each device once."
        )
    return names


def _parts(name: Any) -> tuple:
    """The parts of a device name, independent of its spelling."""
    if isinstance(name, str) and name.startswith("/"):
        with contextlib.suppress(ValueError):
            parts = canonical(name)
            if parts[3] is not None or "/job:" in name:
                return parts
    raise TowerError(
        f"{name!r} is not a device name: give one such as "
        "'/device:GPU:0' or '/job:ps/task:1/device:CPU:0'."
    )


def _checked_bytes(small_bytes: Any) -> int:
    number = as_whole_number(small_bytes)
    if number is None or number < 0:
        raise TowerError(
            f"small_bytes={small_bytes!r} is not allowed: give a whole number "
            "of bytes, 0 or more."
        )
    return number
