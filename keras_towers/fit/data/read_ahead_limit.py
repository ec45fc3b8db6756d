"""How far data in Python that use the model may be read ahead of its steps.

TensorFlow's threads read the batches of a generator or a ``PyDataset`` some
batches ahead of the steps. If such data use the model that trains meanwhile,
their batches would depend on time, and ranks would get different ones. So once
data have used a variable that steps write, each batch is read only when its
step has begun, which then waits for its batch.

``epoch_iterator.py`` makes the limit of an epoch's data. ``keras_patches.py``
calls ``use_variable`` and ``asking`` whenever Python code uses a variable or
calls a model.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing.dummy
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit.context.thread_state import ThreadLocal
from keras_towers.fit.data.batches import identity_of
from keras_towers.fit.data.same_data import parts_of
from keras_towers.fit.data.tower_datasets import mapped
from keras_towers.foundation import compat, settings
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Structure


class ReadAheadLimit:
    """Limits how far an epoch iterator's data are read ahead of its steps.

    The threads that read the data wait for the steps, in ``wait_for``.

    Args:
        state: returns the variables that steps write.
        per_execution: how many steps Keras runs at a time.
        done: returns how many steps are done, also within an execution; None:
            they are not counted.

    Attributes:
        per_step: how many batches a step takes.
    """

    def __init__(
        self,
        state: Callable[[], Collection[keras.Variable]],
        per_execution: int = 1,
        done: Callable[[], int] | None = None,
    ):
        self.per_step = 1
        self._state = state
        self._per_execution = per_execution
        self._done = done if per_execution > 1 else None
        self._changed = threading.Condition()
        self._has_asked = False
        self._asking = 0
        # Whether steps may wait for what reads the data, and the batches read.
        self._orders = False
        self._ready = 0
        # For a dataset: the number of batches read, and the current read.
        self._read: Any = None
        self._reading: _Reading | None = None
        # For the data's current iterator: its number, the batches read without
        # a step, the steps that have begun, and those done before the last.
        self._iterator = self._skipped = self._begun = self._done_before = 0
        # Whether steps of the last execution are waited for, and how many are
        # done where they run one by one.
        self._counts = False
        self._done_alone = 0

    def begin_iterator(self) -> None:
        """Begin to read anew; reads of the last iterator end."""
        with self._changed:
            self._iterator += 1
            self._skipped = self._begun = self._ready = 0
            self._changed.notify_all()
        if self._read is not None:
            self._read.assign(0)

    def skip(self, batches: int) -> None:
        """Let batches be read that no step uses."""
        with self._changed:
            self._skipped += batches
            self._changed.notify_all()

    def begin_steps(self, data: Structure = None) -> None:
        """Let the batches of the next execution be read.

        Args:
            data: what its steps read, one by one; None: their batches are read
                before the first of them.
        """
        is_several = data is not None and self._per_execution > 1
        with self._changed:
            # The first execution shows whether the data ask.
            may_ask = self._has_asked or (self._orders and not self._begun)
            self._begun += self._per_execution
            self._done_alone = 0
            self._counts = is_several and (may_ask or bool(self._done))
            if self._done is not None:
                self._done_before = self._done()
            self._changed.notify_all()
        if self._read is not None:
            # Data of validation are read within those of training.
            _counted[:] = [*(t for t in _counted if t is not self), self]
        if isinstance(data, tf.data.Iterator) and self._orders:
            _limits[data] = self

    def has_to_wait(self) -> bool:
        """Whether the next step may not begin before its batch is read.

        It may read its variables before its batch is there. So what the data
        ask, or change, would be earlier or later than the step by chance.
        """
        if self._per_execution > 1:
            # Each waits for its batch, but only those of all ranks are counted.
            return self._counts and self._done is None
        ready = self._ready if self._read is None else int(self._read)
        return ready < self._skipped + self.per_step * self._begun

    def begin_step(self, done: int) -> None:
        """Let the batch of the next step of an execution be read.

        Args:
            done: how many steps of it are done.
        """
        with self._changed:
            self._done_alone = done
            self._changed.notify_all()

    def end(self) -> None:
        """End all reads, once they no longer use the model."""
        if self in _counted:
            _counted.remove(self)
        self.begin_iterator()
        with self._changed:
            self._changed.wait_for(lambda: not self._asking)

    def first_batches(self) -> contextlib.AbstractContextManager[None]:
        """Read the first batches in this block, before any step."""
        return _reading.holding(_Reading(self))

    def order_reads(self, adapter: Any) -> None:
        """Make an adapter of Keras read each batch within the limit."""
        names: tuple[str, ...] = ()
        if isinstance(adapter, compat.GeneratorDataAdapter):
            names = ("generator",)
        # A pool of Keras has no limit.
        elif not has_pool(adapter) and isinstance(
            adapter, compat.PyDatasetAdapter
        ):
            names = "_finite_generator", "_infinite_generator"
        self._orders = bool(names)
        for name in names:
            setattr(adapter, name, self.wrap(getattr(adapter, name)))

    def wrap(
        self, read: Callable[[], Iterable[object]]
    ) -> Callable[[], Iterator[object]]:
        """Return a function that reads the same batches within the limit."""

        def batches() -> Iterator[object]:
            iterator, source = self._iterator, iter(read())
            for number in itertools.count():
                reading = _Reading(self, iterator, number)
                if self._has_asked:
                    reading.wait()
                with _reading.holding(reading):
                    try:
                        batch = next(source)
                    except StopIteration:
                        return
                with self._changed:
                    if iterator == self._iterator:
                        self._ready = number + 1
                yield batch

        return batches

    def counted(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Return a dataset that counts its batches, so that threads can wait.

        Args:
            dataset: runs Python functions, and reads no batch ahead.
        """
        self._read = counter = compat.hidden_variable(0, tf.int64)
        self._orders = True
        _counted.append(self)

        def count(batch: Structure) -> Structure:
            with tf.control_dependencies([counter.assign_add(1)]):
                return identity_of(batch)

        return mapped(dataset, count)

    def reading(self) -> _Reading:
        """Return the read of a thread that reads the counted dataset."""
        with tf.init_scope():
            position = self._iterator, int(self._read)
        if self._reading is None or self._reading.position != position:
            self._reading = _Reading(self, *position)
        return self._reading

    def written(self) -> set[int]:
        """Return the ids of the variables that steps write."""
        return {id(variable) for variable in self._state()}

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Make ``end`` wait for this block, which uses the model."""
        with self._changed:
            self._asking += 1
        try:
            yield
        finally:
            with self._changed:
                self._asking -= 1
                self._changed.notify_all()

    def wait_for(self, iterator: int, number: int) -> None:
        """Wait until the step of a batch begins, because data use the model."""
        # Steps within an execution notify nobody.
        pause_s = None if self._done is None else settings.POLL_S
        with self._changed:
            self._has_asked = True
            while iterator and not self._is_due(iterator, number):
                self._changed.wait(pause_s)

    def _is_due(self, iterator: int, number: int) -> bool:
        if iterator != self._iterator:
            raise TowerError(
                "data ask the model for a batch that nothing needs any more: "
                "the call has ended, or begins to read anew."
            )
        step = (number - self._skipped) // self.per_step
        last = self._begun - self._per_execution
        if not self._counts or step <= last:
            return step < self._begun
        done = self._done_alone
        if self._done is not None:
            done = self._done() - self._done_before
        return step < self._begun and step <= last + done


class _Reading:
    """One read by a thread: of a batch, or of the first batches."""

    def __init__(
        self, limit: ReadAheadLimit, iterator: int = 0, number: int = 0
    ):
        self.limit = limit
        self.position = iterator, number
        self._is_due = False
        self._written: set[int] | None = None

    def ask(self, variables: Iterable[object]) -> None:
        """Wait for the step of this read if steps write a variable of these."""
        if self._is_due:
            return
        if self._written is None:
            self._written = self.limit.written()
        if any(id(variable) in self._written for variable in variables):
            self.wait()

    def wait(self) -> None:
        """Wait for the step of this read."""
        self.limit.wait_for(*self.position)
        self._is_due = True


_reading: ThreadLocal[_Reading] = ThreadLocal()
# The limits of datasets; the last one has begun a step last.
_counted: list[ReadAheadLimit] = []
# The limits of the iterators that steps read.
_limits: weakref.WeakKeyDictionary[tf.data.Iterator, ReadAheadLimit]
_limits = weakref.WeakKeyDictionary()


def limit_of(data: Structure) -> ReadAheadLimit | None:
    """Return the limit of what steps read; None: it has none."""
    return _limits.get(data) if isinstance(data, tf.data.Iterator) else None


def _current() -> _Reading | None:
    reading = _reading.get()
    # Another thread may end the last one meanwhile.
    last = _counted[-1:]
    if reading is None and last and reads_data():
        return last[0].reading()
    return reading


@contextlib.contextmanager
def asking(variables: Iterable[object]) -> Iterator[None]:
    """Use variables in a block; a thread that reads data first waits."""
    reading = _current()
    if reading is None:
        yield
        return
    reading.ask(variables)
    with reading.limit.asking():
        yield


def use_variable(
    original: Callable[..., Any], variable: keras.Variable, *args: object
) -> Any:
    """Use a variable; a thread that reads data first waits."""
    reading = _current()
    if reading is not None:
        reading.ask((variable,))
    return original(variable, *args)


def waits_for_steps() -> bool:
    """Whether this thread reads data within a limit."""
    return _current() is not None


def reads_data() -> bool:
    """Whether this thread may be one that reads data.

    Such threads are TensorFlow's, which Python has not started, and those of
    Keras's pools.
    """
    thread = threading.current_thread()
    return isinstance(
        thread, threading._DummyThread | multiprocessing.dummy.DummyProcess
    )


_AHEAD = (
    "Give fit a generator or a PyDataset instead, or leave prefetch, "
    "num_parallel_calls and other maps out of the dataset"
)
_PYTHON = {"PyFunc", "EagerPyFunc", "PyFuncStateless"}


def why_not_asking(adapter: Any) -> str:
    """Return why the data of an adapter must not use a model; empty: they may.

    If they are read ahead, ranks read them at different times, and would get
    different batches.
    """
    if has_pool(adapter):
        return "Give the PyDataset workers=1"
    return _AHEAD if _has_python(adapter) and not is_countable(adapter) else ""


def has_pool(adapter: Any) -> bool:
    """Whether an adapter has a PyDataset that a pool of Keras reads."""
    return getattr(adapter, "enqueuer", None) is not None


def is_countable(adapter: Any) -> bool:
    """Whether an adapter has a dataset that reads only what it is asked for."""
    return _has_python(adapter) and not reads_ahead(adapter.get_tf_dataset())


def _has_python(adapter: Any) -> bool:
    is_dataset = isinstance(adapter, compat.TFDatasetAdapter)
    return is_dataset and runs_python(adapter.get_tf_dataset())


def runs_python(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset runs Python functions."""
    return any(map(_runs_python, parts_of(dataset)))


def _runs_python(part: tf.data.Dataset) -> bool:
    graphs = (function.function.graph for function in part._functions())
    return any(_PYTHON & _operations(graph) for graph in graphs)


def _operations(graph: tf.Graph) -> set[str]:
    """Return the operation types of a graph and of the functions it calls."""
    called = (f.cached_definition.node_def for f in graph._functions.values())
    types = {node.op for node in itertools.chain(*called)}
    return types.union(op.type for op in graph.get_operations())


def reads_ahead(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset may read elements before it is asked for them."""
    for part in parts_of(dataset):
        name = type(part).__name__
        # TensorFlow makes maps parallel that run no Python.
        is_plain_map = name == "_MapDataset" and not _runs_python(part)
        if "Prefetch" in name or "Parallel" in name or is_plain_map:
            return True
    return False
