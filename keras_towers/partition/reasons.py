"""Why an operation is not divided, and what has to be so.

``describe()`` shows the reasons. In them, ``{}`` is the type of the operation.
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
    """This way of dividing an operation does not apply; another one may.

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
    """Return what has to be there: if it is None, there is a mistake."""
    assert there is not None
    return there
