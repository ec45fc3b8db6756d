"""Cases: an operation, and the layouts that its inputs may have."""

import contextlib
import dataclasses
import inspect
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.splitting.values import Kind
from tests.splitting.kit import TOWERS, check, traced
from tests.splitting.layouts import Arg, broadcast, drawn

_DRAWS = 3
_WHOLE = {"dtype": "int32", "low": 0, "high": 3}
# What an argument's entries are, by what stands behind its axes.
_ENTRIES = {
    "": {},
    "never scales": {"scales": False},
    "whole": _WHOLE,
    "count": {**_WHOLE, "scales": False},
    "length": {**_WHOLE, "kinds": "same"},
    "place": {**_WHOLE, "scales": False, "kinds": "same"},
    **{name: {"dtype": name} for name in ("bool", "string", "complex64")},
    "float64": {"dtype": "float64"},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation, and the layouts that its inputs may have.

    Attributes:
        name: the type of the operation, and what tells its cases apart.
        function: does it.
        args: its inputs.
        splits: axes along which examples have to be proven.
        letters: the axes that may be that of the examples; None: any.
        refuses: axes along which they have to be refused, and words of the
            message.
        broadcast: whether other axes are drawn for each layout: any that are
            broadcast to each other.
        towers: the towers' numbers of examples, several times.
    """

    name: str
    function: Callable[..., Any]
    args: Sequence[Arg]
    splits: str
    letters: str | None
    refuses: Mapping[str, str] = dataclasses.field(default_factory=dict)
    broadcast: bool = False
    towers: Sequence[Sequence[int]] = TOWERS

    @property
    def type(self):
        return self.name.partition("-")[0]

    def exercise(self):
        """Check what is said of it for many layouts."""
        for axis in self.splits:
            values = self._tried(self.args, 0, axis, plain=True)
            assert values[0].kind is not Kind.OTHER, (axis, values)
        for axis, words in self.refuses.items():
            generator = np.random.default_rng(0)
            given = drawn(self.args, generator, axis, plain=True)
            value = traced(self.function, *given).values[0]
            assert value.reason is not None, (axis, value)
            assert words in value.reason.text, (axis, value)
        for seed in range(_DRAWS):
            args = self.args
            if self.broadcast:
                every = broadcast(len(args), self._generator(seed))
                args = [
                    dataclasses.replace(arg, axes=axes)
                    for arg, axes in zip(args, every, strict=True)
                ]
            # What TensorFlow itself refuses cannot be compared.
            with contextlib.suppress(tf.errors.InvalidArgumentError):
                self._tried(args, seed, self.letters, plain=False)

    def __str__(self):
        return self.name

    def _generator(self, seed):
        number = zlib.crc32(self.name.encode())
        return np.random.default_rng([number, seed])

    def _tried(self, args, seed, letters, plain):
        given = drawn(args, self._generator(seed), letters, plain)
        # Otherwise all shapes are known when it is traced, and it may be gone.
        there = any(g.value.kind is Kind.ROWS for g in given)
        options = {"seed": seed, "towers": self.towers}
        try:
            contains = self.type if there else None
            return check(self.function, *given, contains=contains, **options)
        except Exception as error:
            described = [(g.described, g.shape, g.dtype) for g in given]
            error.add_note(f"{self.name}, seed {seed}: {described}")
            raise


def cases(layouts, of, given=None, low=None, high=None, **options):
    """Return cases that differ in their operations only.

    Args:
        layouts: the axes of each argument, or a dash for a single number, with
            what its entries are; and the axes along which examples have to be
            proven, if any: ``ab, -, a:count -> ab``. With ``only`` behind them
            they, or the axes that follow, are all that may be examples.
        of: types of operations; or what does them by the names of the cases: a
            function, or what ``raw`` takes.
        given: what ``raw`` takes of all of them.
        low: the least entry of numbers.
        high: the largest.
        **options: other attributes of the cases.
    """
    if isinstance(of, str):
        of = dict.fromkeys(of.split(), given or {})
    args, _, splits = layouts.partition("->")
    splits, only, letters = (s.strip(" -") for s in splits.partition("only"))
    args = [_argument(arg.strip(), low, high) for arg in args.split(",")]
    letters = (letters or splits) if only else None
    found = []
    for name, function in of.items():
        if not callable(function):
            function = raw(name.partition("-")[0], **function)
        found.append(Case(name, function, args, splits, letters, **options))
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
    """Return the gradient of a function, by that of its result."""
    return lambda x, dy: tf.gradients(function(x), [x], [dy])


def size(x, axis=0):
    """Return the size of an axis, when the step runs."""
    return tf.shape(x)[axis]
