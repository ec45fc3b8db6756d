"""Telling that a worker's values are not joined with those of the others."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from keras_towers.fit import told

if TYPE_CHECKING:
    from keras_towers.fit.contract import KerasStrategy

_warned: weakref.WeakSet[KerasStrategy] = weakref.WeakSet()


def warn(strategy: KerasStrategy) -> None:
    """Warn, once, where a step joins the values of one worker's towers only.

    Args:
        strategy: the strategy whose step joins values of its towers.
    """
    config = strategy._components.config
    joined = config.peers.size == config.transport.size
    if joined or config.batches == "each" or strategy in _warned:
        return
    _warned.add(strategy)
    told.differs(
        "couples",
        "the step",
        "the step joins values of the whole batch (for a mask, for sample "
        "weights in a denominator, for synchronized BatchNormalization or by "
        f"kt.gather), but workers with {config.name} join those of their own "
        "part of it only: weights will differ a little from those of one "
        "device. "
        "HorovodStrategy and MultiWorkerTowerStrategy join all.",
    )
