"""The report of ``verify``: its findings, and their text."""

from __future__ import annotations

import dataclasses
import textwrap
from enum import StrEnum
from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["proven", "rehearsed", "differs"]
"""How a report judges a step: proven from its graph, compared, or different."""


class Kind(StrEnum):
    """The kind of a difference on towers, or of a failure there."""

    GRADIENT = "gradient"
    """Gradients do not add up to those of one device."""
    METRIC = "metric"
    """The state of a metric does not."""
    LOG = "log"
    """A log is neither the result of a metric nor a mean over examples."""
    STATE = "state"
    """A variable that the step writes itself is no mean over examples."""
    EFFECT = "effect"
    """Something happens once for each tower instead of once."""
    BATCH_NORM = "batch-norm"
    """BatchNormalization uses statistics of a tower's rows, by design."""
    RANDOM = "random"
    """Random draws differ from those of one device."""
    ROWS = "rows"
    """Parts of a batch have different numbers of rows."""
    STATEFUL = "stateful"
    """A recurrent layer keeps a state for each row of a batch."""
    FIXED_BATCH = "fixed-batch"
    """An input has a fixed batch size."""
    UPDATES = "updates"
    """The step updates weights a different number of times on a part."""
    FAILS = "fails"
    """The step fails on parts of a batch, or where ``fit`` traces it."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One reason why towers would differ from one device.

    Attributes:
        kind: what differs.
        name: the weight, log, variable, layer or input that differs most.
        message: what was found, with the line of code where it is known.
        remedy: what to do about it.
        difference: its size in the rehearsal, relative to the value on one
            device; None where none was seen, or nothing could be compared.
    """

    kind: Kind
    name: str
    message: str
    remedy: str
    difference: float | None = None

    def __str__(self) -> str:
        size = "" if self.difference is None else f", {self.difference:.0e}"
        lines = [f"{self.kind} ({self.name}{size})", _indented(self.message)]
        return "\n".join([*lines, _indented(self.remedy, "-> ")])


@dataclasses.dataclass(frozen=True)
class Report:
    """Whether a model's training step splits over towers.

    Attributes:
        model: the name of the model.
        towers: the number of towers that were compared with one device.
        batch_sizes: the numbers of examples of the batches that were tried.
        findings: why it does not split; empty if it does.
        unproven: why that is not proven; empty if it is.

    Example:
        >>> report = keras_towers.verify(model, x, y)
        >>> report.verdict, report.safe
        ('differs', False)
        >>> print(report)
        my_model is NOT safe to split: on 2 towers (batches of 32, 31) ...
    """

    model: str
    towers: int
    batch_sizes: tuple[int, ...]
    findings: tuple[Finding, ...] = ()
    unproven: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The outcome: "proven", "rehearsed" or "differs".

        The analysis proves that a step splits; or it does not, but the
        rehearsal found no difference; or the step differs, or fails.
        """
        if self.findings:
            return "differs"
        return "rehearsed" if self.unproven else "proven"

    @property
    def safe(self) -> bool:
        """Whether nothing was found that differs from one device."""
        return not self.findings

    @property
    def remedies(self) -> tuple[str, ...]:
        """The things to do, without repetitions."""
        return tuple(dict.fromkeys(f.remedy for f in self.findings))

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.batch_sizes))
        tried = f"on {self.towers} towers"
        if sizes:
            tried += f" (batches of {sizes})"
        if self.findings:
            count = len(self.findings)
            head = (
                f"{self.model} is NOT safe to split: {tried} its training step "
                "differs from one device, or fails, for "
                f"{count} reason{'s' * (count > 1)}:"
            )
            return "\n\n".join([head, *map(str, self.findings)])
        head = (
            f"{self.model} is safe to split: {tried} its training step gave "
            "what one device gives, and "
        )
        if not self.unproven:
            return f"{head}it is proven that it always does."
        head += "that was seen only, not proven. The step"
        return "\n".join([head, *map(_indented, self.unproven)])

    def __repr__(self) -> str:
        kinds = ", ".join(finding.kind for finding in self.findings)
        return f"<Report: {self.model}: {self.verdict}{kinds and f' {kinds}'}>"


def _indented(text: str, begin: str = "") -> str:
    return textwrap.fill(
        begin + text,
        76,
        initial_indent=" " * 4,
        subsequent_indent=" " * (4 + len(begin)),
    )
