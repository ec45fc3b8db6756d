"""Calls of Keras's methods that a rank makes alone, within a call of all ranks.

If all ranks have the same weights, a rank can evaluate or predict by itself. If
weights are in shards over the ranks, these ranks hold the whole weights while
the call runs. In callbacks, and in code of data that runs in the same thread,
``SyncedCallbacks`` finds out which ranks make a call: if all do, they make it
together. Where ranks cannot meet, as in a thread that reads data, each makes it
alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from keras_towers.fit.calls import model_building
from keras_towers.fit.calls.meeting import NoMeeting
from keras_towers.fit.calls.tower_call import TowerCall
from keras_towers.fit.components import KerasCall, TowerFunction
from keras_towers.fit.data import model_use
from keras_towers.fit.step.running.adaptive_function import tower_function
from keras_towers.fit.weights import model_state as state_lib
from keras_towers.fit.weights.adoption import Adoption
from keras_towers.fit.weights.joint_access import holding_weights
from keras_towers.fit.weights.shards import spans_ranks
from keras_towers.foundation import compat


class LoneCall(TowerCall):
    """A call that runs on the towers of this rank, without any exchange."""

    is_alone = True

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.places = self.places.alone()
        # The callbacks of the call act alone, too.
        self.meeting = NoMeeting(self.config.transport)

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


def refuse_in_thread(call: KerasCall, outer: TowerCall) -> None:
    """Refuse a call in another thread that a rank cannot make by itself.

    Args:
        call: the call.
        outer: the call of all ranks, which runs meanwhile.
    """
    why = why_not_alone(call, outer.model, outer.adoption)
    weights = state_lib.collect(call.model).weights
    if not why and any(map(spans_ranks, weights)):
        why = (
            "each rank has a part of its weights. Call it in a callback, or in "
            "on_epoch_end of a PyDataset, where ranks meet"
        )
    advice = outer.why_not_use(call.model) if model_use.reads_data() else ""
    if not why and advice:
        why = (
            "the data are read ahead, so ranks would get different batches. "
            f"{advice}, or call it in a callback"
        )
    if why:
        raise outer.refuse(
            f"{call.kind} of model {call.model.name!r} is called in a thread "
            f"of its own, as data are read in, while {outer.kind} runs on all "
            f"ranks, but {why}."
        )


def why_not_alone(
    call: KerasCall, outer: keras.Model, adoption: Adoption
) -> str:
    """Return why a rank cannot make a call by itself; empty if it can.

    Args:
        call: the call.
        outer: the model of the call around it.
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
    variables = state_lib.collect(model).everything()
    if any(isinstance(v._value, compat.SyncOnReadVariable) for v in variables):
        return (
            f"all ranks have yet to place model {model.name!r}. Call {kind} on "
            "every rank first"
        )
    return ""
