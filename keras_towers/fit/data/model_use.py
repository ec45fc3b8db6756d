"""Data in Python that use the model that trains on them.

Keras reads generators and ``PyDataset``s some batches ahead of the steps, in
threads of TensorFlow. What such data get of the model would depend on time, and
ranks would get different batches. Keras looks at the first two batches before
any step: if these use the model, each batch is read when its step asks for it.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing.dummy
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit.context import patches
from keras_towers.fit.context.thread_state import ThreadLocal
from keras_towers.fit.data import same_data
from keras_towers.foundation import compat

ending = threading.RLock()
"""Held by a call of a model in a thread that reads data, and by its end.

Such a call ends before the call that reads the data undoes what both change.
"""

_PYTHON = {"PyFunc", "EagerPyFunc", "PyFuncStateless"}

_used: ThreadLocal[list[keras.Variable]] = ThreadLocal()


@contextlib.contextmanager
def noting() -> Iterator[list[keras.Variable]]:
    """Return a list to which this thread's uses of variables are added."""
    uses = "value", "assign"
    noted = tuple((compat.KerasVariable, name, _use) for name in uses)
    used: list[keras.Variable] = []
    with _used.holding(used), patches.patched_while_used(noted):
        yield used


def _use(
    original: Callable[..., Any], variable: keras.Variable, *args: object
) -> Any:
    used = _used.get()
    if used is not None:
        used.append(variable)
    return original(variable, *args)


def calling(
    model: keras.Model,
) -> contextlib.AbstractContextManager[object]:
    """Return a block in which this thread calls a method of a model."""
    used = _used.get()
    if used is not None:
        used.extend(model.variables)
    return ending if reads_data() else contextlib.nullcontext()


def are_any(
    used: Collection[keras.Variable], written: Collection[keras.Variable]
) -> bool:
    """Whether any of the used variables is one that steps write."""
    return not {*map(id, used)}.isdisjoint(map(id, written))


def reads_data() -> bool:
    """Whether this thread may be one that reads data.

    Such threads are TensorFlow's, which Python has not started, and those of
    Keras's pools.
    """
    thread = threading.current_thread()
    return isinstance(
        thread, threading._DummyThread | multiprocessing.dummy.DummyProcess
    )


def is_read_by_steps(adapter: Any) -> bool:
    """Whether the batches of an adapter can be read one by one."""
    if isinstance(adapter, compat.PyDatasetAdapter):
        return adapter.enqueuer is None
    return isinstance(adapter, compat.GeneratorDataAdapter)


def without_read_ahead(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return a dataset of Keras's adapter that reads nothing ahead."""
    (read,) = dataset._inputs()
    options = tf.data.Options()
    # TensorFlow would read ahead, too.
    options.autotune.enabled = False
    return read.with_options(options)


def why_not_use(adapter: Any) -> str:
    """Return what to change so that data that are read ahead may use a model.

    Ranks read them at different times, and would get different batches. Empty:
    they use none.
    """
    if is_read_by_steps(adapter):
        return "Use the model in the first two batches, too"
    if isinstance(adapter, compat.PyDatasetAdapter):
        return "Give the PyDataset workers=1"
    is_dataset = isinstance(adapter, compat.TFDatasetAdapter)
    if is_dataset and _runs_python(adapter.get_tf_dataset()):
        return "Give fit a generator or a PyDataset instead"
    return ""


def _runs_python(dataset: tf.data.Dataset) -> bool:
    for part in same_data.parts_of(dataset):
        for function in part._functions():
            graph = function.function.graph.as_graph_def()
            called = (each.node_def for each in graph.library.function)
            nodes = itertools.chain(graph.node, *called)
            if not _PYTHON.isdisjoint(node.op for node in nodes):
                return True
    return False
