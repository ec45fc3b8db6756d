"""Replacing functions of TensorFlow for the length of a block."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

Names: TypeAlias = Iterable[tuple[Any, str]]


@contextlib.contextmanager
def replaced(names: Names, ours: Callable[..., Any]) -> Iterator[None]:
    """Replace functions inside a block.

    Args:
        names: the owner (a module or a class) and the name of each function.
        ours: called with the name, the original and the call's arguments.
    """
    undo = []
    try:
        for owner, name in names:
            original = getattr(owner, name)
            undo.append((owner, name, original))
            setattr(owner, name, _replacement(name, original, ours))
        yield
    finally:
        for owner, name, original in undo:
            setattr(owner, name, original)


def _replacement(
    name: str, original: Callable[..., Any], ours: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return ours(name, original, *args, **kwargs)

    return replacement
