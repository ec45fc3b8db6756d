"""Layers under ``keras.RematScope`` or ``keras.remat``, in a step on towers.

On TensorFlow both are ``tf.recompute_grad``, which calls a function a second
time in its gradient. Then it draws other random numbers, updates variables
twice, fails with keyword arguments, gives no gradients to the tensors that it
captures, and makes the gradients of all its variables wait for one another. In
a strategy's block, the function is called once, like any other. The schedule of
a step on towers recomputes the operations without effects.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.fit import components
from keras_towers.fit.context import thread_state
from keras_towers.fit.context.thread_state import ThreadLocal
from keras_towers.foundation import compat
from keras_towers.foundation.object_types import Structure
from keras_towers.partition.ir.effects import Effect, effect_of, is_draw

# Gets the name of each function that is called once, and how plain Keras
# differs, if it does.
reporting: ThreadLocal[Callable[[str, str], None]] = ThreadLocal()


# The graphs of traces outside of all blocks that call a function twice.
_called_twice: weakref.WeakSet[tf.Graph] = weakref.WeakSet()


def note_call_outside() -> None:
    """Note that a function is called twice, maybe in a trace that is kept."""
    if tf.executing_eagerly():
        return
    graph: Any = compat.get_default_graph()
    # What calls a function that calls one twice, does so itself.
    while isinstance(graph, compat.FuncGraph):
        _called_twice.add(graph)
        graph = graph.outer_graph


def has_traces_from_outside(traces: Callable[[], Iterable[Any]]) -> bool:
    """Whether a trace from outside calls a function twice, but not here.

    Args:
        traces: returns the traces of a ``tf.function``.
    """
    if not _called_twice or not apply_here():
        return False
    graphs = [trace.graph for trace in traces()]
    called = [g for graph in graphs for g in compat.graphs_called_by(graph)]
    return not _called_twice.isdisjoint([*graphs, *called])


def apply_here() -> bool:
    """Whether this thread is in a strategy's block, or in a call of its own."""
    return bool(
        thread_state.current_step()
        or components.active_strategy()
        or thread_state.trains_on_one_device.get() is not None
    )


class ModeOfBlock(compat.remat_module.RematMode):
    """What a layer that is made in a strategy's block has of a ``RematScope``.

    Outside of blocks, where TensorFlow can call few layers so, it has no mode.
    """

    @property
    def mode(self) -> str | None:
        """The mode that the user gave, where it applies."""
        return self[0] if apply_here() else None


@contextlib.contextmanager
def called_once(function: Callable, arguments: Structure) -> Iterator[None]:
    """Call a function, in this block, that plain Keras would call twice.

    Args:
        function: the function.
        arguments: what it is given.
    """
    step, graph = thread_state.current_step(), compat.get_default_graph()
    before = len(graph.get_operations())
    with contextlib.ExitStack() as stack:
        # A branch, a loop or a function is one operation.
        if step and step.remat and step.graph is graph:
            stack.enter_context(step.remat.segment())
        yield
    report = reporting.get()
    if report and compat.has_tape():
        name = getattr(function, "__qualname__", type(function).__name__)
        found = _second_call(graph.get_operations()[before:], arguments)
        if tf.executing_eagerly():
            found = ["repeats what it draws and writes"]
        if found:
            report(name, ", ".join(found))


def _second_call(
    operations: Sequence[tf.Operation], arguments: Structure
) -> list[str]:
    """Describe what a second call changes in plain Keras.

    Args:
        operations: those that a call adds.
        arguments: of the call.
    """
    inside = set(operations)
    draws = {o for o in inside if is_draw(o.type) or "seed2" in o.node_def.attr}
    effects = {o for o in inside if effect_of(o) > Effect.CHECK}
    given = {id(t) for t in tf.nest.flatten(arguments, expand_composites=True)}
    inputs = [tensor for o in operations for tensor in o.inputs]
    captured = [
        tensor
        for tensor in inputs
        if tensor.dtype != tf.resource
        and tensor.op not in inside
        and id(tensor) not in given
    ]
    found = {
        # Without an effect, they have the same seed again.
        "draws other numbers": draws and effects,
        "writes twice": effects - draws,
        "gives no gradients to what it captures": compat.has_gradient(captured),
    }
    return [words for words, is_so in found.items() if is_so]
