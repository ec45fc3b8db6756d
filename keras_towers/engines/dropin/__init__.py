"""Code that the drop-ins for Horovod's and BytePS's modules share.

``distributed_models``
  Models with a distributed optimizer: how they are compiled and loaded.
``gradient_reducer``
  Makes an existing optimizer reduce its gradients over the ranks.
``horovod_callbacks``
  Horovod's callbacks for Keras, and the broadcast of scripts without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, Protocol

import tensorflow as tf

from keras_towers.fit.context.identity_dict import IdentityKey
from keras_towers.fit.weights.copies import native
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Variable
from keras_towers.transport import Transport


class Compression(Protocol):
    """A way to send gradients, such as ``hvd.Compression.fp16``."""

    def compress(self, tensor: tf.Tensor, /) -> tuple[tf.Tensor, object]:
        """Return the compressed tensor, and a context for ``decompress``."""
        ...

    def decompress(self, tensor: tf.Tensor, ctx: object, /) -> tf.Tensor:
        """Return the tensor that ``compress`` got."""
        ...


# Returns the transport to the other ranks.
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


def variable_key(variable: Variable) -> IdentityKey[tf.Variable]:
    """Return a key that identifies a Keras or TensorFlow variable."""
    return IdentityKey(native(variable))


def check_compression(compression: object, module: str) -> None:
    """Refuse an object without ``compress`` and ``decompress``."""
    if not all(
        callable(getattr(compression, method, None))
        for method in ("compress", "decompress")
    ):
        raise TowerError(
            f"compression={compression!r} is not allowed, since it has no "
            f"methods compress and decompress: give {module}.Compression.none "
            f"or {module}.Compression.fp16."
        )


class _NoGlobalVariables(TowerError, RuntimeError):
    """A ``RuntimeError``, as Horovod raises."""


def refuse_global_variables(module: str, root_rank: int) -> NoReturn:
    """Raise the error of ``broadcast_global_variables``."""
    raise _NoGlobalVariables(
        f"broadcast_global_variables({root_rank}) is not possible: "
        "TensorFlow 2 keeps no list of all variables. Name them: "
        f"{module}.broadcast_variables(model.weights + "
        f"model.optimizer.variables, root_rank={root_rank}). In fit, use "
        f"callbacks=[{module}.callbacks."
        f"BroadcastGlobalVariablesCallback({root_rank})]."
    )
