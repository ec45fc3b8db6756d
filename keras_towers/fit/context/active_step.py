"""The step that this thread is tracing or running for towers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from keras_towers import compat
from keras_towers.fit.context.blocks import Slot
from keras_towers.fit.contract import UpdateCall


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ActiveStep:
    """A step that a thread is tracing or running.

    Attributes:
        training: whether it is a step of training.
        apply: takes the calls of optimizers.
        graph: the graph in which calls are passed to ``apply``; its branches,
            loops and functions trace them like any other code. None: every
            graph.
        own_statistics: whether BatchNormalization takes the statistics of each
            tower's rows.
        index: the tower that runs it; 0 where towers divide one step.
        total: the number of towers that run steps of their own.
        device: the tower's device; "": that of one device.
    """

    training: bool
    apply: Callable[[UpdateCall], None]
    graph: Any = None
    own_statistics: bool = False
    index: int = 0
    total: int = 1
    device: str = ""

    @property
    def takes_updates(self) -> bool:
        """Whether calls of optimizers are passed to ``apply`` here."""
        return self.graph in (None, compat.get_default_graph())


_tracing: Slot[ActiveStep] = Slot()
# The step that this thread is tracing or running, or None.
current = _tracing.get
# A block in which a step is the active one.
tracing = _tracing.filled

# Whether the Keras call that this thread runs without a strategy, as with a
# single tower, trains; None if there is no such call.
training_alone: Slot[bool] = Slot()


def short_name(device: str) -> str:
    """Return the name of a device without job and task."""
    return device[device.index("/device") :] if "/device" in device else device
