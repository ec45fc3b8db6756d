"""The step of one device that this thread traces for towers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from keras_towers import compat
from keras_towers.fit.context.blocks import Slot
from keras_towers.fit.contract import TRAINING, TakesGradients, UpdateCall


@dataclasses.dataclass(frozen=True, eq=False)
class Tracing:
    """A step that is traced as one device does it.

    Attributes:
        graph: the graph of the trace.
        kind: the method of Keras that the step belongs to.
        note_update: takes the calls of optimizers at the step's top level.
        update: the update of the strategy whose towers will divide the step.
        own_statistics: whether BatchNormalization takes the statistics of each
            tower's rows.
    """

    graph: Any
    kind: str
    note_update: Callable[[UpdateCall], None]
    update: TakesGradients
    own_statistics: bool = False

    @property
    def training(self) -> bool:
        """Whether it is a step of training."""
        return self.kind in TRAINING

    @property
    def is_at_top(self) -> bool:
        """Whether what is traced now is no part of a branch, loop or function.

        There an update is traced as any other operation is.
        """
        return compat.get_default_graph() is self.graph


_tracing: Slot[Tracing] = Slot()

# Whether the Keras call that this thread runs without a strategy, as with a
# single tower, trains; None if there is no such call.
training_alone: Slot[bool] = Slot()


def current() -> Tracing | None:
    """Return the step that this thread traces, or None."""
    return _tracing.get()


def tracing(step: Tracing) -> contextlib.AbstractContextManager[None]:
    """Note the step that is traced in a block."""
    return _tracing.filled(step)


def short_name(device: str) -> str:
    """Return the name of a device without job and task."""
    return device[device.index("/device") :] if "/device" in device else device
