"""The common base of the drop-ins for Horovod's and BytePS's modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import keras

from keras_towers.errors import TowerError
from keras_towers.transport import Transport

_connect: Callable[[], Transport] | None = None


def connect_by(
    connect: Callable[[], Transport], by_default: bool = False
) -> None:
    """Make callbacks and ``fit`` use the ranks that a function connects.

    Args:
        connect: returns the connection of this process.
        by_default: only if no other was named before.
    """
    global _connect
    if not by_default or _connect is None:
        _connect = connect


def connection() -> Transport:
    """Return the connection to the other ranks."""
    if _connect is None:
        raise TowerError(
            "the ranks are not connected: call init() of keras_towers.horovod "
            "or keras_towers.byteps first."
        )
    return _connect()


def plain(variable: Any) -> Any:
    """Return the ``tf.Variable`` inside a Keras variable."""
    if isinstance(variable, keras.Variable):
        return variable.value
    return variable


def variable_key(variable: Any) -> int:
    """Return a key that identifies a Keras or TensorFlow variable."""
    return id(plain(variable))


def check_compression(compression: Any, called: str) -> None:
    """Refuse an object without ``compress`` and ``decompress``."""
    if not all(
        callable(getattr(compression, method, None))
        for method in ("compress", "decompress")
    ):
        raise TowerError(
            f"compression is {compression!r}, which cannot compress and "
            f"decompress. Give {called}.Compression.none or "
            f"{called}.Compression.fp16."
        )


class _NoList(TowerError, RuntimeError):
    """A ``RuntimeError``, as Horovod raises."""


def refuse_global_variables(called: str, root_rank: Any) -> NoReturn:
    """Raise the error of ``broadcast_global_variables``."""
    raise _NoList(
        f"broadcast_global_variables({root_rank}) is not possible: "
        "TensorFlow 2 keeps no list of all variables. Name them: "
        f"{called}.broadcast_variables(model.weights + "
        f"model.optimizer.variables, root_rank={root_rank}). In fit, use "
        f"callbacks=[{called}.callbacks."
        f"BroadcastGlobalVariablesCallback({root_rank})]."
    )
