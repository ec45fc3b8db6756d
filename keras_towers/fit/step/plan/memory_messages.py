"""What users are told of memory: how a step fits, or why it does not."""

from __future__ import annotations

from keras_towers.fit.options import StrategyOptions
from keras_towers.fit.step.plan.dry_run import Needs
from keras_towers.fit.step.plan.memory_limit import Limit
from keras_towers.fit.step.plan.plan_search import Tried
from keras_towers.foundation.byte_sizes import format_bytes
from keras_towers.foundation.settings import ENV_DEVICE_MEMORY


def how_it_fits(
    found: Tried,
    options: StrategyOptions,
    is_divided: bool,
    why: str,
    whole: int | None,
    cheaper: Tried | None,
) -> str:
    """Return how a step is made to fit into memory.

    Args:
        found: its plan.
        options: what the user has chosen.
        is_divided: whether variables were divided for it.
        why: why it would not fit otherwise.
        whole: the bytes that it needs otherwise; None: unknown.
        cheaper: the next cheaper plan, which does not fit; None: there is none.

    Returns:
        A line without a subject; empty: it is as the user says.
    """
    plan, step, how = found.plan, found.layout.scheduled.plan, []
    if is_divided:
        state = "its" if plan.shards == "weights" else "its optimizer's"
        how.append(f"has {state} variables in shards")
    if found.computes_again and options.remat is None:
        how.append(
            f"computes {step.recomputed} operations again "
            f"({step.work:.0%} of the step's work) instead of keeping "
            f"{format_bytes(step.saved)} on each device"
        )
    if plan.micro_batches > 1 and found.layout.settings.rows is not None:
        how.append(f"processes a tower's rows in {plan.micro_batches} parts")
    if not how:
        return ""
    does = " and ".join([", ".join(how[:-1]), how[-1]] if how[1:] else how)
    line = f"{does}: {why}"
    if found.is_compared:
        line += f", and it needs {format_bytes(plan.total)}"
        if whole is not None:
            line += f" instead of {format_bytes(whole)}"
        line += " on each device"
        if cheaper is not None and cheaper.plan.total != whole:
            needed = format_bytes(cheaper.plan.total)
            line += f"; a cheaper plan would need {needed}, and does not fit"
    return line


def needed(needs: Needs, limit: Limit, may_fit: bool) -> str:
    """Return what a device has, and what a model needs.

    Args:
        needs: what devices need for it.
        limit: what they have.
        may_fit: whether it may fit all the same.
    """
    weights, slots = max(
        zip(needs.weights, needs.optimizer, strict=True), key=sum
    )
    parts = [f"{format_bytes(weights)} of weights"]
    if slots:
        parts.append(f"{format_bytes(slots)} of optimizer state")
    if needs.step is not None:
        parts.append(f"{format_bytes(needs.step)} while a step runs")
    if limit.others:
        parts.append(f"{format_bytes(limit.others)} of other models")
    about = "about " if may_fit else ""
    if needs.step is None:
        about = "at least "
    total = needs.held + (needs.step or 0) + limit.others
    listed = ", ".join(parts)
    return f"{limit}, and it needs {about}{format_bytes(total)} ({listed})"


def advice(options: StrategyOptions, needs: Needs, limit: Limit) -> str:
    """Return what a step may fit with, the cheapest first.

    Args:
        options: what the user has chosen.
        needs: what devices need for it.
        limit: what they have.
    """
    names = ["weights", "updates"]
    if needs.step and needs.held <= limit.room:
        # More room beside the variables would do.
        names = ["remat", "micro_batches", *names]
    given = [(name, getattr(options, name)) for name in names]
    fixed = [
        f"{name}={value!r}"
        for name, value in given
        # 1 is equal to True.
        if not (value is True or value in (None, "auto", "sharded"))
    ]
    hints = ["more devices"]
    if fixed:
        hints.insert(0, f"leaving {' and '.join(fixed)} out")
    return (
        f"Try {', '.join(hints)} or a smaller batch; `keras-towers plan` "
        "shows what devices then need. If they have more memory, set "
        f"{ENV_DEVICE_MEMORY}; 0 skips this check."
    )
