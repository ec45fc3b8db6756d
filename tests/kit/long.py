"""Cases that repeat on another device or strategy what a kept one shows."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def long_but(kept: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """Mark all cases as long but for those that `make test` is to run, too.

    Args:
        kept: whether a case is run by `make test`.
        cases: of ``pytest.mark.parametrize``.
    """
    return [
        case
        if kept(case)
        else pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=pytest.mark.long,
        )
        for case in cases
    ]
