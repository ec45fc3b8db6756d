"""Cases: an operation, and the layouts that its inputs may have."""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.splitting.values import Kind
from tests.splitting.kit import TOWERS, check, traced
from tests.splitting.layouts import Arg, broadcast, drawn

DRAWS = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation, and the layouts that its inputs may have.

    Attributes:
        type: the type of the operation.
        function: does it.
        args: its inputs.
        splits: axes along which examples have to be proven.
        refuses: axes along which they have to be refused, and words of the
            message.
        broadcast: whether other axes are drawn for each layout: any that are
            broadcast to each other.
        letters: the axes that may be that of the examples; None: any.
        note: tells cases of one type apart.
        towers: the towers' numbers of examples, several times.
        tolerance: of floating point numbers.
    """

    type: str
    function: Callable[..., Any]
    args: Sequence[Arg]
    splits: str = ""
    refuses: Mapping[str, str] = dataclasses.field(default_factory=dict)
    broadcast: bool = False
    letters: str | None = None
    note: str = ""
    towers: Sequence[Sequence[int]] = TOWERS
    tolerance: float = 3e-4

    def __str__(self) -> str:
        return f"{self.type}{self.note and '-' + self.note}"


def exercise(case: Case, draws: int = DRAWS) -> None:
    """Check what is said of a case for many layouts."""
    for axis in case.splits:
        values = _tried(case, case.args, 0, axis, plain=True)
        assert values[0].kind is not Kind.OTHER, (axis, values)
    for axis, words in case.refuses.items():
        given = drawn(case.args, np.random.default_rng(0), axis, plain=True)
        value = traced(case.function, *given).values[0]
        reason = value.reason
        assert reason is not None and words in reason.text, (axis, value)
    for seed in range(draws):
        args = case.args
        if case.broadcast:
            generator = np.random.default_rng([_number(case), seed])
            args = [
                dataclasses.replace(arg, axes=axes)
                for arg, axes in zip(
                    args, broadcast(len(args), generator), strict=True
                )
            ]
        # What TensorFlow itself refuses cannot be compared.
        with contextlib.suppress(tf.errors.InvalidArgumentError):
            _tried(case, args, seed, case.letters, plain=False)


def _has_rows(given: Sequence[Any]) -> bool:
    """Whether some shape is not known when it is traced."""
    return any(g.value.kind is Kind.ROWS for g in given)


def _number(case: Case) -> int:
    return zlib.crc32(str(case).encode())


def _tried(
    case: Case,
    args: Sequence[Arg],
    seed: int,
    letters: str | None,
    plain: bool,
) -> Any:
    generator = np.random.default_rng([_number(case), seed])
    given = drawn(args, generator, letters, plain)
    try:
        return check(
            case.function,
            *given,
            seed=seed,
            towers=case.towers,
            contains=case.type if _has_rows(given) else None,
            tolerance=case.tolerance,
        )
    except Exception as error:
        described = [(g.described, g.shape, g.dtype) for g in given]
        error.add_note(f"{case}, seed {seed}: {described}")
        raise


def raw(name: str, keys: str, **attributes: Any) -> Callable[..., Any]:
    """Return an operation as a function of its inputs."""

    def apply(*values: Any) -> Any:
        given = dict(zip(keys.split(), values, strict=True))
        return getattr(tf.raw_ops, name)(**given, **attributes)

    return apply


def floats(*axes: str, **options: Any) -> list[Arg]:
    """Return arguments with numbers, by their axes."""
    return [Arg(a, **options) for a in axes]


def ints(*axes: str, low: float = 0, high: float = 3, **options: Any) -> list:
    """Return arguments with whole numbers, by their axes."""
    return [
        Arg(a, low=low, high=high, **{"dtype": "int32", **options})
        for a in axes
    ]


def of_floats(
    kind: str,
    note: str,
    function: Callable[..., Any],
    axes: str,
    splits: str,
    **more: Any,
) -> Case:
    """Return a case of arguments with numbers, by their axes."""
    return Case(
        kind, function, floats(*axes.split()), splits, note=note, **more
    )


def size(x: Any, axis: int) -> Any:
    """Return the size of an axis, when the step runs."""
    return tf.shape(x)[axis]


def unary(name: str, low: float = -1, high: float = 1, key: str = "x") -> Case:
    """Return a case of an operation on single numbers."""
    args = floats("ab", low=low, high=high)
    return Case(name, raw(name, key), args, "ab", broadcast=True)


def binary(
    name: str, low: float = -1, high: float = 1, keys: str = "x y", **more: Any
) -> Case:
    """Return a case of an operation on two tensors, which are broadcast."""
    args = floats("ab", "ab", low=low, high=high)
    return Case(name, raw(name, keys), args, "ab", broadcast=True, **more)


_OF_NO_ZERO = "Div FloorDiv FloorMod Mod TruncateDiv TruncateMod"


def of_ints(name: str, *keys: str, low: float = 1, high: float = 9) -> Case:
    """Return a case of an operation on whole numbers."""
    args = ints(*["ab"] * len(keys), low=low, high=high)
    if name in _OF_NO_ZERO:
        args = [*args[:-1], *ints("ab", low=low, high=high, scales=False)]
    function = raw(name, " ".join(keys))
    return Case(name, function, args, "ab", broadcast=True, note="ints")
