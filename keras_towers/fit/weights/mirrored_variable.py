"""A variable with a copy on each tower; its users see one variable."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_towers.fit.context import thread_state
from keras_towers.fit.weights.copies import copy_to_towers, mark_copies
from keras_towers.foundation import compat

_OPTIONS = ("dtype", "shape", "trainable", "constraint")


class TowerMirroredVariable(compat.MirroredVariable):
    """A variable with a copy on each tower; its users see an ordinary one.

    Its methods are those of a variable on one device, called on the first copy;
    written values are then copied to the other towers. In replicas, as in
    ``strategy.run``, they are those of TensorFlow's class, where each replica
    has its own copy.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        mark_copies(self)

    @property
    def handle(self) -> tf.Tensor:
        """The handle of this replica's copy; outside of replicas, the first."""
        return self.values[0].handle if _is_one() else super().handle

    def __getitem__(self, spec: object) -> Any:
        """Return a slice, which can be assigned."""
        if not _is_one():
            return super().__getitem__(spec)
        return compat.BaseResourceVariable.__getitem__(self, spec)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        """Pickle an ordinary variable: a strategy is of one process."""
        first = self.values[0]
        options = {name: getattr(first, name) for name in _OPTIONS}
        name = first.name.split(":")[0]
        return functools.partial(
            tf.Variable, first.numpy(), name=name, **options
        ), ()

    def __tf_tracing_type__(self, context: Any) -> Any:
        """Return a type of this variable alone, as on one device.

        The type of TensorFlow's class would be equal for all variables of this
        shape, and a ``tf.function`` would run the trace of another one.
        """
        traced = super().__tf_tracing_type__(context)
        traced.components += (id(self),)
        return traced


def _is_one() -> bool:
    """Whether this code sees one variable, rather than its replica's copy."""
    outside = not tf.distribute.has_strategy()
    return outside or compat.current_replica_id() is None


def _method(name: str) -> Callable[..., object]:
    """Return a method of plain variables, for variables with copies."""
    of_replicas = getattr(compat.MirroredVariable, name, None)
    if of_replicas is getattr(tf.Variable, name, None):
        of_replicas = None  # TensorFlow's class does not have it.
    writes = "assign" in name or "scatter" in name

    @functools.wraps(getattr(compat.BaseResourceVariable, name))
    def method(
        variable: TowerMirroredVariable, *args: object, **kwargs: object
    ) -> Any:
        is_one = _is_one()
        if not is_one and of_replicas is not None:
            return of_replicas(variable, *args, **kwargs)
        if not is_one and writes:
            raise NotImplementedError(
                f"a variable with a copy on each tower has no {name!r} in "
                "strategy.run, where each replica would change its own copy: "
                "use assign(), assign_add() or assign_sub()."
            )
        copy = variable.values[0] if is_one else variable._get()
        result = getattr(copy, name)(*args, **kwargs)
        # A step of fit copies what it has written itself.
        in_step = thread_state.current_step() is not None
        if writes and not in_step and not compat.is_saving():
            copy_to_towers([variable], 0)
        is_same = getattr(result, "handle", None) is copy.handle
        return variable if is_same else result

    return method


def _names_of_methods() -> Iterator[str]:
    """Yield the methods in which TensorFlow's two kinds of variables differ."""
    plain, copied = compat.BaseResourceVariable, compat.MirroredVariable
    for name in dir(plain):
        is_method = inspect.isfunction(inspect.getattr_static(plain, name))
        differs = getattr(plain, name) is not getattr(copied, name, None)
        is_internal = name.startswith("_") and not name.endswith("__")
        if is_method and differs and not is_internal and name != "__init__":
            yield name
    yield "__str__"
    yield "_strided_slice_assign"  # What assigning a slice calls.


for _name in set(_names_of_methods()) - set(vars(TowerMirroredVariable)):
    setattr(TowerMirroredVariable, _name, _method(_name))
