"""The constants of a traced step, in a form that ranks can compare.

Python computes them while a step is traced: a mask that a layer has drawn by
NumPy, ``random.random()`` in a ``train_step``, a learned boundary. Ranks whose
constants differ would compute parts of different steps.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from keras_towers.fit.ranks.compared_step import Constants, ConstantText
from keras_towers.fit.step.code_lines import line_of
from keras_towers.fit.step.trace import Trace
from keras_towers.fit.step.traced_operations import TracedOperations

# Machines may round differently; relative to a constant's norm.
_TOLERANCE = 1e-4
_SHOWN = 4
# Stands for the logarithm of a norm of 0.
_LOG_OF_ZERO = -100.0
# Numbers of which copies are made at a time.
_CHUNK = 2**20


def constants_of(traced: Trace, operations: TracedOperations) -> Constants:
    """Return the constants on which results or variables of a step depend.

    Args:
        traced: the step.
        operations: its operations.
    """
    digest, sums, described = 0, np.zeros(3), []
    # Sums, because the order of operations may differ between processes.
    for inside, value in _constants_in(traced):
        if value.dtype.kind == "V":
            value = value.astype("float32")  # NumPy has no bfloat16.
        if value.dtype.kind not in "biufc":
            continue
        place = operations.places[id(inside)] % 2**64
        exact = f"{value.dtype} {value.shape}".encode()
        if value.dtype.kind in "biu":
            exact += value.tobytes()
            own = np.zeros(3)
        else:
            own = _fingerprint(value)
        sums += (1 + place / 2**64) * own
        digest += zlib.crc32(place.to_bytes(8, "little") + exact)
        line = line_of(inside.op, operations.tracebacks)
        described.append(
            ConstantText(
                place,
                zlib.crc32(exact),
                _rounded(own),
                f"{_show(value)} of {line}",
                operations.first_uses.get(id(inside), 0),
            )
        )
    return Constants(digest % 2**32, _rounded(sums), described)


def _rounded(sums: np.ndarray) -> tuple[int, int, int]:
    first, second, third = np.rint(sums / _TOLERANCE).astype(int).tolist()
    return first, second, third


def _constants_in(traced: Trace) -> Iterator[tuple[tf.Tensor, np.ndarray]]:
    """Yield the constants: their tensors in the step, and values."""
    for operation in traced.needed:
        if operation.type == "Const":
            value = tf.make_ndarray(operation.get_attr("value"))
            yield operation.outputs[0], value
    # TensorFlow captures large tensors rather than make them constants.
    for inside, tensor in traced.needed_captures:
        if tensor.dtype.is_numpy_compatible and not tf.is_symbolic_tensor(
            tensor
        ):
            # A single text is of type bytes.
            yield inside, np.asarray(tensor.numpy())


def _fingerprint(value: np.ndarray) -> np.ndarray:
    """Return the logarithm of the norm of real numbers, and two projections."""
    if value.dtype.kind == "c":
        value = np.stack([np.real(value), np.imag(value)])
    flat = value.ravel()
    largest = float(np.abs(flat).max(initial=0, where=np.isfinite(flat)))
    squares, sums, infinite = 0.0, np.zeros(2), np.zeros(2)
    generator = np.random.default_rng(1)
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK].astype("float64")
        finite = np.isfinite(part)
        # The square of a large number may be infinite.
        part = np.where(finite, part, 0) / (largest or 1)
        weights = generator.uniform(-1, 1, (2, part.size))
        squares += float(part @ part)
        sums += weights @ part
        # Infinite numbers count by where they are.
        infinite += weights @ ~finite
    log_norm = _LOG_OF_ZERO
    if largest:
        log_norm = np.log(largest) + np.log(squares) / 2
    return np.array([log_norm, *(sums / (squares**0.5 or 1) + 2 * infinite)])


def _show(value: np.ndarray) -> str:
    texts = [f"{number:.6g}" for number in value.ravel()[:_SHOWN].tolist()]
    if value.size > _SHOWN:
        texts.append("...")
    if value.ndim == 0:
        return texts[0]
    # Constants with equal first values may have different norms.
    norm = np.linalg.norm(value.astype("complex128").ravel())
    return f"[{', '.join(texts)}] of shape {value.shape} and norm {norm:.6g}"
