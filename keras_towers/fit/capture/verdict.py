"""Verdicts on a step by its analysis: told once, before the step runs."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras

from keras_towers import settings
from keras_towers._strategy import Strategy
from keras_towers.errors import TowerError
from keras_towers.fit import told
from keras_towers.fit.capture import capture
from keras_towers.fit.contract import TowerConfig
from keras_towers.splitting import SUM, Analysis, Difference
from keras_towers.splitting.lines import line_of
from keras_towers.splitting.values import Kind

if TYPE_CHECKING:
    from keras_towers.fit.capture.rehearsal import Found

PROVEN = "proven to be that of one device"
NOT_PROVEN = "not proven to be that of one device"
_DIFFERS = "differs from that of one device"
_OF_SUMS = ("not their mean", "such as a sum and a mean")

_COMPARE = (
    "keras_towers.verify(model, x, y) compares a few steps with those of one "
    'device; on_difference="ignore" does without this message.'
)


@dataclasses.dataclass(frozen=True)
class Reason:
    """A reason why a step differs from one device, or may."""

    # The predicate of a sentence about the step.
    message: str
    remedy: str
    # Empty for an effect, and where the step is not analysed.
    differences: tuple[Difference, ...] = ()
    # Whether nobody knows that the step differs.
    is_open: bool = False
    # The difference in a rehearsal, as a sentence and a space.
    seen: str = ""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The judgement of a step in a few words, with its reasons."""

    text: str
    reasons: tuple[Reason, ...]


_OVERFLOW = Reason(
    "may differ: whether gradients overflow in float16, so that the step is "
    "skipped, depends on how the batch is split.",
    'The policy "mixed_bfloat16" needs no LossScaleOptimizer, which skips it.',
    is_open=True,
)
_verdicts: weakref.WeakKeyDictionary[Strategy, dict[str, str]] = (
    weakref.WeakKeyDictionary()
)
_heard: list[list[Reason]] | None = None


def verdicts_of(strategy: Strategy) -> dict[str, str]:
    """Return the texts of a strategy's verdicts, by the names of steps."""
    return _verdicts.setdefault(strategy, {})


@contextlib.contextmanager
def heard() -> Iterator[list[list[Reason]]]:
    """Collect the reasons of steps in a block, which then are not told."""
    global _heard
    before, _heard = _heard, []
    try:
        # A list for each traced step, empty if the step is proven.
        yield _heard
    finally:
        _heard = before


def heard_by_another() -> bool:
    """Whether a block collects reasons, which are not told then."""
    return _heard is not None


def of(
    config: TowerConfig,
    analysis: Analysis,
    may_overflow: bool = False,
    exchanges: int = 0,
    losses: Sequence[Any] = (),
) -> Verdict:
    """Say where a step differs from that of one device, or may."""
    differences = analysis.causes or analysis.differences
    known = [d for d in differences if not d.is_open]
    found = [
        _with_line(difference, analysis, losses)
        for difference in known or differences
    ]
    text = PROVEN
    # ``exact=True`` gives so many operations values of the global batch.
    if exchanges:
        text += f", with values of all towers for {exchanges} operations"
    if known:
        text = _DIFFERS
    elif found or analysis.effects or may_overflow:
        text = NOT_PROVEN
    reasons = [_of_differences(same, config) for same in _by_cause(found)]
    reasons += [
        Reason(
            f"has an effect: {effect.text}{_at(effect.operation)}, not once "
            "for the batch.",
            "Where it has to happen once, do it outside of the step, such as "
            "in a callback.",
        )
        for effect in analysis.effects
    ]
    if may_overflow:
        reasons.append(_OVERFLOW)
    return Verdict(text, tuple(reasons))


def of_nothing(why: str) -> Verdict:
    """Return the verdict on a step that cannot be analysed."""
    # Such as "asks which tower it runs on".
    message = f"may differ: it {why}, so that it cannot be analysed."
    reason = Reason(message, _COMPARE, is_open=True)
    return Verdict(NOT_PROVEN, (reason,))


def of_another_trace(text: str, operation: Any) -> Verdict:
    """Say that a tower does not run the trace that was analysed.

    Args:
        text: what its trace has: "has another constant on tower 1".
        operation: the operation that is another.
    """
    remedy = (
        "Each tower traces it by itself: what Python draws or counts in it is "
        "another on each. Draw with keras.random, or have the data bring it."
    )
    reason = Reason(f"differs: it {text}{_at(operation)}.", remedy)
    return Verdict(_DIFFERS, (reason,))


def rehearsed(found: Found, verdict: Verdict, config: TowerConfig) -> Verdict:
    """Say what a rehearsal has shown of a step that was not proven."""
    if found.size or found.failure:
        reasons = [
            _of_differences(reason.differences, config, found)
            if reason.differences
            else reason
            for reason in verdict.reasons
        ]
        text = _DIFFERS if found.size else verdict.text
        return Verdict(text, tuple(reasons))
    left = tuple(r for r in verdict.reasons if not r.differences)
    text = f"rehearsed, and on {found.examples} examples that of one device"
    return Verdict(f"{text} ({NOT_PROVEN})", left)


