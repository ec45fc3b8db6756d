"""Accumulators average the gradients of a variable, and drop stale ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from keras_towers.foundation.errors import TowerError
from keras_towers.reduction.gradients import Gradient
from keras_towers.replicas.named_resources import make_handle

# TensorFlow's accumulators cannot add bfloat16; float16 could overflow.
_ACCUMULATED_AS = {tf.bfloat16: tf.float32, tf.float16: tf.float32}
_KNOWN = (tf.float32, tf.float64)

# The 63-bit index of a slice packs its row, the number of its gradient, and its
# position in that gradient.
_SLICES = 1 << 22
MAX_GRADIENTS: int = 1 << 12
_PER_ROW = _SLICES * MAX_GRADIENTS
_MAX_ROWS = (1 << 63) // _PER_ROW - 1


@dataclasses.dataclass(frozen=True)
class GradientSpec:
    """The gradient of a variable, and the device that averages it."""

    name: str
    shape: tuple[Any, ...]
    dtype: tf.DType
    sparse: bool
    device: str

    @property
    def accumulated(self) -> tf.DType:
        """The dtype in which gradients are added up."""
        return _ACCUMULATED_AS.get(self.dtype, self.dtype)


class Accumulator:
    """Adds up gradients of one variable until their average is taken.

    A gradient is dropped if its step is less than the number of averages taken.
    """

    def __init__(self, name: str, spec: GradientSpec):
        self._name = name
        self._spec = spec

    def push(
        self, grad: Gradient, step: tf.Tensor, gradient_number: tf.Tensor
    ) -> tf.Operation:
        """Add a gradient of a step.

        Args:
            grad: the gradient.
            step: the step whose weights it was computed with.
            gradient_number: differs for all gradients of an average.
        """
        raise NotImplementedError

    def take_average(self, count: tf.Tensor) -> Gradient:
        """Wait for at least ``count`` gradients, and take their average."""
        raise NotImplementedError

    def _left(self) -> tf.Tensor:
        """Return the number of gradients not yet taken."""
        raise NotImplementedError

    def _set_step(self, step: tf.Tensor) -> tf.Operation:
        raise NotImplementedError

    def advance_to(self, step: tf.Tensor, drops: bool) -> tf.Operation:
        """Drop gradients of earlier steps from now on.

        Args:
            step: the step that begins.
            drops: whether to drop those that were pushed before, too.
        """

        def drop() -> tf.Tensor:
            taken = tf.nest.flatten(
                self.take_average(left), expand_composites=True
            )
            with tf.control_dependencies(taken):
                return tf.constant(True)

        with tf.device(self._spec.device):
            if not drops:
                return self._set_step(step)
            left = self._left()
            dropped = tf.cond(left > 0, drop, lambda: tf.constant(False))
            with tf.control_dependencies([dropped]):
                return self._set_step(step)


class DenseAccumulator(Accumulator):
    """An accumulator of tensors, or of their sum, with ``reduction="SUM"``."""

    def __init__(self, name: str, spec: GradientSpec, reduction: str = "MEAN"):
        super().__init__(name, spec)
        self._handle = make_handle(
            name,
            spec.device,
            lambda: tf.raw_ops.ResourceConditionalAccumulator(
                dtype=spec.accumulated,
                shape=spec.shape,
                shared_name=name,
                reduction_type=reduction,
            ),
        )

    def push(
        self,
        grad: Gradient,
        step: tf.Tensor,
        gradient_number: tf.Tensor | None = None,
    ) -> tf.Operation:
        grad = tf.convert_to_tensor(grad)
        with tf.device(self._spec.device):
            # Cast on the device, so that fewer bytes are sent.
            grad = tf.cast(grad, self._spec.accumulated)
            return tf.raw_ops.ResourceAccumulatorApplyGradient(
                handle=self._handle, local_step=step, gradient=grad
            )

    def take_average(self, count: tf.Tensor) -> Gradient:
        with tf.device(self._spec.device):
            average = tf.raw_ops.ResourceAccumulatorTakeGradient(
                handle=self._handle,
                num_required=tf.cast(count, tf.int32),
                dtype=self._spec.accumulated,
            )
            average = tf.ensure_shape(average, self._spec.shape)
            return tf.cast(average, self._spec.dtype)

    def _left(self) -> tf.Tensor:
        return tf.raw_ops.ResourceAccumulatorNumAccumulated(handle=self._handle)

    def _set_step(self, step: tf.Tensor) -> tf.Operation:
        return tf.raw_ops.ResourceAccumulatorSetGlobalStep(
            handle=self._handle, new_global_step=step
        )


class SparseAccumulator(Accumulator):
    """An accumulator of slices; an extra row counts gradients.

    TensorFlow's accumulator adds up slices with the same row, and its mean
    divides each row by the number of gradients that have it. But a Keras
    optimizer may treat two slices of a row differently from their sum (Adam
    squares each of them). So every slice gets a unique index, made of its row,
    the number of its gradient, and its position in that gradient.
    """

    def _by_name(self) -> Any:
        # It cannot be created outside of a graph: every graph has an operation
        # that finds it by name. Without a handle it is never freed, but it
        # holds few bytes.
        return tf.compat.v1.SparseConditionalAccumulator(
            self._spec.accumulated,
            shape=[None, *self._spec.shape[1:]],
            shared_name=self._name,
            reduction_type="SUM",
        )

    def push(
        self, grad: Gradient, step: tf.Tensor, gradient_number: tf.Tensor
    ) -> tf.Operation:
        rows = tf.cast(grad.indices, tf.int64)
        slices = tf.size(rows, tf.int64)
        fits = tf.debugging.assert_less(
            slices,
            tf.constant(_SLICES, tf.int64),
            f"the gradient of {self._spec.name} has too many slices",
        )
        with tf.control_dependencies([fits]):
            numbers = (rows * MAX_GRADIENTS + gradient_number) * _SLICES
            numbers += tf.range(slices)
        # TensorFlow merges gradients whose indices are in order.
        order = tf.argsort(numbers)
        values = tf.cast(grad.values, self._spec.accumulated)
        one = tf.ones([1, *self._spec.shape[1:]], values.dtype)
        last = tf.constant([self._spec.shape[0] * _PER_ROW], tf.int64)
        counted = tf.IndexedSlices(
            tf.concat([tf.gather(values, order), one], 0),
            tf.concat([tf.gather(numbers, order), last], 0),
        )
        with tf.device(self._spec.device):
            return self._by_name().apply_indexed_slices_grad(counted, step)

    def take_average(self, count: tf.Tensor) -> tf.IndexedSlices:
        with tf.device(self._spec.device):
            total = self._by_name().take_indexed_slices_grad(
                tf.cast(count, tf.int32)
            )
            values = total.values[:-1] / total.values[-1]
            return tf.IndexedSlices(
                tf.cast(values, self._spec.dtype),
                total.indices[:-1] // _PER_ROW,
                tf.constant(self._spec.shape, tf.int64),
            )

    def _left(self) -> tf.Tensor:
        return self._by_name().num_accumulated()

    def _set_step(self, step: tf.Tensor) -> tf.Operation:
        return self._by_name().set_global_step(step)


def accumulator(name: str, spec: GradientSpec) -> Accumulator:
    """Create the accumulator of a gradient."""
    if spec.accumulated not in _KNOWN:
        raise TowerError(
            f"the gradient of {spec.name} is of dtype {spec.dtype.name}, which "
            "cannot be averaged over replicas: train variables of a floating "
            "dtype only."
        )
    if not spec.sparse:
        return DenseAccumulator(name, spec)
    if spec.shape[0] > _MAX_ROWS:
        raise TowerError(
            f"the first axis of {spec.name} has {spec.shape[0]} entries, but "
            "its sparse gradients can be averaged over replicas for at most "
            f"{_MAX_ROWS}: divide the weight into several."
        )
    return SparseAccumulator(name, spec)
