"""Nothing differs in silence, nothing is told in vain, and lines are right."""

from typing import Any

import pytest

from tests.kit.long import some_of
from tests.splitting.hostile.known import DEFAULT, EXACT, KNOWN
from tests.splitting.hostile.table import CASES
from tests.splitting.hostile.trial import tried

# Of all that `make test-all` runs, `make test` runs so many.
DRAWN = 4


def _all() -> list[Any]:
    """Each case on two and on three towers, without and with ``exact``."""
    return [
        _tried(name, towers, mode)
        for name in CASES
        for mode in (DEFAULT, EXACT)
        for towers in (2, 3)
    ]


def _tried(name: str, towers: int, mode: str) -> Any:
    reason = KNOWN.get((name, mode))
    marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
    return pytest.param(
        name, towers, mode, id=f"{name}-{towers}-{mode}", marks=marks
    )


@pytest.mark.parametrize(
    "name, towers, mode", some_of(_all(), 4 * len(CASES) // DRAWN)
)
def test_hostile(name: str, towers: int, mode: str) -> None:
    """A training is that of one device, or its line is told."""
    outcome = tried(name, towers, exact=mode == EXACT)
    assert outcome.verdict(CASES[name], mode == EXACT) == "", outcome
