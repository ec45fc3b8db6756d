"""Reduces the gradients of a step over the ranks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import zlib
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.util import split_list

from keras_towers import compat
from keras_towers.engines.dropin import variable_key
from keras_towers.engines.dropin.distributed_optimizer import Reducer
from keras_towers.errors import TowerError
from keras_towers.reduction import divide
from keras_towers.rendezvous import rank_checks, watch
from keras_towers.rendezvous.rank_environment import is_elastic

# Greater than any digest of gradients; digests are positive.
_ABOVE_DIGESTS = 2**32 + 2


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a reduction; see ``DistributedOptimizer``.

    Attributes:
        groups: a number of groups, or the keys of each group's variables.
    """

    name: str
    device_dense: str
    device_sparse: str
    compression: Any
    sparse_as_dense: bool
    gradient_predivide_factor: float
    op: Any
    groups: int | tuple[tuple[int, ...], ...] | None
    process_set: Any
    scale_local_gradients: bool


class GradientReducer(Reducer):
    """Reduces the gradients of one optimizer or tape over the ranks.

    Horovod matches tensors by name. Names of layers and optimizers differ if
    one rank has created more models than another, so the names here are
    numbered in an order that is the same on all ranks.

    Args:
        options: how to reduce.
        key: a part of these names, the same on all ranks, and different from
            any reducer whose reductions may run at the same time; None: the
            next number.
    """

    module = "hvd"
    _numbers = itertools.count()

    def __init__(self, options: Options, key: str | None = None):
        super().__init__(options.sparse_as_dense)
        self.options = options
        self.all_ranks = options.process_set.process_set_id == 0
        self._key = key
        self._compiled = tf.function(
            self._compare_and_reduce, reduce_retracing=True, autograph=False
        )

    def communicates(self) -> bool:
        if is_elastic():  # The number of ranks may change later.
            return True
        processes = self.options.process_set
        return bool(processes.included() and processes.size() > 1)

    def scale_local(self, grad: Any) -> Any:
        if not self.options.scale_local_gradients:
            return grad
        return self._divide_by_size(grad)

    def reduce_global(
        self, grads: list[Any], variables: list[Any]
    ) -> list[Any]:
        sparse = [isinstance(grad, tf.IndexedSlices) for grad in grads]
        if any(sparse) and self.options.op == hvd.Adasum:
            raise TowerError(
                "Adasum cannot reduce sparse gradients, such as the gradient "
                f"of {_name(variables[sparse.index(True)])}. Give "
                "sparse_as_dense=True."
            )
        if self._key is None:
            self._key = str(next(self._numbers))
        # Descriptions, because the function must not keep variables alive.
        described = [
            _describe(index, grad, variable)
            for index, (grad, variable) in enumerate(
                zip(grads, variables, strict=True)
            )
        ]
        groups = self._groups(grads, variables)
        if tf.executing_eagerly():
            # Eager operations run in sequence; in a function they overlap.
            return self._compiled(grads, described, groups)
        if compat.in_xla_context(tf.compat.v1.get_default_graph()):
            raise TowerError(
                "Horovod's operations do not run inside XLA: use "
                "model.compile(..., jit_compile=False), or leave jit_compile "
                "out of your tf.function."
            )
        return self._compare_and_reduce(grads, described, groups)

    def _compare_and_reduce(
        self,
        grads: list[Any],
        described: list[tuple[str, str]],
        groups: list[list[int]],
    ) -> list[Any]:
        """Reduce gradients, or fail on all ranks if the gradients differ."""
        with tf.control_dependencies([self._compare_gradients(described)]):
            reduced = self._reduce_groups(grads, groups)
        begun, ended = self._counts
        with tf.device("CPU:0"):
            # Once it has the gradients, this rank only waits.
            with tf.control_dependencies(_tensors(grads)):
                number = begun.assign_add(1)
            with tf.control_dependencies(_tensors(reduced)):
                ended.assign(number, read_value=False)
        return reduced

    @functools.cached_property
    def _counts(self) -> tuple[tf.Variable, tf.Variable]:
        """How many reductions have begun, and how many have ended."""
        begun, ended = (
            compat.hidden_variable("CPU:0", 0, tf.int64) for _ in range(2)
        )
        # Counts are compared between ranks, so all ranks have to count.
        if self.all_ranks:
            watch.counters.append(
                lambda: (int(begun.numpy()), int(ended.numpy()))
            )
        return begun, ended

    def _compare_gradients(self, described: list[tuple[str, str]]) -> Any:
        """Return an assertion that all ranks have the same gradients.

        Otherwise each rank could wait for tensors that another never sends. The
        ranks compare a digest of all gradients by its maximum, which ignores
        ranks that have joined: these contribute zeros.
        """
        text = "\n".join(kind for kind, _ in described)
        digest = zlib.crc32(text.encode()) + 1
        name = f"keras_towers_alike_{self._key}"
        with tf.device("CPU:0"):
            # Reading the variable makes the comparison follow the previous step
            # of a loop, and keeps constant folding from running it.
            ended = self._counts[1] >= 0
            own_digest = tf.where(ended, tf.constant(digest, tf.int64), 0)
            highest, lowest = tf.unstack(
                hvd.allreduce(
                    tf.stack([own_digest, _ABOVE_DIGESTS - own_digest]),
                    op=hvd.Max,
                    name=name,
                    process_set=self.options.process_set,
                    ignore_name_scope=True,
                )
            )

            def describe_difference() -> str:
                return rank_checks.describe_gradients(
                    hvd.allgather_object(
                        described,
                        name=name,
                        process_set=self.options.process_set,
                    )
                )

            same = highest + lowest == _ABOVE_DIGESTS
            message = tf.cond(
                same,
                lambda: "",
                lambda: tf.numpy_function(describe_difference, [], tf.string),
            )
            return tf.debugging.Assert(same, [message])

    def _reduce_groups(
        self, grads: list[Any], groups: list[list[int]]
    ) -> list[Any]:
        results: list[Any] = [None] * len(grads)
        prefix = f"{self.options.name}_{self._key}_grad"
        prefix = re.sub("[^a-zA-Z0-9_]", "_", prefix)
        for group in groups:
            first, *rest = group
            name = f"{prefix}_{first}"
            if isinstance(grads[first], tf.IndexedSlices):
                results[first] = self._gather(grads[first], name)
            elif not rest:
                results[first] = hvd.allreduce(
                    grads[first], name=name, **self._arguments()
                )
            else:
                reduced = hvd.grouped_allreduce(
                    [grads[index] for index in group],
                    name=f"{name}_group",
                    **self._arguments(),
                )
                for index, grad in zip(group, reduced, strict=True):
                    results[index] = grad
        return results

    def _gather(self, grad: tf.IndexedSlices, name: str) -> Any:
        def gather(tensor: tf.Tensor, field: str) -> tf.Tensor:
            return hvd.allgather(
                tensor,
                name=f"{name}_{field}",
                ignore_name_scope=True,
                process_set=self.options.process_set,
            )

        with tf.device(self.options.device_sparse):
            gathered = tf.IndexedSlices(
                gather(grad.values, "values"),
                gather(grad.indices, "indices"),
                grad.dense_shape,
            )
        if self.options.op == hvd.Sum:
            return gathered
        return self._divide_by_size(gathered)

    def _arguments(self) -> dict[str, Any]:
        # Horovod itself divides by the number of ranks after the sum.
        factor = self.options.gradient_predivide_factor
        return {
            "device_dense": self.options.device_dense,
            "compression": self.options.compression,
            "op": self.options.op,
            "prescale_factor": 1.0 / factor,
            "postscale_factor": factor,
            "process_set": self.options.process_set,
            "ignore_name_scope": True,
        }

    def _divide_by_size(self, grad: Any) -> Any:
        processes = self.options.process_set
        size = (
            hvd.size_op(process_set_id=processes.process_set_id)
            if is_elastic()
            else processes.size()
        )
        return divide(grad, size)

    def _groups(
        self, grads: Sequence[Any], variables: Sequence[Any]
    ) -> list[list[int]]:
        """The indices of the gradients to reduce together."""
        dense = {
            variable_key(variable): index
            for index, (grad, variable) in enumerate(
                zip(grads, variables, strict=True)
            )
            if not isinstance(grad, tf.IndexedSlices)
        }
        groups = self.options.groups or ()
        if isinstance(groups, int):
            groups = split_list(list(dense), groups)
        grouped = [
            [dense.pop(key) for key in group if key in dense]
            for group in groups
        ]
        members = {index for group in grouped for index in group}
        single = [[i] for i in range(len(grads)) if i not in members]
        return [group for group in grouped if group] + single


def _name(variable: Any) -> str:
    """The name of a variable or tensor; "tensor" if it has none."""
    return getattr(variable, "name", None) or "tensor"


def _describe(index: int, grad: Any, variable: Any) -> tuple[str, str]:
    """Describe a gradient: for a comparison of ranks, and for messages."""
    sparse = "sparse " if isinstance(grad, tf.IndexedSlices) else ""
    kind = f"{list(variable.shape)} {sparse}{grad.dtype.name}"
    name = _name(variable)
    path = rank_checks.without_numbers(getattr(variable, "path", None) or name)
    return f"{index} {name} {kind}", f"{path} {kind}"


def _tensors(values: Sequence[Any]) -> list[Any]:
    return tf.nest.flatten(list(values), expand_composites=True)
