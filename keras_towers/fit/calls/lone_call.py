"""Calls of Keras's methods that only some ranks make, in their callbacks.

All ranks have the same weights, so what evaluates or predicts needs no other
rank. But for weights in shards over the ranks: these ranks then hold the whole
of them while the call runs. ``SyncedCallbacks`` finds out which ranks make a
call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from keras_towers.fit.calls import model_building
from keras_towers.fit.calls.tower_call import TowerCall, tower_function
from keras_towers.fit.components import KerasCall, TowerFunction
from keras_towers.fit.weights import model_state as state_lib
from keras_towers.fit.weights.adoption import Adoption
from keras_towers.fit.weights.joint_access import holding_weights


class LoneCall(TowerCall):
    """A call that runs on the towers of this rank, without any exchange."""

    is_alone = True

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.places = self.places.alone()
        # What its own callbacks do, they do alone, too.
        self.meet = lambda what, call: False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Install this call, with functions that exchange nothing."""
        model, is_test = self.model, "predict" not in self.kind
        name = "test_function" if is_test else "predict_function"
        # The functions of all ranks hold them: if Keras drops one, when the
        # model is compiled for instance, both are made again.
        joint = tower_function(model, name, self.config, self.settings)
        setattr(model, name, joint.alone)
        try:
            with holding_weights(model), super().installed():
                yield
        finally:
            alone = getattr(model, name)
            if isinstance(alone, TowerFunction):
                joint.alone = alone
                setattr(model, name, joint)


def why_not_alone(
    call: KerasCall, outer: keras.Model, adoption: Adoption
) -> str:
    """Return why ranks cannot make a call alone; empty if they can.

    Args:
        call: the call, in a callback.
        outer: the model that the callback belongs to.
        adoption: the models of the strategy.
    """
    kind, model = call.kind, call.model
    if call.trains:
        return (
            f"{kind} needs all ranks. Call it on every rank, or after this "
            "call has ended; evaluate and predict may be called on some ranks"
        )
    if adoption.are_apart(outer):
        return (
            "with sync_every, ranks have the same weights only at the end of "
            f"an epoch. Call {kind} there, or on every rank"
        )
    # Otherwise only these ranks would have the variables.
    is_shared = any(part is model for part in state_lib.models_in(outer))
    if is_shared and model_building.needs_build(model, kind):
        return (
            f"model {model.name!r} is not built for {kind} yet. Call {kind} on "
            "every rank first"
        )
    return ""
