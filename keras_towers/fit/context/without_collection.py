"""Pauses Python's garbage collector while a step is traced.

A trace makes very many objects that live as long as it does, so the collector
would search all of them again and again, and find nothing. Then they are dead,
and it searches only what is new.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from keras_towers.fit.context.patches import while_used


def without_collection() -> contextlib.AbstractContextManager[None]:
    """Pause the collector in this block, unless it is off anyway."""
    return while_used("the collector", _paused)


@contextlib.contextmanager
def _paused() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
            gc.collect(0)
