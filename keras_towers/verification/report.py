"""What `verify` finds, and how it is told."""

from __future__ import annotations

import dataclasses
import textwrap
from enum import StrEnum


class Kind(StrEnum):
    """Why a training step does not split over towers."""

    COUPLES = "couples"
    """The loss couples the examples of a batch."""
    CHANGED_BY_HAND = "changed-by-hand"
    """Gradients are changed before the optimizer gets them."""
    SUM = "sum"
    """A loss is a sum over examples, where means are averaged."""
    MEAN = "mean"
    """A loss is a mean over examples, where sums are added (average=False)."""
    BATCH_NORM = "batch-norm"
    """BatchNormalization uses statistics of a tower's rows."""
    RANDOM = "random"
    """Random draws differ from those of one device."""
    STATE = "state"
    """A Keras variable is written from the batch, and not with a mean."""
    PLAIN_VARIABLE = "plain-variable"
    """The same of a ``tf.Variable``."""
    LOG = "log"
    """A log is neither the result of a metric nor a mean over examples."""
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
        kind: why they differ.
        name: the weight, log, variable, layer or input that differs most.
        message: what was observed, in one sentence.
        remedy: what to do about it.
        difference: its size, relative to the value on one device; None where
            nothing could be compared.
    """

    kind: Kind
    name: str
    message: str
    remedy: str
    difference: float | None = None

    def __str__(self) -> str:
        size = "" if self.difference is None else f", {self.difference:.0e}"
        lines = [f"{self.kind} ({self.name}{size})"]
        for text in (self.message, f"-> {self.remedy}"):
            lines += textwrap.wrap(
                text,
                76,
                initial_indent="    ",
                subsequent_indent="       " if text[0] == "-" else "    ",
            )
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Report:
    """Whether a model's training step splits over towers.

    Attributes:
        model: the name of the model.
        towers: the number of towers that were compared with one device.
        batches: the numbers of examples of the batches that were tried.
        findings: why it does not split; empty if it does.

    Example:
        >>> report = keras_towers.verify(model, x, y)
        >>> report.safe
        False
        >>> print(report)
        my_model is NOT safe to split: on 2 towers (32, 32, 31 examples) ...
    """

    model: str
    towers: int
    batches: tuple[int, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def safe(self) -> bool:
        """Whether towers give what one device gives."""
        return not self.findings

    @property
    def remedies(self) -> tuple[str, ...]:
        """What to do, without repetitions."""
        return tuple(dict.fromkeys(f.remedy for f in self.findings))

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.batches))
        tried = f"on {self.towers} towers"
        if sizes:
            tried += f" (batches of {sizes})"
        if self.safe:
            return (
                f"{self.model} is safe to split: {tried} its training step "
                "gave what one device gives."
            )
        count = len(self.findings)
        seen = any(f.difference is not None for f in self.findings)
        how = "differs from" if seen else "is not known to be that of"
        head = (
            f"{self.model} is NOT safe to split: {tried} its training step "
            f"{how} one device, for {count} reason{'s' * (count > 1)}:"
        )
        return "\n\n".join([head, *map(str, self.findings)])

    def __repr__(self) -> str:
        kinds = ", ".join(finding.kind for finding in self.findings)
        return f"<Report: {self.model} is {'safe' if self.safe else kinds}>"
