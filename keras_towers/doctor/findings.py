"""What the doctor found, one fact at a time."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a finding is to be taken."""

    OK = "ok"
    # Neither good nor bad: something optional that is not there.
    NOTE = "note"
    # May work; the advice says what to do.
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True)
class Finding:
    """One fact.

    Attributes:
        group: the table it belongs to.
        name: what was looked at.
        value: what was found, for people.
        state: how to take it.
        advice: what to do, if anything.
    """

    group: str
    name: str
    value: str
    state: Status = Status.OK
    advice: str = ""
