"""Communication hooks."""

from collections.abc import Sequence

import tensorflow as tf

from keras_towers.extending import HookState, StatefulHook, Transport


def in_float64(
    transport: Transport, tensors: Sequence[tf.Tensor], key: str
) -> list[tf.Tensor]:
    """Sum in float64."""
    wide = [tf.cast(tensor, tf.float64) for tensor in tensors]
    sums = transport.all_reduce(wide, key)
    return [tf.cast(s, t.dtype) for s, t in zip(sums, tensors, strict=True)]


class Differences(StatefulHook):
    """Sends how gradients differ from those of the last step.

    A rank keeps what it has sent, and all keep the sum of that.
    """

    def init(self, specs: Sequence[tf.TensorSpec]) -> HookState:
        zeros = [tf.zeros(spec.shape, spec.dtype) for spec in specs]
        return HookState(own=zeros, common=zeros)

    def sum(
        self,
        transport: Transport,
        tensors: Sequence[tf.Tensor],
        state: HookState,
        key: str,
    ) -> tuple[list[tf.Tensor], HookState]:
        pairs = zip(tensors, state.own, strict=True)
        changes = transport.all_reduce([t - last for t, last in pairs], key)
        sums = [
            last + change
            for last, change in zip(state.common, changes, strict=True)
        ]
        return sums, HookState(own=list(tensors), common=sums)
