"""Reduces the gradients of optimizers and tapes over Horovod's ranks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.util import split_list

from keras_towers.engines.dropin import (
    Compression,
    check_compression,
    variable_key,
)
from keras_towers.engines.dropin.gradient_reducer import Reducer, name_or_kind
from keras_towers.engines.horovod.horovod_transport import HorovodTransport
from keras_towers.fit.context.identity_dict import IdentityKey
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Variable
from keras_towers.reduction.gradients import Gradient, divide
from keras_towers.reduction.rank_sum import sum_over_ranks
from keras_towers.transport import Transport


@dataclasses.dataclass(frozen=True)
class ReductionOptions:
    """Options of a reduction; see ``DistributedOptimizer``.

    Attributes:
        groups: a number of groups, or the keys of each group's variables.
    """

    name: str
    device_dense: str
    device_sparse: str
    compression: Compression
    sparse_as_dense: bool
    gradient_predivide_factor: float
    op: int
    groups: int | tuple[tuple[IdentityKey[tf.Variable], ...], ...] | None
    process_set: hvd.ProcessSet
    scale_local_gradients: bool


def checked_options(
    num_groups: int, groups: int | list[list[Variable]] | None, **arguments: Any
) -> ReductionOptions:
    """Convert a user's arguments to options, or raise ``TowerError``."""
    if not hvd.is_initialized():
        raise TowerError(
            "Horovod is not initialized: call hvd.init() before you distribute "
            "an optimizer or a tape."
        )
    if groups is None and num_groups:
        groups = num_groups
    keys: int | tuple[tuple[IdentityKey[tf.Variable], ...], ...] | None
    if isinstance(groups, list):
        keys = tuple(
            tuple(variable_key(variable) for variable in group)
            for group in groups
        )
    elif groups is None or (isinstance(groups, int) and groups >= 0):
        keys = groups
    else:
        raise TowerError(
            f"groups is {groups!r}: give a number of groups, or a list of "
            "lists of variables."
        )
    options = ReductionOptions(groups=keys, **arguments)
    _check_op(options.op)
    check_compression(options.compression, "hvd")
    factor = options.gradient_predivide_factor
    if factor != 1.0:
        if options.op != hvd.Average:
            raise TowerError(
                "gradient_predivide_factor applies only to averages: leave it "
                "out, or use op=hvd.Average."
            )
        if factor <= 0 or hvd.rocm_built():
            raise TowerError(
                f"gradient_predivide_factor is {factor!r}: it must be greater "
                "than 0, and 1 with ROCm."
            )
    return options


def _check_op(op: int) -> None:
    if op not in (hvd.Average, hvd.Sum, hvd.Adasum):
        raise TowerError(
            f"op is {op!r}: give hvd.Average, hvd.Sum or hvd.Adasum."
        )
    if op == hvd.Adasum and hvd.size() > 1:
        if not hvd.mpi_enabled():
            raise TowerError(
                "hvd.Adasum needs a Horovod that was built with MPI and runs "
                "over MPI (horovodrun --mpi); this one runs over Gloo. Use "
                "hvd.Average."
            )
        if hvd.size() & (hvd.size() - 1):
            raise TowerError(
                "hvd.Adasum needs a power of 2 as the number of ranks, not "
                f"{hvd.size()}. Use hvd.Average or another number of ranks."
            )


@tf.custom_gradient
def _unknown(
    grad: Gradient,
) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Return a gradient that is no constant to TensorFlow."""
    return compat.unknown(grad), lambda upstream: upstream


class GradientReducer(Reducer):
    """Reduces the gradients of one optimizer or tape over the ranks.

    Args:
        options: how to reduce.
        key: as for ``Reducer``.
    """

    module = "hvd"

    def __init__(self, options: ReductionOptions, key: str | None = None):
        super().__init__(options.sparse_as_dense, key)
        self.options = options
        self.all_ranks = options.process_set.process_set_id == 0

    def transport(self) -> Transport:
        return HorovodTransport(self.options.process_set)

    def communicates(self) -> bool:
        processes = self.options.process_set
        return bool(processes.included() and processes.size() > 1)

    def scale_local(self, grad: Gradient) -> Gradient:
        if not self.options.scale_local_gradients:
            return grad
        return self._divide_by_size(grad)

    def reduce_global(
        self, grads: list[Gradient], variables: list[Variable]
    ) -> list[Gradient]:
        sparse = [isinstance(grad, tf.IndexedSlices) for grad in grads]
        if any(sparse) and self.options.op == hvd.Adasum:
            raise TowerError(
                "Adasum cannot reduce sparse gradients, such as the gradient "
                f"of {name_or_kind(variables[sparse.index(True)])}. Give "
                "sparse_as_dense=True."
            )
        if not tf.executing_eagerly() and compat.in_xla_context(
            tf.compat.v1.get_default_graph()
        ):
            raise TowerError(
                "Horovod's operations do not run inside XLA: use "
                "model.compile(..., jit_compile=False), or leave jit_compile "
                "out of your tf.function."
            )
        return super().reduce_global(grads, variables)

    def reduce_groups(
        self, grads: list[Gradient], groups: list[list[int]], key: str
    ) -> list[Gradient]:
        results: dict[int, Gradient] = {}
        prefix = f"{self.options.name}_{key}_grad"
        prefix = re.sub("[^a-zA-Z0-9_]", "_", prefix)
        for group in groups:
            first, *rest = group
            name = f"{prefix}_{first}"
            grad = grads[first]
            if isinstance(grad, tf.IndexedSlices):
                results[first] = self._gather(grad, name)
            elif not rest:
                results[first] = hvd.allreduce(
                    _unknown(grad), name=name, **self._arguments()
                )
            else:
                reduced = hvd.grouped_allreduce(
                    [_unknown(grads[index]) for index in group],
                    name=f"{name}_group",
                    **self._arguments(),
                )
                for index, grad in zip(group, reduced, strict=True):
                    results[index] = grad
        return [results[index] for index in range(len(grads))]

    def _gather(self, grad: tf.IndexedSlices, name: str) -> Gradient:
        with tf.device(self.options.device_sparse):
            (gathered,) = sum_over_ranks(self.transport(), [grad], key=name)
        if self.options.op == hvd.Sum:
            return gathered
        return self._divide_by_size(gathered)

    def _arguments(self) -> dict[str, object]:
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

    def _divide_by_size(self, grad: Gradient) -> Gradient:
        return divide(grad, self.options.process_set.size())

    def groups_of(
        self, grads: Sequence[object], variables: Sequence[Variable]
    ) -> list[list[int]]:
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
