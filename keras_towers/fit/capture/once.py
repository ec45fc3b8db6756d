"""What a step does besides computing, once for all towers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers._strategy import Strategy
from keras_towers.fit.capture import checks
from keras_towers.fit.context.tower import Run
from keras_towers.splitting import Effect

# What they do is seen outside of the processes, of which one does it.
_SEEN_OUTSIDE = frozenset(("PrintV2",))


def can_happen_once(effect: Effect) -> bool:
    """Whether what a step does can be done once for all towers."""
    _, written = compat.resources_of(effect.at)
    return effect.is_alike and not any(map(checks.is_variable, written))


def is_seen_outside(effects: Sequence[Effect]) -> bool:
    """Whether one rank is to do it, and not each for its own sake."""
    shown = {effect.operation.type for effect in effects} <= _SEEN_OUTSIDE
    return shown and not effects[0].at.outputs


@dataclasses.dataclass(eq=False)
class _Tensors:
    """What one tower gives or gets."""

    tensors: Sequence[Any]


def called(function: Any) -> Run:
    """Return what calls a function for all towers, with tensors of tower 0.

    Args:
        function: the function, or None: nothing happens.
    """

    def merge(strategy: Strategy, every: Any) -> Any:
        devices = strategy.extended.worker_devices
        given, *_ = strategy.experimental_local_results(every)
        results: Sequence[Any] = ()
        if function is not None:
            with tf.device(devices[0]):
                results = function(given.tensors)
        return compat.PerReplica([_Tensors(results) for _ in devices])

    def run(given: list[tf.Tensor]) -> list[Any]:
        context: Any = tf.distribute.get_replica_context()
        mine = context.merge_call(merge, args=(_Tensors(given),))
        return list(mine.tensors)

    return run
