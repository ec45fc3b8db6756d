"""The connection of a drop-in for Horovod or BytePS to the other ranks."""

from __future__ import annotations

from collections.abc import Callable

from keras_towers.errors import TowerError
from keras_towers.transport import Transport

_connect: Callable[[], Transport] | None = None


def use_connection(
    connect: Callable[[], Transport], as_default: bool = False
) -> None:
    """Set the connection that callbacks and ``fit`` use.

    Args:
        connect: returns this process's transport, which it may have to connect.
        as_default: do nothing if a connection was set before.
    """
    global _connect
    if not as_default or _connect is None:
        _connect = connect


def connection() -> Transport:
    """Return the connection to the other ranks."""
    if _connect is None:
        raise TowerError(
            "the ranks are not connected: first call init() of "
            "keras_towers.horovod or keras_towers.byteps."
        )
    return _connect()
