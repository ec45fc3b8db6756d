"""The copies of variables that parameter servers hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.context.by_identity import ByIdentity
from keras_towers.fit.update.one_device import component
from keras_towers.fit.weights import variables as variables_lib
from keras_towers.placement import LeastLoadedPlacement
from keras_towers.replicas.resources import variable as named_variable

Run = Callable[[Any], Any]


class Masters:
    """Copies of a model's variables on parameter servers, found by name.

    All workers create them in the same order. In every worker the Keras
    variables keep their local values; the copies take their place inside
    ``in_place``.

    Args:
        name: prefix of their names.
        devices: those of the parameter servers.
        run: calls a concrete function that takes no arguments.
        drop_with: given a copy and its name, drops the name with it.

    Attributes:
        placement: which server holds which variable.
    """

    def __init__(
        self,
        name: str,
        devices: Sequence[str],
        run: Run,
        drop_with: Callable[[Any, str], None],
    ):
        self._name = name
        self._drop_with = drop_with
        self._run = run
        self.placement: LeastLoadedPlacement = LeastLoadedPlacement(devices)
        self._of: ByIdentity[keras.Variable, tf.Variable] = ByIdentity()
        self._count = 0
        self._traced: dict[Any, Any] = {}

    def add(
        self,
        variables: Sequence[keras.Variable],
        beside: Callable[[keras.Variable], keras.Variable | None] = (
            lambda variable: None
        ),
    ) -> None:
        """Give variables a copy each, unless they have one.

        Args:
            variables: Keras variables.
            beside: returns one that has a copy, on whose server the copy of the
                given one shall be; None for the server with the least bytes.
        """
        for variable in variables:
            if variable in self._of or not _is_number(variable):
                continue
            neighbour = beside(variable)
            if neighbour is not None and neighbour in self._of:
                device = self._of[neighbour].device
            else:
                device = self.placement(
                    variable.path, variable.shape, variable.dtype
                )
            name = f"{self._name}/{self._count}"
            master: Any = named_variable(
                name,
                device,
                variable.shape,
                tf.as_dtype(variable.dtype),
            )
            # By this id optimizers know the variables that they train.
            master._unique_id = component(variable._value)._unique_id
            self._drop_with(master, name)
            self._count += 1
            self._of[variable] = master

    def __contains__(self, variable: Any) -> bool:
        return isinstance(variable, keras.Variable) and variable in self._of

    def of(self, variable: Any) -> tf.Variable:
        """Return the copy of a variable."""
        return self._of[variable]

    def put(self, variables: Sequence[keras.Variable]) -> None:
        """Write the local values of variables into their copies."""
        mine = [v for v in variables if v in self._of]

        def body() -> None:
            for variable in mine:
                value = _merged(variable)
                master = self._of[variable]
                with tf.device(master.device):
                    master.assign(value, read_value=False)

        self._call("put", mine, body)

    def get(self, variables: Sequence[keras.Variable]) -> None:
        """Write the copies of variables into all of their local components."""
        mine = [v for v in variables if v in self._of]
        self._call("get", mine, lambda: self.copy_here(mine))

    def copy_here(self, variables: Sequence[keras.Variable]) -> None:
        """Do what ``get`` does, as part of a function."""
        for variable in variables:
            master = self._of[variable]
            with tf.device(master.device):
                value = master.read_value()
            local = variable._value
            if isinstance(local, variables_lib.TowerVariable):
                local.assign_everywhere(value)
            elif local is not master:
                first = component(local)
                with tf.device(first.device):
                    first.assign(value, read_value=False)
        variables_lib.copy_to_towers(variables)

    def _call(
        self,
        what: str,
        variables: Sequence[keras.Variable],
        body: Callable[[], None],
    ) -> None:
        if not variables:
            return
        key = what, *(id(v._value) for v in variables)
        if key not in self._traced:
            with compat.single_device_mode():
                function = tf.function(body, autograph=False)
                self._traced[key] = function.get_concrete_function()
        self._run(self._traced[key])

    @contextlib.contextmanager
    def in_place(self, variables: Sequence[Any]) -> Iterator[None]:
        """Let Keras variables be their copies inside a block."""
        before = []
        try:
            for variable in variables:
                if variable in self and variable._value is not self.of(
                    variable
                ):
                    # Recorded first, so that a Ctrl-C is undone, too.
                    before.append((variable, variable._value))
                    variable._value = self.of(variable)
            yield
        finally:
            for variable, value in before:
                variable._value = value

    def forget_traces(self) -> None:
        """Drop functions of local variables, which may have been replaced."""
        self._traced.clear()


def _is_number(variable: keras.Variable) -> bool:
    return keras.backend.standardize_dtype(variable.dtype) != "string"


def _merged(variable: keras.Variable) -> tf.Tensor:
    value = variable._value
    if isinstance(value, variables_lib.TowerVariable):
        return value.merged_value()
    return component(value).read_value()
