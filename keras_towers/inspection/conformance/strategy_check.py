"""Checks that a strategy trains as one device does, case by case."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from keras_towers.foundation.errors import TowerError, did_you_mean
from keras_towers.foundation.tf_strategy import Strategy
from keras_towers.inspection.conformance.cases import CASES, Case
from keras_towers.inspection.conformance.outcomes import (
    Outcome,
    assert_same,
    use_model,
)
from keras_towers.jobs.rendezvous.rank_checks import gather
from keras_towers.strategies.base import BaseStrategy


def check_strategy(
    make_strategy: Callable[[], Strategy],
    cases: Iterable[str] = tuple(CASES),
    *,
    tolerance: float | None = None,
) -> None:
    """Check that a strategy of your own trains as one device does.

    Each case trains a small model on one device and on a new strategy: uneven
    batches, sample weights, accumulation, embeddings, several losses, loops of
    its own, ... Weights, the optimizer's variables, metrics, ``History`` and
    seeds must be the same. Towers and ranks must have equal weights, to the
    last bit. After the block, the model must be an ordinary one, with its own
    variables.

    In a job of several processes, all of them must call this.

    Args:
        make_strategy: makes the strategy, such as its class.
        cases: names in ``keras_towers.extending.CASES``.
        tolerance: the largest difference allowed, absolute and relative; None:
            rounding. A strategy that compresses gradients needs more.

    Raises:
        AssertionError: training differs from one device. The error names the
            case, and the variable or the metric.
        TowerError: ``make_strategy`` makes no strategy, or there is no such
            case. Errors of ``fit`` are not caught.

    Example:
        >>> from keras_towers.extending import check_strategy
        >>> check_strategy(lambda: MyStrategy(towers=2), ["uneven", "gan"])
    """
    for name in cases:
        if name not in CASES:
            raise TowerError(
                f"there is no case {name!r}{did_you_mean(name, CASES)}. The "
                f"cases are {', '.join(CASES)}."
            )
        strategy = make_strategy() if callable(make_strategy) else None
        if not isinstance(strategy, BaseStrategy):
            given = make_strategy if strategy is None else strategy
            raise TowerError(
                f"check_strategy got {given!r}: give a function that makes a "
                "strategy of keras_towers, such as lambda: MyStrategy(towers=2)"
            )
        try:
            compare(CASES[name], strategy, tolerance)
        except AssertionError as error:
            raise AssertionError(
                f"{type(strategy).__name__} differs from one device in the "
                f"case {name!r}: {error}"
            ) from None


def compare(
    case: Case,
    strategy: BaseStrategy,
    tolerance: float | None = None,
    comparable: Callable[[Outcome], Outcome] | None = None,
) -> Outcome:
    """Assert that a case on towers and ranks is the case on one device.

    All ranks have the same outcome, to the last bit; the first one compares it.

    Args:
        case: the case.
        strategy: the towers, of any number of processes.
        tolerance: the largest difference allowed; None: that of the case.
        comparable: leaves out of an outcome what may differ from one device,
            and of what the fit has returned what may differ between ranks;
            None: all is compared.

    Returns:
        the outcome on this rank.
    """
    job = strategy._config.job
    point = "compares a training with one device"
    try:
        result = use_model(case.build, case.fit, strategy)
    except BaseException:
        if job.size > 1:
            # The others would wait, or take the next value for this one's.
            gather(job, None, point)
        raise
    if comparable is not None:
        result = comparable(result)
    if job.size > 1:
        # By order: names count the models that a rank has made.
        mine = [value.tobytes().hex() for _, value in result.values]
        if comparable is None:
            mine.append(repr(result.returned))
        everyone = gather(job, mine, point)
        for rank, theirs in enumerate(everyone):
            if theirs is None:
                raise AssertionError(f"rank {rank} has failed")
            if theirs != everyone[0]:
                raise AssertionError(f"rank {rank} differs from rank 0")
    if job.rank == 0:
        wanted = on_one_device(case)
        if comparable is not None:
            wanted = comparable(wanted)
        limit = case.tolerance if tolerance is None else tolerance
        assert_same(result, wanted, limit)
    return result


@functools.cache
def on_one_device(case: Case) -> Outcome:
    """The outcome of a case on one device, run eagerly if that is the same."""
    return use_model(case.build, case.fit, eagerly=not case.in_graph)
