"""Checking and synchronizing state that all ranks share."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.fit.weights import variables as variables_lib
from keras_towers.reduction import sum_over_ranks
from keras_towers.transport import Transport, next_key, objects

_SHOWN = 5


def check_same(
    transport: Transport, variables: Sequence[keras.Variable]
) -> None:
    """Check that all ranks have the same variable names, shapes and dtypes."""
    mine = [
        (v.path, tuple(v.shape), keras.backend.standardize_dtype(v.dtype))
        for v in variables
    ]
    lists = objects.gather(transport, mine, "compares the variables")
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
    return entry and (unnumbered(entry[0]), *entry[1:])


def unnumbered(path: str) -> str:
    """Return a path without the numbers that make Keras names unique.

    Example:
        >>> unnumbered("sequential_2/dense_11/kernel")
        'sequential/dense/kernel'
    """
    # They count what a process has built, and rank 0 may have built more models
    # than the others.
    return re.sub(r"_\d+(?=[/_ ]|$)", "", path)


def _listed(entries: Sequence[tuple]) -> str:
    shown = [
        f"{path} {list(shape)} {dtype}"
        for path, shape, dtype in entries[:_SHOWN]
    ]
    if len(entries) > _SHOWN:
        shown.append(f"{len(entries) - _SHOWN} more")
    return ", ".join(shown) or "none"


def unlike_gradients(odd: Sequence[Iterable[str]]) -> str:
    """Say that the ranks have different gradients."""
    told = (
        f"rank {rank}: {', '.join(sorted(own)) or 'no others'}"
        for rank, own in enumerate(odd)
    )
    return (
        "the ranks do not have the same gradients. Only on "
        + "; only on ".join(told)
        + ". Every rank has to run the same model, and to compute the same "
        "loss for the same variables."
    )


def broadcast(transport: Transport, variables: Sequence[Any]) -> None:
    """Broadcast the values of variables from rank 0 to all ranks."""
    values = [_merged(variable) for variable in variables]
    known = [i for i, v in enumerate(values) if v.dtype != tf.string]
    received = transport.broadcast(
        [values[i] for i in known], next_key("broadcast")
    )
    if transport.rank == 0:
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