def tell(
    config: TowerConfig, model: keras.Model, kind: str, verdict: Verdict
) -> None:
    """Warn, or raise TowerError, where a step differs from one device."""
    step = f"the {kind} step of {model.name!r}"
    verdicts_of(config.strategy)[step] = verdict.text
    reasons = verdict.reasons
    if _heard is not None:
        _heard.append(list(reasons))
        return
    if config.on_difference == "ignore" or config.batches == "each":
        return
    messages = {
        reason: f"{config.name}: {step} {reason.message} {reason.seen}"
        f"{reason.remedy}"
        for reason in reasons
    }
    if messages and config.on_difference == "error":
        raise TowerError("\n".join(messages.values()))
    for reason, message in messages.items():
        # Others have rehearsed it on other examples.
        speaks = config.peers.rank == 0 or reason.seen
        if speaks and told.is_news((step, reason.message, reason.remedy)):
            told.logger.warning("%s", message)


def _of_differences(
    same: Sequence[Difference],
    config: TowerConfig,
    found: Found | None = None,
) -> Reason:
    """Give the reason of differences, or of possible ones if not rehearsed."""
    is_open = same[0].is_open and not (found and found.size)
    does, what = _cause(same[0]), _what(same)
    message = f"differs: it {does}, so that {what} differ from one device's."
    if is_open:
        message = (
            f"may differ: it {does}, so that {what} may differ from one "
            "device's."
        )
    seen = ""
    if found is not None:
        what = f"the difference was up to {found.size:.2g} times the value"
        if found.failure:
            what = f"a part of them failed alone ({found.failure})"
        seen = f"In a rehearsal on {found.examples} examples {what}. "
    remedy = _COMPARE if is_open else _remedy(same, config)
    return Reason(message, remedy, tuple(same), is_open, seen)


def _with_line(
    difference: Difference, analysis: Analysis, losses: Sequence[Any]
) -> Difference:
    """Return a difference at a line of the user's, if a sum is behind it."""
    operation = difference.operation
    has_line = line_of(operation, capture.__file__) is not None
    # Other differences are none of the sums that a step may have as well.
    if has_line or not any(text in difference.text for text in _OF_SUMS):
        return difference
    for tensor in (*operation.inputs, *losses):
        source = _sum_behind(tensor, analysis)
        if source and line_of(source, capture.__file__) is not None:
            return dataclasses.replace(difference, operation=source)
    return difference


def _sum_behind(tensor: Any, analysis: Analysis) -> Any:
    """Return the operation that first sums examples up, if it is such a sum."""
    operation = None
    following = [tensor]
    while following:
        sums = [
            given
            for given in following
            if (value := analysis.values.get(given.name)) is not None
            and value.kind is Kind.SUM
            and value.degree == SUM
        ]
        if not sums:
            break
        operation = sums[0].op
        following = list(operation.inputs)
    return operation


def _by_cause(differences: Sequence[Difference]) -> list[list[Difference]]:
    """Group what differs for one reason."""
    groups: dict[tuple[str, str | None], list[Difference]] = {}
    for difference in differences:
        line = line_of(difference.operation, capture.__file__)
        groups.setdefault((difference.text, line), []).append(difference)
    return list(groups.values())


def _cause(difference: Difference) -> str:
    text = difference.text
    if text.startswith(("is ", "has ", "scales ")):
        # The result itself, however it is computed.
        text = f"hands on what {text}"
    return f"{text}{_at(difference.operation)}"


def _at(operation: object) -> str:
    line = line_of(operation, capture.__file__)
    if line is not None:
        return f" ({line})"
    given = getattr(operation, "type", "Placeholder") == "Placeholder"
    name = "" if given else getattr(operation, "name", "")
    return f" (in {name.rpartition('/')[0] or name})" if name else ""


def _what(differences: Sequence[Difference]) -> str:
    """Name what differs: "the gradients of 'a' and 3 more, and the loss"."""
    parts = []
    called = {
        "gradient": "the gradients of ",
        "log": "the logs ",
        "metric": "the metrics ",
        "state": "the state ",
        "output": "the outputs ",
    }
    for what, article in called.items():
        names = [n for d in differences if d.what == what for n in d.names]
        if names:
            more = f" and {len(names) - 2} more" if len(names) > 3 else ""
            shown = names[:2] if more else names
            parts.append(article + ", ".join(map(repr, shown)) + more)
    return " and ".join(parts)


def _remedy(differences: Sequence[Difference], config: TowerConfig) -> str:
    if {d.what for d in differences} <= {"log"}:
        return (
            "Report the result of a keras.metrics metric instead, or use "
            "keras_towers.gather."
        )
    if {d.what for d in differences} <= {"metric"}:
        return (
            "Its update_state is given the rows of the global batch if it is "
            "called with a row for each example, of a known size of up to "
            f"{settings.METRIC_BYTES // 1024} KiB in all "
            "(keras_towers.settings.METRIC_BYTES)."
        )
    if any("not their mean" in d.text for d in differences):
        return (
            "average=False adds the towers' gradients up, for a loss that is a "
            "sum."
        )
    gather = "keras_towers.gather(x) gives every tower the rows of all towers"
    if config.exact:
        return f"{gather}."
    return f"{gather}; exact=True computes Keras's own losses and layers so."
