"""Cases of one operation each, whose inputs are described by letters.

This line makes two cases, of the operations ``MatMul`` and ``BatchMatMulV2``::

    cases_of("ab, bc:float64", "MatMul BatchMatMulV2", {"transpose_a": False})

The first input has the axes a and b, the second b and c; ``SIZES`` has the size
of each letter. ``test_rules.py`` runs each case once for each letter, along
which it divides the rows, and once with layouts without rows.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# Rows are never along an axis with a capital letter.
SIZES = {
    "C": 4,
    "D": 2,
    "a": 2,
    "b": 3,
    "c": 4,
    "d": 2,
    "e": 5,
    "h": 8,
    "k": 4,
    "1": 1,
    "3": 3,
}
_WHOLE = {"dtype": "int32", "low": 0, "high": 3}
# The entries of an argument, by the word after its axes.
_ENTRIES = {
    "": {},
    "whole": _WHOLE,
    **{
        name: {"dtype": name}
        for name in ("bool", "string", "complex64", "float64")
    },
}


@dataclasses.dataclass(frozen=True)
class Arg:
    """An argument of an operation, of which layouts are drawn.

    Attributes:
        axes: a letter for each axis; the same letter has the same size.
        dtype: its dtype.
        low: the least of its entries.
        high: the largest of them.
    """

    axes: str
    dtype: str = "float32"
    low: float = -1.0
    high: float = 1.0


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation and its inputs.

    Attributes:
        name: the type of the operation, and a note if it has several cases.
        function: runs the operation on tensors.
        args: its inputs.
        broadcast: whether the test draws other axes, which are broadcast to
            each other.
    """

    name: str
    function: Callable[..., Any]
    args: Sequence[Arg]
    broadcast: bool = False

    def __str__(self):
        return self.name


def cases_of(
    args,
    operations="",
    attributes=None,
    low=None,
    high=None,
    broadcast=False,
    **named,
):
    """Return cases that differ in their operations only.

    Args:
        args: the axes of each argument, or a dash for a single number, with the
            kind of its entries: ``ab, -, a:whole``.
        operations: types of operations, ``"Sum Mean"``.
        attributes: the attributes of all of them.
        low: the smallest entry of numbers.
        high: the largest entry.
        broadcast: as of ``Case``.
        **named: more cases by name, which begins with the type: a function, or
            attributes: ``Sum_1={"axis": 1}``.
    """
    named = dict.fromkeys(operations.split(), attributes or {}) | named
    args = [_argument(arg.strip(), low, high) for arg in args.split(",")]
    found = []
    for name, function in named.items():
        if not callable(function):
            function = raw_op(name.partition("_")[0], **function)
        found.append(Case(name, function, args, broadcast))
    return found


def draw_broadcast_axes(count, generator):
    """Draw the axes of arguments that are broadcast to each other."""
    rank = int(generator.integers(5))
    all_axes = "abcd"[:rank]
    drawn = []
    for _ in range(count):
        axes = all_axes[int(generator.integers(rank + 1)) if rank else 0 :]
        axes = all_axes if generator.random() < 0.6 else axes
        sizes = ("1" if generator.random() < 0.15 else axis for axis in axes)
        drawn.append("".join(sizes))
    return drawn


def _argument(described, low, high):
    axes, _, entries = described.partition(":")
    ends = {"low": low, "high": high}
    ends = {key: end for key, end in ends.items() if end is not None}
    return Arg(axes.strip("-"), **{**_ENTRIES[entries], **ends})


def raw_op(name, **fixed):
    """Return an operation of ``tf.raw_ops`` as a function of its inputs.

    Args:
        name: its type.
        **fixed: its attributes, and inputs that the function does not take: a
            value, or a function of the other inputs that returns it.
    """
    operation = getattr(tf.raw_ops, name)
    parameters = inspect.signature(operation).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty]
    free = [key for key in required if key not in fixed]

    def apply(*values):
        known = {k: v(*values) if callable(v) else v for k, v in fixed.items()}
        # Further values are there for their sizes only.
        return operation(**known, **dict(zip(free, values, strict=False)))

    return apply


def gradient_of(function):
    """Return the function that computes the gradient of a function.

    It takes the input, and the gradient of the result.
    """
    return lambda x, dy: tf.gradients(function(x), [x], [dy])


def axis_size(x, axis=0):
    """Return the size of an axis, when the step runs."""
    return tf.shape(x)[axis]
