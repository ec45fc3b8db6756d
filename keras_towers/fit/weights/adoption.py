"""Putting a model on towers, and making it an ordinary one again."""

from __future__ import annotations

import weakref
from typing import Any

import keras

from keras_towers.errors import TowerError
from keras_towers.fit.contract import TowerConfig, Update, home_of
from keras_towers.fit.weights import agreement, trainers
from keras_towers.fit.weights import state as state_lib
from keras_towers.fit.weights import variables as variables_lib
from keras_towers.fit.weights.spread import SpreadVariables


class Adoption:
    """The models that live on a strategy's towers.

    A model that was built outside gets copies of its variables on towers 1 to
    K - 1; its own ``tf.Variable``s are tower 0's. Where its trained weights and
    its optimizers are is the ``Update``'s affair.

    Args:
        config: the towers.
        spread: the variables with a component on every tower.
        update: who updates the weights.
    """

    def __init__(
        self, config: TowerConfig, spread: SpreadVariables, update: Update
    ):
        self._config = config
        self._spread = spread
        self._update = update
        self._models: list[keras.Model] = []
        self._known: dict[tuple[int, str], tuple[Any, ...]] = {}
        self._written: dict[tuple[int, bool], set[int]] = {}
        # Whether towers may have written what they do not share since they
        # were last made equal.
        self._trained = False
        self._created: weakref.WeakSet[keras.Model] = weakref.WeakSet()
        self._made_variables: list[weakref.ref] = []
        self._notes = False

    def note_what_is_made(self) -> None:
        """Release, at the end, also what is made in the scope from now on."""
        self._notes = True

    def created(self, model: keras.Model) -> None:
        """Let a model that is made in the scope live there.

        It may be trained outside the scope, so its methods find back by
        themselves.
        """
        if self._notes:
            self._created.add(model)
        trainers.run_in_scope(model, self._config)

    def made_variable(self, variable: keras.Variable) -> None:
        """Note a variable that is made in the scope."""
        if self._notes:
            self._made_variables.append(weakref.ref(variable))

    def made_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Let an optimizer that is made in the scope reduce there."""
        self._update.take_optimizer(optimizer)

    def claim(self, model: keras.Model) -> None:
        """Make the strategy the one that ``model`` trains with.

        Raises:
            TowerError: the model lives on another strategy.
        """
        self.refuse_others(model)
        if not any(known is model for known in self._models):
            self._models.append(model)
        for optimizer in state_lib.collect(model).optimizers:
            self._update.place_optimizer(optimizer)
        for trainer in state_lib.trainers(model):
            trainers.settle(trainer, self._config)

    def refuse_others(self, model: keras.Model) -> None:
        """Refuse a model that lives on another strategy.

        Raises:
            TowerError: it does.
        """
        for trainer in state_lib.trainers(model):
            owner = home_of(trainer)
            if owner is not None and owner is not self._config.strategy:
                raise TowerError(
                    f"model {model.name!r} lives on another strategy "
                    f"({type(owner).__name__}). A model can be on one strategy "
                    "at a time: leave the other one's `with` block first, or "
                    "build the model outside of any scope."
                )

    def knows(self, model: keras.Model, kind: str) -> bool:
        """Whether a method of the model has been prepared, as it is now."""
        return self._known.get((id(model), kind)) == _compilation(model)

    def remember(self, model: keras.Model, kind: str) -> None:
        """Note that a method of the model needs no more preparation."""
        self._known[id(model), kind] = _compilation(model)

    def written(self, model: keras.Model, training: bool) -> set[int]:
        """Ids of the variables that the model's steps assign.

        Args:
            model: the model.
            training: its training steps, else those of ``evaluate``.
        """
        return self._written.setdefault((id(model), training), set())

    def bind(self, model: keras.Model) -> bool:
        """Put those variables of ``model`` on the towers that are not there.

        Returns:
            Whether there were any.
        """
        state = state_lib.collect(model)
        moved = [
            *(
                self._spread.spread(v, variables_lib.STREAM)
                for v in state.seeds
            ),
            *(self._update.place(v) for v in state.weights),
            *(self._spread.spread(v, variables_lib.SUM) for v in state.metrics),
        ]
        for optimizer in state.optimizers:
            self._update.place_optimizer(optimizer)
        for variable in state.synchronized:
            variable._value.same_on_all_towers = True
        if any(moved):
            for trainer in state_lib.trainers(model):
                trainers.renew_functions(trainer)
        return any(moved)

    def synchronise(self, model: keras.Model) -> None:
        """Give every rank the weights, optimizers and seeds of rank 0.

        Raises:
            TowerError: the ranks do not have the same variables.
        """
        transport = self._config.transport
        if transport.size > 1:
            agreement.check_same(transport, _held_in_common(model))
            self._broadcast(model)

    def _broadcast(self, model: keras.Model) -> None:
        agreement.broadcast(
            self._config.transport, [v._value for v in _held_in_common(model)]
        )

    def mark_trained(self) -> None:
        """Note that towers may have written to themselves since."""
        self._trained = True

    def equalise(self) -> None:
        """Give all towers the mean of what each has written to itself.

        Moving statistics, that is: the optimizer's weights are equal anyhow.
        """
        transport = self._config.transport
        if transport.size == 1 or self._trained:
            agreement.average(
                transport,
                [v for v in self._spread.averaged() if v.written_by_towers],
            )
        self._trained = False

    def copy_from_first(self, model: keras.Model) -> None:
        """Give all towers of all ranks what the first one has."""
        variables_lib.copy_to_towers(
            [v for v in self._spread.averaged() if not v.written_by_towers]
        )
        if self._config.transport.size > 1:
            self._broadcast(model)

    def release(self) -> None:
        """Make every model on the towers an ordinary one, with its values."""
        self._spread.gather_all()
        self._update.release()
        models = {id(m): m for m in (*self._models, *self._created)}
        for model in models.values():
            self.release_model(model)
        for made in self._made_variables:
            if (variable := made()) is not None:
                self._release_variable(variable)
        self._models.clear()
        self._known.clear()
        self._written.clear()
        self._made_variables.clear()
        self._created = weakref.WeakSet()
        self._notes = False

    def release_model(self, model: keras.Model) -> None:
        """Make one model an ordinary one: variables, optimizers, trainers."""
        if model._distribute_strategy is None:
            return
        state = state_lib.collect(model)
        for variable in state.everything():
            self._release_variable(variable)
        for optimizer in state.optimizers:
            self._update.release_optimizer(optimizer)
        for trainer in state_lib.trainers(model):
            trainers.leave(trainer)

    def _release_variable(self, variable: keras.Variable) -> None:
        if not self._update.take_back(variable):
            self._spread.gather(variable)


def _held_in_common(model: keras.Model) -> list[keras.Variable]:
    """What all ranks hold in common: everything but what metrics count."""
    state = state_lib.collect(model)
    return [*state.seeds, *state.weights, *state.optimizer_variables]


def _compilation(model: keras.Model) -> tuple[Any, ...]:
    """What differs once the model is compiled again, or more of it built."""
    parts = [
        getattr(model, name, None)
        for name in ("optimizer", "_compile_metrics", "_compile_loss")
    ]
    return tuple((id(part), getattr(part, "built", None)) for part in parts)
