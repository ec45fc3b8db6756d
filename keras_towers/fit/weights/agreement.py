"""Agreement of ranks on variables, and one rank's values for all.

They compare names, shapes and values; ``jobs/rendezvous/rank_checks.py``
exchanges what they compare.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from keras_towers.fit.components import name_of
from keras_towers.fit.weights.copies import native
from keras_towers.fit.weights.shards import ShardedVariable, current_value
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.message_lists import listed
from keras_towers.foundation.object_types import Variable
from keras_towers.jobs.rendezvous import rank_checks
from keras_towers.jobs.rendezvous.rank_checks import Peers
from keras_towers.transport import Transport, messages, next_key

_SHOWN_VARIABLES = 5
# How the digest of a variable in shards over ranks begins.
_IN_SHARDS = "in shards"
# The entries of variables that are sent at a time.
_SENT_ENTRIES = 2**23


def compare_variables(
    peers: Peers,
    variables: Sequence[Variable],
    values: bool = True,
) -> list[Variable]:
    """Check that ranks have the same variables; return those that differ.

    Variables in shards over the ranks do not differ.

    Args:
        peers: the ranks.
        variables: this rank's variables, of Keras or TensorFlow.
        values: whether to compare values, too.

    Returns:
        The variables whose values are not those of rank 0 on all ranks.

    Raises:
        TowerError: their names, shapes or dtypes differ, or rank 0 has a
            variable in shards that other ranks have made again.
    """
    described = [
        f"{name_of(v)} {list(v.shape)} "
        f"{keras.backend.standardize_dtype(v.dtype)}"
        for v in variables
    ]
    digests = [digest_of(variable) for variable in variables if values]
    gathered = rank_checks.gather(
        peers, (described, digests), "compares the variables"
    )
    ranks = [names for names, _ in gathered]
    for rank, other in enumerate(ranks):
        pairs = [
            (first, second)
            for first, second in itertools.zip_longest(
                ranks[0], other, fillvalue="none"
            )
            if rank_checks.name_in_parent(first)
            != rank_checks.name_in_parent(second)
        ]
        if pairs:
            missing, extra = zip(*pairs, strict=True)
            raise TowerError(
                f"rank {rank} does not have the variables of rank 0. Only on "
                f"rank 0: {_listed(missing)}. Only on rank {rank}: "
                f"{_listed(extra)}. Every rank must build the same model in "
                "the same order, and compile it the same way."
            )
    _, of_rank_0 = gathered[0]
    differing = []
    for k, (variable, first) in enumerate(
        zip(variables, of_rank_0, strict=False)
    ):
        others = [of_rank[k] for _, of_rank in gathered]
        if any(digest != first for digest in others):
            if first.startswith(_IN_SHARDS):
                raise TowerError(
                    f"rank 0 still has its shard of {name_of(variable)}, but "
                    "other ranks have made this variable again. Compile and "
                    "build the model on every rank, or on none."
                )
            if variable.dtype == "string":
                raise TowerError(
                    f"the texts of {name_of(variable)} differ between the "
                    "ranks. Give it the same value on every rank."
                )
            differing.append(variable)
    return differing


def digest_of(variable: Variable) -> str:
    """Return a digest of a value.

    For a variable in shards over the ranks it is the variable's place.
    """
    held = current_value(variable)
    if isinstance(held, ShardedVariable) and held.is_remote:
        return f"{_IN_SHARDS} {held.place}"
    return digest_of_value(held.read_value())


def digest_of_value(value: tf.Tensor) -> str:
    """Return a digest of a tensor; it tells numbers apart that are equal."""
    if value.dtype == tf.string:
        texts = repr(np.asarray(value.numpy(), object).tolist())
        return hashlib.sha256(texts.encode()).hexdigest()[:16]
    # Not tobytes(), which would copy the value.
    flat = value.numpy().ravel().view(np.uint8)
    return hashlib.sha256(flat.data).hexdigest()[:16]


def _listed(variables: Sequence[str]) -> str:
    """List the first few variables; missing ones are named "none"."""
    return listed([*dict.fromkeys(variables)], _SHOWN_VARIABLES)


def broadcast(
    transport: Transport,
    variables: Sequence[Variable],
    root: int = 0,
    given: Callable[[int], tf.Tensor] | None = None,
) -> None:
    """Give all ranks one rank's values of variables, few at a time.

    Args:
        transport: connects the ranks.
        variables: N variables of Keras or TensorFlow; unless values are given,
            the root has the whole of each.
        root: the rank whose values they get.
        given: on the root, returns the value of a variable, by its number;
            None: the variable has it.
    """
    variables = [*map(native, variables)]
    known = [i for i, v in enumerate(variables) if v.dtype != tf.string]
    specs = [tf.TensorSpec(variables[i].shape, tf.int8) for i in known]
    for group in messages.group_by_bytes(specs, _SENT_ENTRIES):
        indices = [known[k] for k in group]
        own = [variables[i] for i in indices]
        if transport.rank != root:
            # A variable in shards has no whole value here.
            values = [
                tf.zeros(v.shape, v.dtype)
                if isinstance(v, ShardedVariable)
                else v.read_value()
                for v in own
            ]
        elif given is None:
            values = [variable.read_value() for variable in own]
        else:
            values = [tf.cast(given(i), variables[i].dtype) for i in indices]
        values = transport.broadcast(values, next_key("broadcast"), root)
        if transport.rank == root and given is None:
            continue
        for variable, value in zip(own, values, strict=True):
            if isinstance(variable, ShardedVariable):
                variable.divide(value)
            else:
                variable.assign(value)
