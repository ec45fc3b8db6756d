"""Checking and synchronizing state that all ranks share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.fit.weights import variables as variables_lib
from keras_towers.meeting import check
from keras_towers.meeting.check import Peers
from keras_towers.reduction import sum_over_ranks
from keras_towers.transport import Transport, next_key

_SHOWN = 5


def check_same(peers: Peers, variables: Sequence[keras.Variable]) -> None:
    """Check that all ranks have the same variable names, shapes and dtypes."""
    mine = [
        (v.path, tuple(v.shape), keras.backend.standardize_dtype(v.dtype))
        for v in variables
    ]
    lists = check.gather(peers, mine, "compares the variables")
    for rank, other in enumerate(lists):
        missing, extra = [], []
        for first, second in itertools.zip_longest(lists[0], other):
            if _kind(first) != _kind(second):
                missing += [first] * (first is not None)
                extra += [second] * (second is not None)
        if not missing and not extra:
            continue
        raise TowerError(
            f"rank {rank} does not have the variables of rank 0. Only on rank "
            f"0: {_listed(missing)}. Only on rank {rank}: {_listed(extra)}. "
            "Every rank has to build the same model in the same order, and "
            "compile it the same way."
        )


def _kind(entry: tuple | None) -> tuple | None:
    return entry and (check.unnumbered(entry[0]), *entry[1:])


def _listed(entries: Sequence[tuple]) -> str:
    shown = [
        f"{path} {list(shape)} {dtype}"
        for path, shape, dtype in entries[:_SHOWN]
    ]
    if len(entries) > _SHOWN:
        shown.append(f"{len(entries) - _SHOWN} more")
    return ", ".join(shown) or "none"


def broadcast(
    transport: Transport, variables: Sequence[Any], root: int = 0
) -> None:
    """Broadcast the values of variables from one rank to all ranks."""
    values = [_merged(variable) for variable in variables]
    known = [i for i, v in enumerate(values) if v.dtype != tf.string]
    received = transport.broadcast(
        [values[i] for i in known], next_key("broadcast"), root
    )
    if transport.rank == root:
        return
    for index, value in zip(known, received, strict=True):
        _assign(variables[index], value)


def total(transport: Transport, variables: Sequence[Any]) -> list[tf.Tensor]:
    """Return the merged values of variables, summed over the ranks."""
    return sum_over_ranks(transport, [_merged(v) for v in variables])


def _merged(variable: Any) -> tf.Tensor:
    if isinstance(variable, variables_lib.TowerVariable):
        return variable.merged_value()
    return variable.read_value()


def _assign(variable: Any, value: tf.Tensor) -> None:
    if isinstance(variable, variables_lib.TowerVariable):
        variable.assign_everywhere(value)
    else:
        variable.assign(value, read_value=False)
