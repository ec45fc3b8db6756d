"""What ``fit`` finds out of each class, and whether it is right."""

from collections.abc import Callable, Mapping
from typing import Any

import keras_towers as kt
from keras_towers.fit.capture.verdict import PROVEN
from tests.exactness.classes.groups import Group, compared

EQUAL, REHEARSED = "equal", "equal, rehearsed"
TOLD, IN_VAIN = "differs, told", "equal here, told"

TOGETHER = 12

Parts = Mapping[str, Any]


def verdicts(
    classes: Mapping[str, Parts], make: Callable[[Any], Group], **options: Any
) -> dict[str, str]:
    """Return one of the words above for each class.

    Args:
        classes: parts of models, by the class that they try.
        make: makes a group of parts.
        options: of ``TowerStrategy``.

    Raises:
        AssertionError: a class differs from one device, and nothing is told.
    """
    names = list(classes)
    found: dict[str, str] = {}
    for start in range(0, len(names), TOGETHER):
        some = {n: classes[n] for n in names[start : start + TOGETHER]}
        found |= _verdicts(some, make, options)
    return found


def _verdicts(
    classes: Mapping[str, Parts],
    make: Callable[[Any], Group],
    options: Mapping[str, Any],
) -> dict[str, str]:
    parts = {n: part for some in classes.values() for n, part in some.items()}
    found = _verdict(parts, make, options)
    names = list(classes)
    # Those that train together are proven together.
    if found == EQUAL or len(names) == 1:
        return dict.fromkeys(names, found)
    half = len(names) // 2
    both: dict[str, str] = {}
    for some in (names[:half], names[half:]):
        both |= _verdicts({n: classes[n] for n in some}, make, options)
    return both


def _verdict(
    parts: Parts, make: Callable[[Any], Group], options: Mapping[str, Any]
) -> str:
    strategy = kt.TowerStrategy(2, **options)
    different, heard = compared(parts, make, strategy, eager=True)
    (said,) = (
        line.partition(": ")[2]
        for line in strategy.describe().splitlines()
        if "the training step of" in line
    )
    is_rehearsed = said.startswith("rehearsed")
    if heard or (said != PROVEN and not is_rehearsed):
        return TOLD if different else IN_VAIN
    assert not different, f"{', '.join(parts)}: {different}"
    return REHEARSED if is_rehearsed else EQUAL
