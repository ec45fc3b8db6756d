"""Errors of steps as a user sees them, with notes on what failed.

This module does not depend on code that traces or runs steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from keras_towers.fit.components import TowerConfig
from keras_towers.foundation.errors import TowerError
from keras_towers.partition.layout.rules.variables import of_whole_table

# TensorFlow marks an error with this that is the consequence of another one.
_DERIVED = b"type.googleapis.com/tensorflow.DerivedStatus"
# Text between these markers in a TensorFlow error is our message for the user.
_BEGIN, _END = "keras_towers: ", " (keras_towers)"


def assert_for_user(
    condition: tf.Tensor, text: str, values: Sequence[tf.Tensor]
) -> list[tf.Operation]:
    """Fail a step unless a condition holds; for ``control_dependencies``.

    ``text`` is the error message, with ``{}`` for each of the values.
    """
    if tf.executing_eagerly():
        if not condition:
            raise TowerError(text.format(*map(int, values)))
        return []
    message = tf.strings.format(f"{_BEGIN}{text}{_END}", list(values))
    return [tf.debugging.Assert(condition, [message])]


def error_for_user(error: Exception) -> TowerError | None:
    """Return the error of a failed ``assert_for_user``, or None."""
    _, begins, rest = str(error).partition(_BEGIN)
    escaped, ends, _ = rest.partition(_END)
    if not (begins and ends):
        return None
    # TensorFlow escapes the bytes of a string as in C.
    text = escaped.encode().decode("unicode_escape").encode("latin-1").decode()
    return TowerError(text)


def explain_on_towers(error: tf.errors.OpError, config: TowerConfig) -> None:
    """Add notes on towers to an error of a step."""
    message = of_whole_table(error.message)
    if message != error.message:
        # Towers look up what all of the batch asks for, each in its shard.
        error._message = message
    elif note := _note_on_towers(error, config):
        error.add_note(f"keras_towers: {note}")


def _note_on_towers(error: tf.errors.OpError, config: TowerConfig) -> str:
    if _DERIVED in (error.experimental_payloads or {}):
        return (
            "another tower or rank failed first. To see its error, make the "
            f"same call on one device, outside of {config.name}."
        )
    if not isinstance(error, tf.errors.InvalidArgumentError):
        # Errors of other types, such as a lost rank, are not about rows.
        return ""
    replicas, options = config.places("fit").replicas, config.options
    if replicas == 1 or options.batches != "split":
        return ""
    return (
        f"each of the {replicas} towers had its part of the batch: row numbers "
        "in the error refer to one part."
    )
