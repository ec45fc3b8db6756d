"""On which device the readers of a remote variable keep a copy, and the copies.

Every tower of a machine needs every weight in every step. Where weights are
elsewhere, they are fetched once for all towers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.placement.least_loaded import (
    SMALL_BYTES,
    LeastLoadedPlacement,
    byte_size,
    checked_devices,
)

CACHING_DEVICES = ("cpu", "gpu")


class CachingPlacement:
    """Says on which device the towers read their copy of a remote variable.

    A variable that lives on another machine, or on the host, is fetched once
    for all towers of a machine, to the device that is given here.

    It carries over ``caching_device`` of tensorpack's
    ``DistributedReplicatedBuilder`` and its ``OverrideCachingDevice``.

    Args:
        caching_device: ``"cpu"``: all copies on the host. ``"gpu"``: large ones
            balanced over the towers, small ones on the host.
        towers: names of the devices that read.
        host: name of the host's device.
        small_bytes: how many bytes make a variable a large one.

    Attributes:
        placement: the ``LeastLoadedPlacement`` that balances the copies.

    Raises:
        TowerError: another ``caching_device``, no towers, a name that is none,
            a doubled one, or ``small_bytes`` that is no whole number of 0 or
            more.

    Example:
        >>> cache = CachingPlacement("gpu", ["/device:GPU:0", "/device:GPU:1"])
        >>> cache("dense/bias", (512,), "float32")
        '/device:CPU:0'
    """

    def __init__(
        self,
        caching_device: str,
        towers: Iterable[str],
        host: str = "/device:CPU:0",
        small_bytes: int = SMALL_BYTES,
    ):
        if caching_device not in CACHING_DEVICES:
            raise TowerError(
                f"caching_device={caching_device!r} is not allowed: give one "
                f"of {', '.join(map(repr, CACHING_DEVICES))}."
            )
        towers = checked_devices("towers", towers)
        # Made for the host too, to refuse the same arguments.
        self.placement = LeastLoadedPlacement(towers, host, small_bytes)
        if caching_device == "cpu":
            self.placement = LeastLoadedPlacement([host])

    def __call__(
        self, name: str, shape: Any, dtype: Any, trainable: bool = True
    ) -> str | None:
        """Give the copy of a variable its device.

        Args:
            name: what it is called in ``describe()``.
            shape: its shape, or None.
            dtype: its dtype.
            trainable: whether an optimizer writes it.

        Returns:
            The name of the device, or None for no copy: towers write what no
            optimizer does by themselves, and what has no known size may grow
            between two reads.
        """
        if not trainable or byte_size(shape, dtype) is None:
            return None
        return self.placement(name, shape, dtype)

    def describe(self) -> str:
        """Say which copies each device holds, as a table."""
        return self.placement.describe()


class ReadCache:
    """Reads every variable once a step, for all towers of a machine.

    Args:
        placement: where to keep the copies; it is asked once a variable.

    Example:
        >>> cache = ReadCache(CachingPlacement("gpu", towers))
        >>> @tf.function
        ... def step(x):
        ...     with cache.step():
        ...         for tower in towers:
        ...             with tf.device(tower):
        ...                 y = x @ cache.read(kernel)
    """

    def __init__(self, placement: CachingPlacement):
        self.placement = placement
        self._devices: dict[Any, str | None] = {}
        self._copies: dict[tuple[Any, Any], tf.Tensor] | None = None

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Begin with no copies, and forget those that were made, at the end."""
        before, self._copies = self._copies, {}
        try:
            yield
        finally:
            self._copies = before

    def read(self, variable: tf.Variable) -> tf.Tensor:
        """The value that a variable had when it was first read in this step.

        Gradients with respect to the copy are those with respect to the
        variable; the tape must ``watch`` it, because the tower that reads first
        makes it for all.

        Args:
            variable: a variable of TensorFlow, on any device.

        Returns:
            The copy, or the value itself where the placement gives no device.

        Raises:
            TowerError: outside of ``step()``.
        """
        if self._copies is None:
            raise TowerError(
                f"variable {variable.name!r} was read through a cache outside "
                "of a step: read it in `with cache.step():`."
            )
        key = variable.ref()
        if key not in self._devices:
            self._devices[key] = self.placement(
                variable.name.split(":")[0],
                variable.shape,
                variable.dtype,
                variable.trainable,
            )
        device = self._devices[key]
        if device is None:
            return variable.read_value()
        graphs = _graphs()
        for graph in graphs:
            if (key, graph) in self._copies:
                return self._copies[key, graph]
        with tf.device(variable.device):
            value = variable.read_value()
        with tf.device(device):
            copy = tf.identity(value)
        self._copies[key, graphs[0]] = copy
        return copy


def _graphs() -> list[Any]:
    """The graph that is being made, and those around it.

    A copy made in the branch of a condition is not there outside of it.
    """
    if tf.executing_eagerly():
        return [None]
    graph, graphs = compat.get_default_graph(), []
    while graph is not None:
        graphs.append(graph)
        graph = getattr(graph, "outer_graph", None)
    return graphs
