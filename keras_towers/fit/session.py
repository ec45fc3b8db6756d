"""The call of a Keras method that towers run."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import keras

from keras_towers.errors import TowerError
from keras_towers.fit import data as data_lib

TRAINING = ("fit", "train_on_batch")

_local = threading.local()


@dataclasses.dataclass
class Session:
    """A call of ``fit``, ``evaluate``, ... of one model under one strategy.

    Attributes:
        model: the model whose method was called.
        kind: the name of the method.
        prepared: whether all variables are on the towers.
        epoch_iterator: what the method draws its batches from, once made.
        order: how the ranks shuffle alike, where there are several.
        start: where in the data ``fit`` begins, if not where they do.
        steps: what asynchronous towers do for it, once they do.
    """

    model: keras.Model
    kind: str
    prepared: bool = False
    epoch_iterator: Any = None
    order: Any = None
    start: Any = None
    steps: Any = None

    def settle(self) -> None:
        """Wait for steps that run in threads of their own."""
        if self.steps is not None:
            self.steps.settle()

    def close(self) -> None:
        """End such threads."""
        if self.steps is not None:
            self.steps.close()

    @property
    def trains(self) -> bool:
        """Whether its steps change weights."""
        return self.kind in TRAINING

    @property
    def predicts(self) -> bool:
        """Whether outputs are examples, to be put behind one another."""
        return self.kind.startswith("predict")

    def is_step(self, fn: Any, args: Any) -> bool:
        """Whether Keras, not the user's own code, calls ``strategy.run``."""
        if len(args) != 1:
            return False
        return (
            self.predicts
            or isinstance(args[0], data_lib.TowerBatch)
            or getattr(fn, "__self__", None) is self.model
        )


def refuse_empty(kind: str, model: keras.Model) -> NoReturn:
    """Say that a call has no batch; Keras would go on with a warning.

    Args:
        kind: the name of the method.
        model: the model whose method was called.

    Raises:
        TowerError: always.
    """
    raise TowerError(
        f"{kind} of model {model.name!r} got no batch: the dataset is empty. "
        "Give at least one example."
    )


def current() -> Session | None:
    """The session that this thread is in, or None."""
    return getattr(_local, "session", None)


@contextlib.contextmanager
def opened(session: Session) -> Iterator[None]:
    """Make ``session`` this thread's for a block, and close it at the end."""
    before = current()
    _local.session = session
    try:
        yield
    finally:
        _local.session = before
        session.close()
