"""Options of reductions, as users give them to optimizers and tapes."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import horovod.tensorflow as hvd
import keras

from keras_towers.dropin import check_compression, variable_key
from keras_towers.errors import TowerError


@dataclasses.dataclass(frozen=True, eq=False)
class Options:
    """Options of a reduction; see ``DistributedOptimizer``."""

    name: str
    device_dense: str = ""
    device_sparse: str = ""
    compression: Any = hvd.Compression.none
    sparse_as_dense: bool = False
    predivide: float = 1.0
    op: Any = hvd.Average
    groups: Any = None
    process_set: Any = hvd.global_process_set
    scale_local: bool = True

    def form(self) -> tuple[Any, ...]:
        """A key that is equal for equal options."""
        groups = self.groups
        if isinstance(groups, list):
            groups = tuple(tuple(map(variable_key, part)) for part in groups)
        given = {**vars(self), "groups": groups}
        given["process_set"] = self.process_set.process_set_id
        return tuple(given.values())


def checked(what: str, num_groups: int = 0, **given: Any) -> Options:
    """Make options of a user's arguments, or raise ``TowerError``."""
    if not hvd.is_initialized():
        raise TowerError(
            "Horovod is not initialized: call hvd.init() before "
            f"hvd.{what}(...)."
        )
    if num_groups:
        warnings.warn(
            "num_groups is now called groups", DeprecationWarning, stacklevel=3
        )
        if given["groups"] is None:
            given["groups"] = num_groups
    options = Options(**given)
    _check_op(options.op)
    check_compression(options.compression, "hvd")
    if options.predivide != 1.0:
        if options.op != hvd.Average:
            raise TowerError(
                "gradient_predivide_factor applies only to averages: leave it "
                "out, or use op=hvd.Average."
            )
        if options.predivide <= 0 or hvd.rocm_built():
            raise TowerError(
                f"gradient_predivide_factor is {options.predivide!r}: it must "
                "be greater than 0, and 1 with ROCm."
            )
    groups = options.groups
    if not (
        groups is None
        or isinstance(groups, list)
        or (isinstance(groups, int) and groups >= 0)
    ):
        raise TowerError(
            f"groups is {groups!r}: give a number of groups, or a list of "
            "lists of variables."
        )
    return options


def layers_in(local_layers: Any) -> list[keras.Layer]:
    """The layers, one or several, that a user has given as local."""
    layers = [] if local_layers is None else keras.tree.flatten(local_layers)
    if not all(isinstance(layer, keras.Layer) for layer in layers):
        raise TowerError("local_layers takes a Keras layer or a list of them.")
    return layers


def _check_op(op: Any) -> None:
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
