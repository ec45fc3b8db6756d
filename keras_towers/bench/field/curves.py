"""Which rows count: those whose losses are the reference's.

After MLPerf's rule that figures of speed are compared only between trainings
that reach the same result. Here the whole beginning of the curve has to agree,
because a wrong mean over replicas shows in the second step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Steps whose losses are compared.
STEPS = 20
# Of two losses, relative to the reference's. Other orders of summation stay far
# below it; a mean over other examples, or another optimizer, far above.
TOLERANCE = 1e-3


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


def _close(mine: float, other: float) -> bool:
    return abs(mine - other) <= TOLERANCE * abs(other)
