"""Checks and synchronizes the state that all ranks share.

The state is the variables: their names, shapes and values.
``calls/rank_agreement.py`` compares the arguments of calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.rendezvous import rank_checks
from keras_towers.rendezvous.rank_checks import Peers
from keras_towers.transport import Transport
from keras_towers.transport.keys import next_key

_SHOWN = 5


def check_same(peers: Peers, variables: Sequence[keras.Variable]) -> None:
    """Check that all ranks have the same variable names, shapes and dtypes."""
    described = [
        f"{v.path} {list(v.shape)} {keras.backend.standardize_dtype(v.dtype)}"
        for v in variables
    ]
    ranks = rank_checks.gather(peers, described, "compares the variables")
    for rank, other in enumerate(ranks):
        pairs = [
            (first, second)
            for first, second in itertools.zip_longest(
                ranks[0], other, fillvalue="none"
            )
            if rank_checks.without_numbers(first)
            != rank_checks.without_numbers(second)
        ]
        if pairs:
            missing, extra = zip(*pairs, strict=True)
            raise TowerError(
                f"rank {rank} does not have the variables of rank 0. Only on "
                f"rank 0: {_listed(missing)}. Only on rank {rank}: "
                f"{_listed(extra)}. Every rank has to build the same model in "
                "the same order, and compile it the same way."
            )


def _listed(variables: Sequence[str]) -> str:
    """List the first few variables; missing ones are named "none"."""
    shown = [*dict.fromkeys(variables[:_SHOWN])]
    if len(variables) > _SHOWN:
        shown.append(f"{len(variables) - _SHOWN} more")
    return ", ".join(shown)


def broadcast(
    transport: Transport, variables: Sequence[Any], root: int = 0
) -> None:
    """Broadcast the values of variables from one rank to all ranks."""
    values = [variable.read_value() for variable in variables]
    known = [i for i, v in enumerate(values) if v.dtype != tf.string]
    received = transport.broadcast(
        [values[i] for i in known], next_key("broadcast"), root
    )
    if transport.rank == root:
        return
    for index, value in zip(known, received, strict=True):
        variables[index].assign(value)
