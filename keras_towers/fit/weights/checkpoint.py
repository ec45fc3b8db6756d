"""Variables in a TensorFlow checkpoint: each rank writes its own parts.

A part says where in the whole variable it lies. Ranks write their parts into
files of their own, which one rank joins. A reader takes any other parts, or
whole variables: rows that two ranks have written may be read by three, or by
one device.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_towers.fit.weights import model_state
from keras_towers.fit.weights.copies import parts_of
from keras_towers.fit.weights.shards import (
    ShardedVariable,
    VariablePart,
    current_value,
    spans_ranks,
)
from keras_towers.foundation import compat
from keras_towers.jobs.rendezvous import rank_checks

WHOLE: str = ""
"""Where a part lies that is the whole."""


_WEIGHTS = "weights"


class Part(NamedTuple):
    """A part of a tensor in a checkpoint.

    Attributes:
        name: that of the tensor.
        where: where it lies in the whole, as TensorFlow writes it: the shape,
            and for each axis the first index and the length.
        read: returns its value, on the host.
    """

    name: str
    where: str
    read: Callable[[], Any]


def named_variables(model: keras.Model) -> dict[str, keras.Variable]:
    """Return a model's variables except metrics, by their names in files.

    A name has the place in the model's own order, since paths are not unique,
    and the path: ``weights/003/dense/kernel``. It is the same on all ranks.
    """
    state = model_state.collect(model)
    kinds: Mapping[str, Sequence[keras.Variable]] = {
        "seeds": state.seeds,
        _WEIGHTS: state.weights,
        "optimizer": state.optimizer_variables,
    }
    return {
        f"{kind}/{n:03d}/{rank_checks.without_numbers(v.path)}": v
        for kind, variables in kinds.items()
        for n, v in enumerate(variables)
    }


def is_weight(name: str) -> bool:
    """Whether a name in a file is that of a weight of the model."""
    return name.startswith(f"{_WEIGHTS}/")


def parts_here(name: str, variable: keras.Variable, rank: int) -> list[Part]:
    """Return the parts of a variable that a rank writes.

    Rank 0 alone writes a variable that all ranks have.
    """
    value = current_value(variable)
    if rank > 0 and not spans_ranks(value):
        return []
    return [
        Part(name, _where(value, part), part.copies[0].read_value)
        for part in parts_of(value)
    ]


def read_now(parts: Sequence[Part]) -> list[Part]:
    """Return parts with their current values, on the host.

    A value on the host is copied only when a step writes the variable.
    """
    read = []
    for part in parts:
        with tf.device(compat.HOST):
            value = tf.identity(part.read())
        read.append(part._replace(read=functools.partial(tf.identity, value)))
    return read


def write(prefix: str, parts: Sequence[Part]) -> None:
    """Write parts into files of a prefix."""
    with tf.device(compat.HOST):
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=[part.name for part in parts],
            shape_and_slices=[part.where for part in parts],
            tensors=[part.read() for part in parts],
        )


def merge(prefixes: Sequence[str], into: str) -> None:
    """Join the files of several ranks into one checkpoint; they are moved."""
    with tf.device(compat.HOST):
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=prefixes,
            destination_prefix=into,
            delete_old_dirs=False,
        )


def read(prefix: str, name: str, dtype: Any, where: str = WHOLE) -> tf.Tensor:
    """Read a tensor, or a part of it."""
    with tf.device(compat.HOST):
        (value,) = tf.raw_ops.RestoreV2(
            prefix=prefix,
            tensor_names=[name],
            shape_and_slices=[where],
            dtypes=[tf.as_dtype(dtype)],
        )
    return value


def read_into(prefix: str, name: str, variable: keras.Variable) -> None:
    """Read this rank's parts of a variable."""
    value = current_value(variable)
    for part in parts_of(value):
        part.assign(read(prefix, name, value.dtype, _where(value, part)))


def _where(value: Any, part: VariablePart) -> str:
    if not isinstance(value, ShardedVariable):
        return WHOLE
    pairs = zip(part.begin, part.size, strict=True)
    slices = itertools.starmap("{},{}".format, pairs)
    return f"{' '.join(map(str, value.shape))} {':'.join(slices)}"
