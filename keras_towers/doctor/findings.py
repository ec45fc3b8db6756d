"""The findings of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    # Something optional that is missing.
    NOTE = "note"
    # May not work; the advice says what to do.
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        group: the table it belongs to.
        name: what was checked.
        value: what was found, as text.
        state: its severity.
        advice: what to do, if anything.
    """

    group: str
    name: str
    value: str
    state: Status = Status.OK
    advice: str = ""
