"""The line of the user's code that has added an operation to a trace.

Reports and errors name it: ``step_costs.py``, ``explanation.py``.
"""

from __future__ import annotations

import functools
import importlib.util
import linecache
import os
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.fit.step.graph import trace
from keras_towers.foundation import compat

# Keras's trees are those of ``optree`` or, in its absence, ``dm-tree``.
_LIBRARIES = tuple(
    os.path.join(os.path.dirname(str(spec.origin)), "")
    for spec in map(
        importlib.util.find_spec,
        ("keras", "tensorflow", "keras_towers", "optree", "tree"),
    )
    if spec is not None
)
_GRADIENTS = "gradient_tape/"
# Parts of Keras that say nothing of what they are called for.
_HELPERS = tuple(
    os.path.join(_LIBRARIES[0], "src", name, "")
    for name in ("backend", "ops", "tree", "utils")
)


def cause_of(operation: tf.Operation) -> str:
    """Return the line of code that has caused an operation.

    For an operation of the backward pass, it is the line of the operation whose
    gradient it computes. If several lines may be meant, it is the name of the
    layer.
    """
    frames = compat.frames_of_gradient(list(operation.traceback))
    if frames is None or any(_is_users(frame.filename) for frame in frames):
        return line_of(operation)
    _, _, name = operation.name.partition(_GRADIENTS)
    layer = ""
    while name:
        # The scope is that of the layer, or has the name of the operation.
        name = name.rpartition("/")[0]
        inside = [
            o
            for o in operation.graph.get_operations()
            if name in (o.name, o.name.rpartition("/")[0])
        ]
        layer = layer or (name if inside else "")
        forward = [o for o in inside if compat.is_gradient_of(o, frames)]
        if forward:
            line = _common_line(operation, forward)
            return f"the gradient of {line or layer}"
    return f"the gradient of {layer}" if layer else line_of(operation)


def _common_line(
    operation: tf.Operation, forward: Sequence[tf.Operation]
) -> str:
    """Return the line of the operations whose gradient it may be, if it is one.

    Args:
        operation: an operation of the gradient.
        forward: the operations. Those whose tensors it takes come first.

    Returns:
        The line; empty: they have several.
    """
    used = {id(tensor) for tensor in operation.inputs}
    near = [
        o
        for o in forward
        if any(id(t) in used for t in (*o.inputs, *o.outputs))
    ]
    for candidate in (near, forward):
        lines = {line_of(o) for o in candidate}
        if len(lines) == 1:
            return lines.pop()
    return ""


def line_of(operation: tf.Operation) -> str:
    """Return the innermost line of the user's code.

    Without one, return the name of the operation, and the function of Keras
    that added it.
    """
    line, function = _innermost(operation.traceback)
    return line or f"{_scope_of(operation)}{function}"


class SharedLines:
    """The lines of operations, which then share their tracebacks."""

    def __init__(self) -> None:
        self._tracebacks: dict[Any, Any] = {}
        self._found: dict[Any, tuple[str, str]] = {}

    def line_of(self, operation: tf.Operation) -> str:
        """Return the innermost line of the user's code, as ``line_of``."""
        if operation.traceback is None:
            return _scope_of(operation)
        stack = compat.shared_traceback(operation, self._tracebacks)
        if stack not in self._found:
            self._found[stack] = _innermost(stack)
        line, function = self._found[stack]
        return line or f"{_scope_of(operation)}{function}"


def _scope_of(operation: tf.Operation) -> str:
    return operation.name.rpartition("/")[0] or operation.type


def _innermost(stack: Iterable[Any] | None) -> tuple[str, str]:
    """Return the innermost line of the user's code, and function of Keras.

    Args:
        stack: the stack; None: of an imported operation.
    """
    function = ""
    for frame in reversed(list(stack or ())):
        path = frame.filename
        if path == trace.__file__:
            break
        if _is_users(path):
            line = linecache.getline(path, frame.lineno).strip()
            return f"{os.path.basename(path)}:{frame.lineno}: {line}", function
        # Python 3.12 has no frame for a comprehension.
        of_keras = path.startswith(_LIBRARIES[0]) and frame.name[0] != "<"
        if not function and of_keras and not path.startswith(_HELPERS):
            file = os.path.basename(path)
            function = f", in {frame.name}() of Keras's {file}"
    return "", function


@functools.cache
def _is_users(path: str) -> bool:
    path = os.path.abspath(path)
    return not path.startswith(_LIBRARIES) and os.path.exists(path)
