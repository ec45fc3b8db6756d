"""What ``fit`` finds out of each class, and whether it is right."""

import keras_towers as kt
from keras_towers.fit.capture.verdict import PROVEN
from tests.exactness.classes.groups import compared

EQUAL, REHEARSED = "equal", "equal, rehearsed"
TOLD, IN_VAIN = "differs, told", "equal here, told"

TOGETHER = 12


def verdicts(classes, make, **options):
    """Return one of the words above for each class.

    Args:
        classes: parts of models, by the class that they try.
        make: makes a group of parts.
        options: of ``TowerStrategy``.

    Raises:
        AssertionError: a class differs from one device, and nothing is told.
    """
    names, found = list(classes), {}
    for start in range(0, len(names), TOGETHER):
        some = names[start : start + TOGETHER]
        found |= _verdicts(classes, some, make, options)
    return found


def _verdicts(classes, names, make, options):
    parts = {k: part for name in names for k, part in classes[name].items()}
    found = _verdict(parts, make, options)
    # Those that train together are proven together.
    if found == EQUAL or len(names) == 1:
        return dict.fromkeys(names, found)
    half = len(names) // 2
    return {
        **_verdicts(classes, names[:half], make, options),
        **_verdicts(classes, names[half:], make, options),
    }


def _verdict(parts, make, options):
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
