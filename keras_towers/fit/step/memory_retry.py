"""Steps that run again in more micro-batches when memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers._notices import announce
from keras_towers.fit.weights.tower_variables import read_handle

# How often a cancelled step is repeated to find the error that cancelled it.
_MAX_CANCELLED = 10


class MemoryRetry:
    """Runs steps again, with more micro-batches, whenever memory runs out.

    Before that it restores the variables.

    Attributes:
        micro_batches: the number of micro-batches of each tower.
        variables: what steps that have been traced use.
    """

    def __init__(self, model: str, micro_batches: int):
        self._model = model
        self.micro_batches = micro_batches
        self.variables: _Variables = _Variables()

    def run(
        self,
        run_once: Callable[[], Any],
        rows: int,
        retrace: Callable[[], None],
    ) -> Any:
        """Run steps until they fit into memory.

        Args:
            run_once: runs the steps.
            rows: the largest number of rows of a batch on one tower.
            retrace: lets the steps be traced again.
        """
        cancelled = 0
        while True:
            self.variables.read()
            try:
                return run_once()
            except tf.errors.ResourceExhaustedError:
                self.variables.put_back()
                if self.micro_batches >= rows:
                    raise
                self._use_more_micro_batches(rows)
                retrace()
            except tf.errors.CancelledError:
                # TensorFlow may report a tower that it cancelled after another
                # one failed, instead of the failure.
                self.variables.put_back()
                cancelled += 1
                if cancelled == _MAX_CANCELLED:
                    raise

    def _use_more_micro_batches(self, rows: int) -> None:
        self.micro_batches = min(2 * self.micro_batches, rows)
        announce(
            f"a step of model {self._model!r} ran out of memory and is "
            "retried; each tower now processes its rows in "
            f"{self.micro_batches} parts"
        )


class _Variables:
    """The variables that steps use, with their values before a step."""

    def __init__(self) -> None:
        self._handles: dict[int, Any] = {}
        self._values: dict[int, Any] = {}

    def add(self, graph: Any) -> None:
        """Add the variables of a step that has been traced but not run."""
        with tf.init_scope():
            for handle, _ in graph.captures:
                if id(handle) not in self._handles and _is_variable(handle):
                    self._handles[id(handle)] = handle
                    self._values[id(handle)] = _value_of(handle)

    def read(self) -> None:
        """Save the current values."""
        self._values = {k: _value_of(h) for k, h in self._handles.items()}

    def forget(self) -> None:
        """Discard the saved values."""
        self._values = {}

    def put_back(self) -> None:
        """Assign the saved values."""
        for key, value in self._values.items():
            handle = self._handles[key]
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def _is_variable(handle: Any) -> bool:
    """Whether a tensor is the handle of a variable that has a value."""
    if handle.dtype != tf.resource or compat.type_of_variable(handle) is None:
        return False
    return bool(tf.raw_ops.VarIsInitializedOp(resource=handle))


def _value_of(handle: Any) -> tf.Tensor:
    """Return a variable's value in host memory.

    A variable in host memory is not copied until it changes.
    """
    value = read_handle(handle)
    with tf.device("CPU:0"):
        return tf.identity(value)
