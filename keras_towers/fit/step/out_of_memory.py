"""Steps that take their batch in more parts where memory is not enough."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers._notices import announce
from keras_towers.fit.data import batches as data_lib
from keras_towers.fit.step.global_batch import GlobalStep

# So many steps of a call run with a copy of what they change. What a step
# needs, the next ones need as well: by then it is known to be there.
_FIRST_STEPS = 3
# So often a step is repeated to find out why it was cancelled.
_CANCELLED = 10


class FittingFunction:
    """A function of Keras that runs steps, within the memory there is.

    For ``micro_batches="auto"``. If memory is not enough in the first steps of
    a call, it puts back what these have changed, and runs them again with twice
    as many micro-batches.

    Args:
        function: what Keras has made, of an iterator or of a list of batches.
        make: makes it anew, to be traced again.
        model: the model whose steps it runs.
        step: divides them.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        make: Callable[[], Callable[[Any], Any]],
        model: keras.Model,
        step: GlobalStep,
    ):
        self._function = function
        self._make = make
        self._model = model
        self._step = step
        self._micro_batches = 1
        self._variables = _Variables()
        self._steps = 0
        self._largest = 0

    def begin(self) -> None:
        """Begin a call: its first steps may need more memory than others."""
        self._steps = 0

    def __call__(self, data: Any) -> Any:
        """Run as many steps as Keras runs at a time."""
        spec = None
        if isinstance(data, tf.data.Iterator):
            if self._steps >= _FIRST_STEPS:
                return self._run_once(data)
            spec = data.element_spec
        if isinstance(data, list):
            batches = data
        else:
            number = self._model.steps_per_execution
            batches = list(itertools.islice(data, number))
        if not batches:
            raise StopIteration
        rows = max(self._rows_of(batch) for batch in batches)
        if self._steps >= _FIRST_STEPS and rows <= self._largest:
            return self._run_once(_as_before(data, batches, spec))
        cancelled = 0
        while True:
            self._variables.read()
            try:
                result = self._run(_as_before(data, batches, spec))
                break
            except tf.errors.ResourceExhaustedError:
                self._variables.put_back()
                if self._micro_batches >= rows:
                    raise
                self._take_more_parts(rows)
            except tf.errors.CancelledError:
                # Of several towers, TensorFlow may report one that it stopped
                # when another failed, and not why that failed.
                self._variables.put_back()
                cancelled += 1
                if cancelled == _CANCELLED:
                    raise
        self._variables.forget()
        self._steps += 1
        self._largest = max(self._largest, rows)
        return result

    def _run_once(self, data: Any) -> Any:
        """Run steps that are known to have the memory that they need."""
        result = self._run(data)
        self._variables.forget()
        return result

    def _run(self, data: Any) -> Any:
        step = self._step
        step.micro_batches = self._micro_batches
        step.on_trace = self._variables.add
        try:
            return self._function(data)
        finally:
            step.on_trace = lambda graph: None

    def _take_more_parts(self, rows: int) -> None:
        self._micro_batches = min(2 * self._micro_batches, rows)
        announce(
            f"memory was not enough for a step of model {self._model.name!r}: "
            f"it is done again, and each tower takes its rows in "
            f"{self._micro_batches} parts, one after another"
        )
        self._function = self._make()

    def _rows_of(self, batch: Any) -> int:
        """Return the number of rows that the largest tower has of a batch."""
        config = self._step.config
        if data_lib.is_whole(batch) and config.batches == "split":
            rows = data_lib.batch_size_of(batch)
            return -(-int(rows) // config.num_replicas)
        pieces = data_lib.as_tower_batch(config, batch)
        return max(int(count) for count in data_lib.counts_of(pieces))


class _Variables:
    """The variables that steps use, and what they held before a step."""

    def __init__(self) -> None:
        self._handles: dict[int, Any] = {}
        self._values: dict[int, Any] = {}

    def add(self, graph: Any) -> None:
        """Add what a step reads or changes that has been traced, not run."""
        with tf.init_scope():
            for handle, _ in graph.captures:
                if id(handle) not in self._handles and _is_variable(handle):
                    self._handles[id(handle)] = handle
                    self._values[id(handle)] = _value_of(handle)

    def read(self) -> None:
        """Hold what they have now."""
        self._values = {k: _value_of(h) for k, h in self._handles.items()}

    def forget(self) -> None:
        """Hold nothing any more."""
        self._values = {}

    def put_back(self) -> None:
        """Assign to them what they had."""
        for key, value in self._values.items():
            handle = self._handles[key]
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def _is_variable(handle: Any) -> bool:
    """Whether a tensor is the handle of a variable that has a value."""
    if handle.dtype != tf.resource or compat.type_of_variable(handle) is None:
        return False
    return bool(tf.raw_ops.VarIsInitializedOp(resource=handle))


def _value_of(handle: Any) -> tf.Tensor:
    """Return what a variable holds: in host memory, and where it is if there.

    There nothing is copied until the variable changes.
    """
    dtype = tf.as_dtype(compat.type_of_variable(handle))
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
    with tf.device("CPU:0"):
        return tf.identity(value)


def _as_before(data: Any, batches: Sequence[Any], spec: Any) -> Any:
    """Return batches that were read as what they were read from."""
    if isinstance(data, list):
        return data
    if spec is None:
        return iter(batches)
    dataset = tf.data.Dataset.from_tensors(batches[0])
    for batch in batches[1:]:
        dataset = dataset.concatenate(tf.data.Dataset.from_tensors(batch))
    # Shapes of batches may be known better than those of the data; the function
    # would be traced for them.
    variant = tf.data.experimental.to_variant(dataset)
    return iter(tf.data.experimental.from_variant(variant, spec))
