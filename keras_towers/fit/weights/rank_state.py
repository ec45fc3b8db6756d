"""Checks and synchronizes the state that all ranks share.

That is, variables: their names and shapes, and their values. What a call
requests is compared in ``calls/rank_agreement.py``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.rendezvous import check
from keras_towers.rendezvous.check import Peers
from keras_towers.transport import Transport
from keras_towers.transport.keys import next_key

_SHOWN = 5


def check_same(peers: Peers, variables: Sequence[keras.Variable]) -> None:
    """Check that all ranks have the same variable names, shapes and dtypes."""
    described = [
        f"{v.path} {list(v.shape)} {keras.backend.standardize_dtype(v.dtype)}"
        for v in variables
    ]
    ranks = check.gather(peers, described, "compares the variables")
    for rank, other in enumerate(ranks):
        pairs = [
            (first, second)
            for first, second in itertools.zip_longest(
                ranks[0], other, fillvalue="none"
            )
            if check.without_numbers(first) != check.without_numbers(second)
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
    """List the first of some variables, or "none" for each that is missing."""
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


@dataclasses.dataclass(frozen=True)
class WrittenVariables:
    """The variables that ranks have written, and are to share.

    Attributes:
        by_root: the variables by the first rank that has written each.
        conflict: a variable into which ranks have written different values, and
            who wrote it, for a message; empty if there is none.
    """

    by_root: dict[int, list[keras.Variable]]
    conflict: str


def gather_written(
    transport: Transport,
    variables: Sequence[keras.Variable],
    names: Mapping[keras.Variable, str],
    ranks_train_apart: bool,
) -> WrittenVariables:
    """Find out which ranks have written which variables. Collective.

    Args:
        transport: connects the ranks.
        variables: all that may have been written, the same on all ranks.
        names: the writers of variables on this rank.
        ranks_train_apart: whether each rank keeps its value of a variable that
            all ranks have written.
    """
    written_here = {
        str(place): (_digest(variable), names[variable])
        for place, variable in enumerate(variables)
        if variable in names
    }
    ranks = check.gather(
        transport, written_here, "takes over what callbacks wrote"
    )
    roots: dict[int, list[keras.Variable]] = {}
    conflict = ""
    for place in dict.fromkeys(itertools.chain(*ranks)):
        by_rank = {
            r: written[place]
            for r, written in enumerate(ranks)
            if place in written
        }
        values_differ = len({digest for digest, _ in by_rank.values()}) > 1
        variable = variables[int(place)]
        keeps_values = ranks_train_apart or not values_differ
        if len(by_rank) == len(ranks) and keeps_values:
            continue
        roots.setdefault(min(by_rank), []).append(variable)
        if values_differ:
            who = (f"rank {r}: {name}" for r, (_, name) in by_rank.items())
            conflict = f"{variable.path} ({', '.join(who)})"
    return WrittenVariables(roots, conflict)


def _digest(variable: keras.Variable) -> str:
    value = variable._value.numpy()
    return hashlib.sha256(value.tobytes()).hexdigest()[:16]
