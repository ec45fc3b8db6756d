"""Effects of a step that happen once for all towers."""

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
    """Whether an effect of a step can happen once for all towers."""
    _, written = compat.resources_of(effect.at)
    return effect.is_alike and not any(map(checks.is_variable, written))


def is_seen_outside(effects: Sequence[Effect]) -> bool:
    """Whether effects are seen outside, so that one rank alone has them."""
    shown = {effect.operation.type for effect in effects} <= _SEEN_OUTSIDE
    return shown and not effects[0].at.outputs


@dataclasses.dataclass(eq=False)
class _Tensors:
    """The tensors that one tower gives or gets."""

    tensors: Sequence[Any]


def called(function: Any) -> Run:
    """Make a function run once for all towers, on tower 0's tensors."""

    def merge(strategy: Strategy, every: Any) -> Any:
        devices = strategy.extended.worker_devices
        given, *_ = strategy.experimental_local_results(every)
        results: Sequence[Any] = ()
        # Without a function nothing happens.
        if function is not None:
            with tf.device(devices[0]):
                results = function(given.tensors)
        return compat.PerReplica([_Tensors(results) for _ in devices])

    def run(given: list[tf.Tensor]) -> list[Any]:
        context: Any = tf.distribute.get_replica_context()
        mine = context.merge_call(merge, args=(_Tensors(given),))
        return list(mine.tensors)

    return run
