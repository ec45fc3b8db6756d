"""Variables whose value another one has for now, and functions that use them.

A user may hold a variable, or a function that has captured it, from before a
block in which its own handle has no value, or an old one.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_towers.fit.context import patches
from keras_towers.fit.weights.shards import ShardedVariable, current_value
from keras_towers.foundation import compat

# The variables that have the values now, by the ids of the handles that do not.
_by_handle: dict[int, weakref.ref[tf.Variable]] = {}


class MovedVariable(compat.BaseResourceVariable):
    """A variable whose value another one has, which does what this one should.

    An ordinary variable becomes one by ``move``, until ``move_back``.
    """

    def __getattribute__(self, name: str) -> Any:
        # What a user's dictionary knows it by stays.
        own = super().__getattribute__
        return own(name) if name == "ref" else getattr(own("moved_to"), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(object.__getattribute__(self, "moved_to"), name, value)


def move(variable: Any, now: tf.Variable) -> None:
    """Let another variable stand for one whose value it has got.

    Functions that have captured the variable use the other one, too.
    """
    stack = contextlib.ExitStack()
    stack.enter_context(patches.patched_while_used(_PATCHES))
    handles = [variable._handle]
    if isinstance(now, ShardedVariable):
        # It may be an argument of a function.
        handles.append(now._handle)
    for handle in handles:
        _by_handle[id(handle)] = weakref.ref(now)
        stack.callback(_by_handle.pop, id(handle))
    # The user may drop it, as any variable.
    end = weakref.finalize(variable, stack.close)
    end.atexit = False
    own = vars(variable)
    own["moved_to"], own["moved_from"], own["moved_end"] = (
        now,
        type(variable),
        end,
    )
    object.__setattr__(variable, "__class__", MovedVariable)


def move_back(variable: tf.Variable) -> None:
    """Let a variable stand for itself again, if it has been moved."""
    if type(variable) is MovedVariable:
        own = object.__getattribute__(variable, "__dict__")
        object.__setattr__(variable, "__class__", own.pop("moved_from"))
        own.pop("moved_end")()
        del own["moved_to"]


def _call(
    original: patches.Original,
    function: Any,
    tensor_inputs: Sequence[tf.Tensor],
    captured_inputs: Sequence[tf.Tensor],
) -> Any:
    """Call a function with the variables that have the values now."""
    inputs, number = [*tensor_inputs, *captured_inputs], len(tensor_inputs)
    ids = [*map(id, inputs)]
    found = [(n, _by_handle[i]()) for n, i in enumerate(ids) if i in _by_handle]
    if not found:
        return original(function, tensor_inputs, captured_inputs)
    reads = compat.read_only_inputs(function.graph)
    with contextlib.ExitStack() as stack:
        for index, moved in found:
            variable = current_value(moved)
            inputs[index] = variable.handle
            if not isinstance(variable, ShardedVariable):
                continue
            # What has captured shards joins and divides them itself.
            if id(variable.handles[0][0]) not in ids:
                stack.enter_context(variable.as_whole(index not in reads))
        return original(function, inputs[:number], inputs[number:])


_PATCHES: tuple[patches.Patch, ...] = (
    (compat.CalledFunction, "_call_flat", _call),
)
