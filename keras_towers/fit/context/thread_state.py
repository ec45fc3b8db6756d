"""State of each thread: the step that it traces or runs, and its blocks."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from keras_towers.fit.components import ApplyCall
from keras_towers.foundation import compat

if TYPE_CHECKING:
    import tensorflow as tf

    from keras_towers.fit.context.remat_scopes import RematScopes

T = TypeVar("T")


class ThreadLocal(Generic[T]):
    """Holds at most one value per thread, for the duration of a block."""

    def __init__(self) -> None:
        self._local = threading.local()

    def get(self) -> T | None:
        """Return this thread's value, or None outside of any block."""
        return getattr(self._local, "value", None)

    @contextlib.contextmanager
    def holding(self, value: T | None) -> Iterator[None]:
        """Set this thread's value inside a block, then restore it."""
        before = self.get()
        self._local.value = value
        try:
            yield
        finally:
            self._local.value = before


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
        remat: notes what is to be computed again; None: TensorFlow does that.
        first_call: makes the variables of the step; None: TensorFlow does.
    """

    training: bool
    apply: Callable[[ApplyCall], None]
    graph: tf.Graph | None = None
    own_statistics: bool = False
    index: int = 0
    total: int = 1
    device: str = ""
    remat: RematScopes | None = None
    first_call: compat.FirstCall | None = None

    @property
    def takes_updates(self) -> bool:
        """Whether optimizers pass their gradients to ``apply`` here."""
        return self.graph in (None, compat.get_default_graph())


_tracing: ThreadLocal[ActiveStep] = ThreadLocal()
# The step that this thread is tracing or running, or None.
current_step = _tracing.get
# A block in which a step is the active one.
tracing = _tracing.holding

# Whether the Keras call that this thread runs on one device trains; None if
# it runs none.
trains_on_one_device: ThreadLocal[bool] = ThreadLocal()

# Whether this thread traces functions that are saved, not called.
exporting: ThreadLocal[contextlib.ExitStack] = ThreadLocal()

# Whether what this thread reads stays in parts after the strategy's block, too.
keeping_shards: ThreadLocal[bool] = ThreadLocal()


@dataclasses.dataclass(frozen=True, eq=False)
class OpenBlock:
    """A block in which only the thread that entered it trains on towers.

    Attributes:
        opened: what the thread did: "the block of TowerStrategy was entered".
        how: what another thread has to do: "Enter it".
        lasts: whether it still holds.
        thread: the thread.
    """

    opened: str
    how: str
    lasts: Callable[[], bool] = lambda: True
    thread: threading.Thread = dataclasses.field(
        default_factory=threading.current_thread
    )


_open: list[OpenBlock] = []


@contextlib.contextmanager
def entered_block(block: OpenBlock) -> Iterator[None]:
    """Record that this thread is inside a block."""
    _open.append(block)
    try:
        yield
    finally:
        _open.remove(block)


def block_of_other_thread() -> OpenBlock | None:
    """Return an open block of another thread, if this thread has none."""
    here = threading.current_thread()
    blocks = [b for b in list(_open) if b.thread.is_alive() and b.lasts()]
    if any(block.thread is here for block in blocks):
        return None
    return next(iter(blocks), None)
