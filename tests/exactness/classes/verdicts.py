"""What ``fit`` finds out of each class, and whether it is right."""

from collections.abc import Callable, Mapping
from typing import Any

import keras

import keras_towers as kt
from keras_towers.fit.capture.verdict import PROVEN
from tests.exactness.classes.groups import Group, differences

EQUAL, REHEARSED = "equal", "equal, rehearsed"
TOLD, IN_VAIN = "differs, told", "equal here, told"


def verdicts(
    parts: Mapping[str, Any], make: Callable[[Any], Group], **options: Any
) -> dict[str, str]:
    """Return one of the words above for each part.

    Args:
        parts: of models.
        make: makes a group of parts.
        options: of ``TowerStrategy``.

    Raises:
        AssertionError: a part differs from one device, and nothing is told.
    """
    # Parts that train together are proven together.
    found = _verdict(parts, make, options)
    names = list(parts)
    if found == EQUAL or len(names) == 1:
        return dict.fromkeys(names, found)
    half = len(names) // 2
    both: dict[str, str] = {}
    for some in (names[:half], names[half:]):
        both |= verdicts({n: parts[n] for n in some}, make, **options)
    return both


def _verdict(
    parts: Mapping[str, Any],
    make: Callable[[Any], Group],
    options: Mapping[str, Any],
) -> str:
    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    group = make(parts)
    wanted = group.trained(eager=not group.in_graph)
    strategy = kt.TowerStrategy(2, **options)
    different = differences(group.trained(strategy), wanted)
    (said,) = (
        line.partition(": ")[2]
        for line in strategy.describe().splitlines()
        if "the training step of" in line
    )
    if said not in (PROVEN, "rehearsed"):
        return TOLD if different else IN_VAIN
    assert not different, f"{', '.join(parts)}: {different}"
    return EQUAL if said == PROVEN else REHEARSED
