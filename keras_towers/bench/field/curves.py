"""Which rows count: those whose losses are the reference's.

After MLPerf's rule that figures of speed are compared only between trainings
that reach the same result. Here the whole beginning of the curve has to agree,
because a wrong mean over replicas shows in the second step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

# Steps whose losses are compared.
STEPS = 20
# Of two losses, relative to the reference's. Other orders of summation stay far
# below it; a mean over other examples, or another optimizer, far above.
TOLERANCE = 1e-3
# How many times that training has to change the losses, so that half of its
# effect does not pass for all of it.
_TELLING = 2


def difference(losses: Sequence[float], reference: Sequence[float]) -> str:
    """Say where two curves differ first, or nothing if they agree.

    Args:
        losses: the loss of each step, as a mean over the global batch.
        reference: the losses to agree with.

    Example:
        >>> difference([2.3, 1.0], [2.3, 2.1])
        'loss differs from step 2 on (1.000 against 2.100)'
    """
    if not reference:
        return "the reference has no losses"
    if len(losses) != len(reference):
        return f"{len(losses)} losses, against {len(reference)}"
    for step, (mine, other) in enumerate(
        zip(losses, reference, strict=True), 1
    ):
        # Infinity is no loss to agree on, and NaN agrees with nothing.
        if not (math.isfinite(other) and _close(mine, other)):
            shown = f"{mine:.3f} against {other:.3f}"
            if f"{mine:.3f}" == f"{other:.3f}":
                shown = f"{mine:.7g} against {other:.7g}"
            return f"loss differs from step {step} on ({shown})"
    return ""


def frozen(optimizer: Any) -> Any:
    """Make an optimizer leave the weights as they are."""
    optimizer.apply = lambda *args, **kwargs: None
    return optimizer


def undecided(reference: Sequence[float], frozen: Sequence[float]) -> str:
    """Say why equal curves would not show that a row trains, or nothing.

    Args:
        reference: the loss of each step.
        frozen: the same, where weights stay as they are.

    Example:
        >>> undecided([2.3, 2.2999, 2.2998], [2.3, 2.3, 2.3])
        'training changes the loss by at most 0.0087% in 3 steps, ...'
    """
    moved = max(
        (
            abs(mine - other) / abs(other) if other else math.inf
            for mine, other in zip(frozen, reference, strict=True)
            if mine != other
        ),
        default=0.0,
    )
    if not moved < _TELLING * TOLERANCE:
        return ""
    return (
        f"training changes the loss by at most {100 * moved:.2g}% in "
        f"{len(reference)} steps, which would not show a row that does not "
        "train: use a larger learning rate, which takes no longer"
    )


def _close(mine: float, other: float) -> bool:
    return abs(mine - other) <= TOLERANCE * abs(other)
