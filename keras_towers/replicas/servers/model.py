"""A model whose variables parameter servers hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_towers.errors import TowerError
from keras_towers.fit.update.one_device import as_one_device
from keras_towers.fit.weights import state as state_lib
from keras_towers.fit.weights.slots import slots_of
from keras_towers.replicas.servers.masters import Masters, Run


class ServedModel:
    """Which of a model's variables the servers hold, and what for.

    Args:
        name: prefix of their names there.
        devices: those of the parameter servers.
        run: calls a concrete function that takes no arguments.
        drop_with: as for ``Masters``.

    Attributes:
        masters: their copies on the servers.
        trained: the weights that are trained.
    """

    def __init__(
        self,
        name: str,
        devices: Sequence[str],
        run: Run,
        drop_with: Callable[[Any, str], None],
    ):
        self.masters: Masters = Masters(name, devices, run, drop_with)
        self.trained: list[keras.Variable] = []
        self._others: list[keras.Variable] = []
        self._of_optimizers: list[keras.Variable] = []

    def hold(self, model: keras.Model) -> None:
        """Give all variables that the workers share a copy on the servers."""
        state = state_lib.collect(model)
        for optimizer in state.optimizers:
            _build(optimizer, model)
        self.trained = [v for v in state.weights if v.trainable]
        self._others = [v for v in state.weights if not v.trainable]
        self._of_optimizers = state.optimizer_variables
        self.masters.add(self.trained)
        slots = {
            id(slot): weight
            for optimizer in state.optimizers
            for slot, weight in slots_of(optimizer)
        }
        self.masters.add(self._others)
        self.masters.add(self._of_optimizers, lambda v: slots.get(id(v)))

    def put(self) -> None:
        """Give the servers all that this worker has."""
        self.masters.put([*self.trained, *self._others, *self._of_optimizers])

    def put_trained(self) -> None:
        """Give the servers the trained weights that this worker has."""
        self.masters.put(self.trained)

    def put_others(self) -> None:
        """Give the servers what no optimizer trains."""
        self.masters.put(self._others)

    def get(self) -> None:
        """Take over all that the servers hold."""
        self.masters.get([*self.trained, *self._others, *self._of_optimizers])

    def copy_here(self) -> None:
        """Take over the trained weights, as part of a function."""
        self.masters.copy_here(self.trained)

    def write_through(self, variable: keras.Variable) -> None:
        """Give the servers a value that has been assigned here."""
        if variable in self.masters and variable._value is not self.masters.of(
            variable
        ):
            self.masters.put([variable])

    def in_place(self) -> contextlib.AbstractContextManager[None]:
        """Let the optimizers' variables be those on the servers."""
        return self.masters.in_place(self._of_optimizers)

    @contextlib.contextmanager
    def at_servers(
        self, optimizer: Any, variables: Sequence[Any]
    ) -> Iterator[None]:
        """Let weights and optimizers be those on the servers.

        Raises:
            TowerError: one is not there.
        """
        unknown = [v for v in variables if v not in self.masters]
        if unknown:
            names = ", ".join(getattr(v, "path", str(v)) for v in unknown)
            raise TowerError(
                f"the step trains {names}, which the parameter servers do not "
                "hold: they hold the trainable weights that the model had "
                "when fit began."
            )
        with (
            self.masters.in_place([*self.trained, *self._of_optimizers]),
            as_one_device(optimizer, variables),
        ):
            yield


def _build(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> None:
    if optimizer.built:
        return
    if optimizer is not model.optimizer:
        raise TowerError(
            f"the optimizer {optimizer.name!r} of model {model.name!r} is "
            "not built yet, and all workers have to know its variables "
            "before they train: call optimizer.build(variables) before fit."
        )
    with as_one_device(optimizer, model.trainable_variables):
        optimizer.build(model.trainable_variables)
