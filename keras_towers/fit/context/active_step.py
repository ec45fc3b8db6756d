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
        apply: handles calls of optimizers.
        graph: the graph in which calls are passed to ``apply``; its branches,
            loops and functions trace them like any other code. None: every
            graph.
        own_statistics: whether BatchNormalization computes statistics for each
            tower's rows separately.
        index: the tower that runs it; 0 if all towers divide one step.
        total: the number of towers that run separate steps; 1 if they divide
            one step.
        device: the tower's device; "": TensorFlow's default.
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

# Whether the Keras call that this thread runs on one device trains; None if
# it runs none.
training_alone: Slot[bool] = Slot()


def short_name(device: str) -> str:
    """Return the name of a device without job and task."""
    return device[device.index("/device") :] if "/device" in device else device
