"""Cases: an operation, and what its inputs are."""

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
    """An operation, and what its inputs are.

    Attributes:
        name: the type of the operation, and what tells its cases apart.
        function: does it.
        args: its inputs.
        broadcast: whether other axes are drawn for each layout: any that are
            broadcast to each other.
    """

    name: str
    function: Callable[..., Any]
    args: Sequence[Arg]
    broadcast: bool = False

    def __str__(self):
        return self.name


def cases(args, of, given=None, low=None, high=None, **options):
    """Return cases that differ in their operations only.

    Args:
        args: the axes of each argument, or a dash for a single number, with
            what its entries are: ``ab, -, a:whole``.
        of: types of operations; or what does them by the names of the cases: a
            function, or what ``raw`` takes.
        given: what ``raw`` takes of all of them.
        low: the least entry of numbers.
        high: the largest.
        **options: other attributes of the cases.
    """
    if isinstance(of, str):
        of = dict.fromkeys(of.split(), given or {})
    args = [_argument(arg.strip(), low, high) for arg in args.split(",")]
    found = []
    for name, function in of.items():
        if not callable(function):
            function = raw(name.partition("-")[0], **function)
        found.append(Case(name, function, args, **options))
    return found


def broadcast(count, generator):
    """Draw the axes of arguments that are broadcast to each other."""
    rank = int(generator.integers(5))
    whole = "abcd"[:rank]
    found = []
    for _ in range(count):
        own = whole[int(generator.integers(rank + 1)) if rank else 0 :]
        own = whole if generator.random() < 0.6 else own
        wide = ("1" if generator.random() < 0.15 else axis for axis in own)
        found.append("".join(wide))
    return found


def _argument(described, low, high):
    axes, _, entries = described.partition(":")
    ends = {"low": low, "high": high}
    ends = {key: end for key, end in ends.items() if end is not None}
    return Arg(axes.strip("-"), **{**_ENTRIES[entries], **ends})


def raw(name, **given):
    """Return an operation as a function of its inputs.

    Args:
        name: its type.
        **given: attributes, and inputs that are not arguments of the function,
            or functions of its arguments that return them.
    """
    operation = getattr(tf.raw_ops, name)
    parameters = inspect.signature(operation).parameters.values()
    left = [p.name for p in parameters if p.default is p.empty]
    taken = [key for key in left if key not in given]

    def apply(*values):
        own = {k: v(*values) if callable(v) else v for k, v in given.items()}
        # Other arguments are there for their sizes.
        return operation(**own, **dict(zip(taken, values, strict=False)))

    return apply


def gradient(function):
    """Return the gradient of a function, given that of its result."""
    return lambda x, dy: tf.gradients(function(x), [x], [dy])


def size(x, axis=0):
    """Return the size of an axis, when the step runs."""
    return tf.shape(x)[axis]
