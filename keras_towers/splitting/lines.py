"""Lines of the user's code, for messages."""

from __future__ import annotations

import linecache
import os
import threading
from typing import Any

import keras
import tensorflow as tf

import keras_towers

_OWN = (
    *(
        os.path.dirname(os.path.abspath(str(module.__file__))) + os.sep
        for module in (keras, tf, keras_towers)
    ),
    # Towers are threads.
    threading.__file__,
)


def line_of(operation: Any, begins: str) -> str | None:
    """Return the line that made an operation: "model.py:31: x = y / z".

    It is the innermost line that is neither Keras's, TensorFlow's nor this
    package's; None if there is none.

    Args:
        operation: the operation, or None.
        begins: the file that calls the step: what calls that does not count.
    """
    frames = operation.traceback if operation is not None else ()
    for frame in reversed(list(frames)):
        name = os.path.abspath(frame.filename)
        if name == begins:
            return None
        if name.startswith(_OWN) or frame.filename.startswith("<frozen"):
            continue
        text = linecache.getline(frame.filename, frame.lineno).strip()
        return f"{os.path.basename(name)}:{frame.lineno}: {text}".rstrip(": ")
    return None
