"""Checks that a strategy trains as one device does, case by case."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from keras_towers.conformance.cases import CASES
from keras_towers.conformance.outcomes import (
    Outcome,
    assert_same,
    use_model,
)
from keras_towers.errors import TowerError, did_you_mean
from keras_towers.rendezvous.rank_checks import Peers, gather
from keras_towers.strategies.base import BaseStrategy


def check_strategy(
    make_strategy: Callable[[], Any],
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

    In a job of several processes, all of them call this.

    Args:
        make_strategy: makes the strategy, such as its class.
        cases: names in ``keras_towers.extending.CASES``.
        tolerance: the largest difference allowed, absolute and relative; None:
            rounding. A strategy that compresses gradients needs another.

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
            found = train(name, strategy)
            limit = CASES[name].tolerance if tolerance is None else tolerance
            assert_same(found, on_one_device(name), limit)
        except AssertionError as error:
            raise AssertionError(
                f"{type(strategy).__name__} differs from one device in the "
                f"case {name!r}: {error}"
            ) from None


@functools.cache
def on_one_device(name: str) -> Outcome:
    """The outcome of a case on one device, run eagerly if that is the same."""
    case = CASES[name]
    return use_model(case.build, case.fit, eagerly=not case.in_graph)


def train(name: str, strategy: BaseStrategy) -> Outcome:
    """The outcome of a case on towers, which is the same on all ranks."""
    case = CASES[name]
    found = use_model(case.build, case.fit, strategy)
    job = strategy._config.job
    if job.size > 1:
        compare_ranks(job, name, [value.tobytes() for _, value in found.values])
    return found


def compare_ranks(job: Peers, name: str, mine: list[bytes]) -> None:
    """Check that all ranks have the same values after a case. Collective."""
    everyone = gather(job, mine, f"compares the case {name!r}")
    for rank, values in enumerate(everyone):
        if values != everyone[0]:
            raise AssertionError(f"rank {rank} differs from rank 0")
