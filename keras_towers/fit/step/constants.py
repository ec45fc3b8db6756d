"""The constants of a traced step, which must be the same on all ranks.

Python computes them while a step is traced: a mask that a layer has drawn by
NumPy, ``random.random()`` in a ``train_step``, a learned boundary. Ranks whose
constants differ compute the parts of different steps.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.fit.step.step_costs import line_of
from keras_towers.partition.effects import called_graphs

# Machines may round differently; relative to a constant's norm.
_TOLERANCE = 1e-4
_SHOWN = 4


@dataclasses.dataclass(frozen=True)
class Constants:
    """The numbers among the constants of a step.

    Attributes:
        digest: of their shapes and dtypes, and of integers and truth values.
        approximate: integers that differ by at most one between ranks whose
            real numbers differ by rounding only.
        shown: describes each of them, with its line of code.
    """

    digest: int = 0
    approximate: tuple[int, int, int] = (0, 0, 0)
    shown: Sequence[str] = ()


def constants_of(graph: Any) -> Constants:
    """Return the constants of a graph, and of the functions that it calls."""
    digest, sums, shown = 0, np.zeros(3), []
    # Sums, because the order of operations may differ between processes.
    for operation in _constants_in(graph, set()):
        value = tf.make_ndarray(operation.get_attr("value"))
        if value.dtype.kind == "V":
            value = value.astype("float32")  # NumPy has no bfloat16.
        if value.dtype.kind not in "biufc":
            continue
        exact = f"{value.dtype} {value.shape}".encode()
        if value.dtype.kind in "biu":
            exact += value.tobytes()
        else:
            sums += _fingerprint(value)
        digest += zlib.crc32(exact)
        shown.append(f"{_show(value)} of {line_of(operation)}")
    first, second, third = np.rint(sums / _TOLERANCE).astype(int).tolist()
    return Constants(digest % 2**32, (first, second, third), shown)


def _constants_in(graph: Any, seen: set[int]) -> Iterator[Any]:
    seen.add(id(graph))
    for operation in graph.get_operations():
        if operation.type == "Const":
            yield operation
        for called in called_graphs(operation):
            if called is not None and id(called) not in seen:
                yield from _constants_in(called, seen)


def _fingerprint(value: np.ndarray) -> np.ndarray:
    """Return the logarithm of the norm of real numbers, and two projections."""
    if value.dtype.kind == "c":
        value = np.stack([np.real(value), np.imag(value)])
    flat = value.astype("float64").ravel()
    finite = np.isfinite(flat)
    flat = np.where(finite, flat, 0)
    # The square of a large number may be infinite.
    largest = np.abs(flat).max(initial=0)
    if largest:
        flat /= largest
    norm = np.linalg.norm(flat)
    size = np.log(largest) + np.log(norm) if largest else -100
    # Infinite numbers count by where they are.
    unit = np.where(finite, flat / (norm or 1), 2)
    weights = np.random.default_rng(1).uniform(-1, 1, (2, flat.size))
    return np.array([size, *(weights @ unit)])


def _show(value: np.ndarray) -> str:
    texts = [f"{number:.6g}" for number in value.ravel()[:_SHOWN].tolist()]
    if value.size > _SHOWN:
        texts.append("...")
    return texts[0] if value.ndim == 0 else f"[{', '.join(texts)}]"
