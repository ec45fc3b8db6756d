"""The reasons why an operation is not divided.

``describe()`` shows them; ``{}`` stands for the type of the operation.
"""

from __future__ import annotations

from typing import TypeVar

FoundT = TypeVar("FoundT")

NO_RULE = "no rule for {}"
ALL_ROWS = "{} needs all rows"
NUMBERS = "{} needs numbers that are known only when the step runs"
SHAPE = "{} has a shape that is known only when the step runs"
MISTAKE = "the rule for {} has a mistake"
EXCHANGE = "{} needs an exchange inside of a function"


class NotDivided(Exception):
    """Raised if a way of dividing an operation does not apply.

    Another one may.

    Args:
        reason: what is said of the operation, if it is computed once for this.
    """

    def __init__(self, reason: str = ALL_ROWS):
        super().__init__(reason)


def require(condition: object, reason: str = ALL_ROWS) -> None:
    """Raise ``NotDivided`` for a reason unless a condition holds."""
    if not condition:
        raise NotDivided(reason)


def unless_none(found: FoundT | None, reason: str = ALL_ROWS) -> FoundT:
    """Return what was found; raise ``NotDivided`` if it is None."""
    if found is None:
        raise NotDivided(reason)
    return found


def asserted(there: FoundT | None) -> FoundT:
    """Return a value that cannot be None; None is a mistake of this package."""
    assert there is not None
    return there
