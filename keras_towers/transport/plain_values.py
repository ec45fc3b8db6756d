"""Encodes Python values as text that ranks gather, with only data in it.

Messages of other processes are decoded with this: unlike a pickle, they cannot
run code in the process that reads them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Plain

FIRST_WORDS: int = 127
"""How many words of its value each rank sends at once."""


def encode(value: object) -> bytes:
    """Encode a value as text.

    Args:
        value: None, a truth value, number, string, bytes or NumPy array; or a
            tuple, list, set or dictionary of these. A named tuple is sent as
            a tuple.
    """
    return json.dumps(_plain(value)).encode()


def decode(data: bytes) -> Any:
    """Decode the text that ``encode`` returned."""
    try:
        return _read(json.loads(data))
    except (LookupError, TypeError) as error:
        raise ValueError(f"not a value of `encode`: {data[:80]!r}") from error


def _plain(value: Any) -> object:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_plain(item) for item in value]
    kind = tuple if isinstance(value, tuple) else type(value)
    if kind in (tuple, set, frozenset):
        return {kind.__name__: [_plain(item) for item in value]}
    if type(value) is dict:
        return {"dict": [[_plain(k), _plain(v)] for k, v in value.items()]}
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if (
        isinstance(value, (np.ndarray, np.generic))
        and not value.dtype.hasobject
    ):
        if not value.dtype.isnative:
            value = value.astype(value.dtype.newbyteorder("="))
        content = base64.b64encode(np.ascontiguousarray(value).tobytes())
        # The name, because NumPy has no code for bfloat16.
        name = value.dtype.str if value.dtype.kind in "US" else value.dtype.name
        return {"array": [name, list(value.shape), content.decode()]}
    raise TowerError(
        f"a value of type {type(value).__name__} cannot be sent to other "
        "ranks: send numbers, strings, bytes, arrays, or tuples, lists, sets "
        "and dictionaries of them."
    )


def _read(value: object) -> Any:
    if isinstance(value, list):
        return [_read(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_read(content))
    if kind == "dict":
        return {_read(k): _read(v) for k, v in content}
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "array":
        name, shape, text = content
        flat = np.frombuffer(base64.b64decode(text), _dtype(name))
        # Turn an array without dimensions into a scalar.
        return flat.reshape(shape).copy()[()]
    raise KeyError(kind)


_SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset}


def _dtype(name: str) -> np.dtype:
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(tf.as_dtype(name).as_numpy_dtype)


def gather(
    all_gather: Callable[..., tf.Tensor], size: int, value: Plain
) -> list[Plain]:
    """Gather values from all ranks on all ranks, in rank order; eager only.

    Short values need one exchange.

    Args:
        all_gather: that of a ``Transport``.
        size: the number of ranks.
        value: that of this rank.
    """
    data = encode(value)
    # Sent as 32-bit integers, which every transport supports.
    padded = data + b" " * (-len(data) % 4)
    words = np.frombuffer(padded, np.int32)
    first = np.zeros(1 + FIRST_WORDS, np.int32)
    first[0] = len(words)
    first[1 : 1 + len(words)] = words[:FIRST_WORDS]
    counts = [len(first)] * size
    firsts = all_gather(tf.constant(first), "kt.values.first", counts).numpy()
    lengths, firsts = np.split(firsts.reshape(size, -1), [1], 1)
    rest = np.zeros(0, np.int32)
    if lengths.max() > FIRST_WORDS:
        rest = all_gather(tf.constant(words[FIRST_WORDS:]), "kt.values").numpy()
    values, start = [], 0
    for length, known in zip(lengths[:, 0].tolist(), firsts, strict=True):
        end = start + max(length - FIRST_WORDS, 0)
        whole = np.concatenate([known[:length], rest[start:end]])
        values.append(decode(whole.tobytes()))
        start = end
    return values
