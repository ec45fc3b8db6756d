"""One accumulator for each of a model's gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.reduction import Gradient
from keras_towers.replicas.resources import destroy, named

# TensorFlow's accumulators cannot add bfloat16; float16 could overflow.
_ACCUMULATED_AS = {tf.bfloat16: tf.float32, tf.float16: tf.float32}
_KNOWN = (tf.float32, tf.float64)

# Of the 63 bits of an index of a slice: those for its position in a gradient,
# and those for the number of its gradient among those of an average.
_SLICES = 1 << 22
GRADIENTS: int = 1 << 12
_PER_ROW = _SLICES * GRADIENTS


@dataclasses.dataclass(frozen=True)
class GradientSpec:
    """What an accumulator is made for.

    Attributes:
        name: of the variable, for messages.
        shape: of the variable.
        dtype: of the gradient.
        sparse: whether the gradient is a ``tf.IndexedSlices``.
        device: where it is accumulated: that of the variable.
    """

    name: str
    shape: tuple[int, ...]
    dtype: tf.DType
    sparse: bool
    device: str

    @property
    def accumulated(self) -> tf.DType:
        """The dtype in which gradients are added up."""
        return _ACCUMULATED_AS.get(self.dtype, self.dtype)


class Accumulators:
    """Averages the gradients that replicas push, each variable for itself.

    A gradient that is older than the number of averages taken so far is
    dropped, which costs no more than sending it. ``push`` and ``take`` work
    inside a ``tf.function`` only.

    Args:
        name: prefix of the names of the resources; every process that uses the
            same name and device shares them.
        specs: describe the N gradients.

    Raises:
        TowerError: a gradient has a dtype that cannot be averaged.
    """

    def __init__(self, name: str, specs: Sequence[GradientSpec]):
        for spec in specs:
            if spec.accumulated not in _KNOWN:
                raise TowerError(
                    f"the gradient of {spec.name} is of dtype "
                    f"{spec.dtype.name}, which cannot be averaged over "
                    "replicas: train variables of a floating dtype only."
                )
        self._parts: list[_Dense | _Sparse] = [
            (_Sparse if spec.sparse else _Dense)(f"{name}/{index}", spec)
            for index, spec in enumerate(specs)
        ]

    def push(
        self, grads: Sequence[Gradient], step: tf.Tensor, number: tf.Tensor
    ) -> list[tf.Operation]:
        """Add the N gradients of one replica.

        Args:
            grads: the gradients.
            step: the number of averages that had been taken when the replica
                began to compute them.
            number: tells them from all others of the average, 0 to
                ``GRADIENTS`` - 1.

        Returns:
            What has to run before all of them have been added.
        """
        return [
            part.push(grad, step, number)
            for part, grad in zip(self._parts, grads, strict=True)
        ]

    def take(self, count: tf.Tensor) -> list[Gradient]:
        """Take the averages of all gradients pushed since the last time.

        Args:
            count: how many gradients there have to be, at least; waits until
                there are.

        Returns:
            N averages.
        """
        return [part.take(count) for part in self._parts]

    def begin_anew(self, step: tf.Tensor) -> list[tf.Operation]:
        """Drop what nobody has taken, and older gradients from now on.

        Args:
            step: counts as the number of averages that have been taken.

        Returns:
            What has to run before all of them have begun.
        """
        return [part.begin_anew(step) for part in self._parts]

    def go_to(self, step: tf.Tensor) -> list[tf.Operation]:
        """Drop older gradients from now on, but nothing that is there.

        Args:
            step: counts as the number of averages that have been taken.

        Returns:
            What has to run before all of them do so.
        """
        return [part.go_to(step) for part in self._parts]

    def destroy(self) -> None:
        """Free the gradients that nobody has taken."""
        for part in self._parts:
            part.destroy()


class _Dense:
    def __init__(self, name: str, spec: GradientSpec):
        self._spec = spec
        self._handle = named(
            name,
            spec.device,
            lambda: tf.raw_ops.ResourceConditionalAccumulator(
                dtype=spec.accumulated, shape=spec.shape, shared_name=name
            ),
        )

    def push(
        self, grad: Any, step: tf.Tensor, number: tf.Tensor
    ) -> tf.Operation:
        grad = tf.cast(tf.convert_to_tensor(grad), self._spec.accumulated)
        with tf.device(self._spec.device):
            return tf.raw_ops.ResourceAccumulatorApplyGradient(
                handle=self._handle, local_step=step, gradient=grad
            )

    def take(self, count: tf.Tensor) -> tf.Tensor:
        with tf.device(self._spec.device):
            average = tf.raw_ops.ResourceAccumulatorTakeGradient(
                handle=self._handle,
                num_required=tf.cast(count, tf.int32),
                dtype=self._spec.accumulated,
            )
            average = tf.ensure_shape(average, self._spec.shape)
            return tf.cast(average, self._spec.dtype)

    def begin_anew(self, step: tf.Tensor) -> tf.Operation:
        with tf.device(self._spec.device):
            left = tf.raw_ops.ResourceAccumulatorNumAccumulated(
                handle=self._handle
            )
            with tf.control_dependencies([_drop(left, self.take)]):
                return self.go_to(step)

    def go_to(self, step: tf.Tensor) -> tf.Operation:
        with tf.device(self._spec.device):
            return tf.raw_ops.ResourceAccumulatorSetGlobalStep(
                handle=self._handle, new_global_step=step
            )

    def destroy(self) -> None:
        destroy(self._handle, self._spec.device)


class _Sparse:
    """Collects the slices of all gradients; an extra row counts gradients.

    TensorFlow's accumulator adds slices of one row up, and its mean divides
    each row by the number of gradients that have it. But what a Keras optimizer
    does with two slices of one row may differ from what it does with their sum
    (it squares each of them), so each slice has an index of its own here: its
    row, the number of its gradient, and its position in that.
    """

    def __init__(self, name: str, spec: GradientSpec):
        self._spec = spec
        self._name = name
        self._rows = spec.shape[0]

    def _accumulator(self) -> Any:
        # There is none that could be kept outside of a graph: each graph has
        # an operation of its own that finds the accumulator by name.
        return tf.compat.v1.SparseConditionalAccumulator(
            self._spec.accumulated,
            shape=[None, *self._spec.shape[1:]],
            shared_name=self._name,
            reduction_type="SUM",
        )

    def push(
        self, grad: Any, step: tf.Tensor, number: tf.Tensor
    ) -> tf.Operation:
        rows = tf.cast(grad.indices, tf.int64)
        slices = tf.size(rows, tf.int64)
        fits = tf.debugging.assert_less(
            slices,
            tf.constant(_SLICES, tf.int64),
            f"the gradient of {self._spec.name} has too many slices",
        )
        with tf.control_dependencies([fits]):
            mine = (rows * GRADIENTS + number) * _SLICES + tf.range(slices)
        # TensorFlow merges gradients whose indices are in order.
        order = tf.argsort(mine)
        values = tf.cast(grad.values, self._spec.accumulated)
        one = tf.ones([1, *self._spec.shape[1:]], values.dtype)
        last = tf.constant([self._rows * _PER_ROW], tf.int64)
        counted = tf.IndexedSlices(
            tf.concat([tf.gather(values, order), one], 0),
            tf.concat([tf.gather(mine, order), last], 0),
        )
        with tf.device(self._spec.device):
            return self._accumulator().apply_indexed_slices_grad(counted, step)

    def take(self, count: tf.Tensor) -> tf.IndexedSlices:
        with tf.device(self._spec.device):
            total = self._accumulator().take_indexed_slices_grad(
                tf.cast(count, tf.int32)
            )
            values = total.values[:-1] / total.values[-1]
            return tf.IndexedSlices(
                tf.cast(values, self._spec.dtype),
                total.indices[:-1] // _PER_ROW,
                tf.constant(self._spec.shape, tf.int64),
            )

    def begin_anew(self, step: tf.Tensor) -> tf.Operation:
        with tf.device(self._spec.device):
            left = self._accumulator().num_accumulated()
            with tf.control_dependencies([_drop(left, self.take)]):
                return self.go_to(step)

    def go_to(self, step: tf.Tensor) -> tf.Operation:
        with tf.device(self._spec.device):
            return self._accumulator().set_global_step(step)

    def destroy(self) -> None:
        # It has no handle to destroy it by; what is left in it is small.
        pass


def _drop(left: tf.Tensor, take: Callable[[tf.Tensor], Gradient]) -> tf.Tensor:
    """Take as many gradients as there are left, if any."""

    def drop() -> tf.Tensor:
        taken = tf.nest.flatten(take(left), expand_composites=True)
        with tf.control_dependencies(taken):
            return tf.constant(True)

    return tf.cond(left > 0, drop, lambda: tf.constant(False))
