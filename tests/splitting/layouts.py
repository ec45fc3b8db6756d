"""Random layouts of inputs: which of them have examples, and where."""

import dataclasses

from keras_towers.splitting.values import Kind, Rows, Value
from tests.splitting.kit import Given

SIZES = {"a": 2, "b": 3, "c": 4, "d": 2, "e": 5, "h": 8, "k": 4, "1": 1}
_PLACES = ((1, 1), (1, 1), (1, 1), (2, 1), (1, 2), (2, 3))
_DEGREES = (0, 0, 0, -1, 1, 2, None)


@dataclasses.dataclass(frozen=True)
class Arg:
    """An argument of an operation, of which layouts are drawn.

    Attributes:
        axes: a letter for each axis; the same letter has the same size.
        dtype: its dtype.
        low: the least of its entries.
        high: the largest of them.
        kinds: what it may be where it has no examples.
        scales: whether it may scale with the number of examples.
    """

    axes: str
    dtype: str = "float32"
    low: float = -1.0
    high: float = 1.0
    kinds: str = "same total"
    scales: bool = True


def drawn(args, generator, letters=None, plain=False):
    """Draw a layout.

    Args:
        args: the arguments.
        generator: draws it.
        letters: the axes that may be that of the examples.
        plain: whether it is an ordinary one: an example has one row, and
            nothing scales.
    """
    if letters is None:
        letters = "".join(sorted({a for arg in args for a in arg.axes} - {"1"}))
    choices = [*letters, *([] if plain else [""])] or [""]
    axis = str(generator.choice(choices))
    place = (1, 1) if plain else _PLACES[generator.integers(len(_PLACES))]
    degree = 0 if plain else _DEGREES[generator.integers(len(_DEGREES))]
    return [_given(arg, axis, place, degree, generator, plain) for arg in args]


def _given(arg, axis, place, degree, generator, plain):
    if not plain and generator.random() < 0.25:
        degree = _DEGREES[generator.integers(len(_DEGREES))]
    number = arg.dtype not in ("bool", "string")
    if not (arg.scales and number):
        degree = 0
    if arg.dtype.startswith(("int", "uint")) and degree == -1:
        degree = 0
    options = {"dtype": arg.dtype, "low": arg.low, "high": arg.high}
    sizes = [SIZES[letter] for letter in arg.axes]
    if axis and axis in arg.axes:
        at = arg.axes.index(axis)
        if not plain and generator.random() < 0.15:
            place = place[::-1]
        uniform = not plain and generator.random() < 0.15
        draw = object() if not plain and generator.random() < 0.15 else None
        if uniform or (draw is not None and place != (1, 1)):
            place = (1, place[0] * place[1])
        rows = Rows(at, *place, uniform, None if uniform else draw)
        if place == (1, 1):
            rows = Rows(at, uniform=uniform)
        sizes[at] = -1
        return Given(Value(Kind.ROWS, degree, rows), tuple(sizes), **options)
    kind = Kind.SAME
    if not plain and number and "total" in arg.kinds:
        kind = Kind.SUM if generator.random() < 0.3 else kind
    return Given(Value(kind, degree), tuple(sizes), **options)


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
