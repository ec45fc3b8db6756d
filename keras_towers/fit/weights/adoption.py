"""Placing models on towers and releasing them again."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras

from keras_towers.errors import TowerError
from keras_towers.fit.context.by_identity import ByIdentity
from keras_towers.fit.contract import TowerConfig, another, home_of
from keras_towers.fit.weights import model_binding, rank_state
from keras_towers.fit.weights import model_state as state_lib
from keras_towers.rendezvous.check import Peers

if TYPE_CHECKING:
    from keras_towers.fit.update.reduce import UpdateOnce


@dataclasses.dataclass
class _Notes:
    """Findings of calls of a model's methods."""

    known: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    functions: dict[str, Callable[[], Any]] = dataclasses.field(
        default_factory=dict
    )


class Adoption:
    """The models placed on a strategy's towers.

    The update places weights and optimizers; all else is held once. Models made
    in a block train on its towers after it, too, if it ``keeps`` them.
    """

    def __init__(
        self,
        config: TowerConfig,
        update: UpdateOnce,
        keeps: bool = True,
    ):
        self._config = config
        self._keeps = keeps
        self._update = update
        # Models that the user has dropped are freed, also inside the block.
        self._models: ByIdentity[keras.Model, _Notes] = ByIdentity()
        self._created: weakref.WeakSet[keras.Model] = weakref.WeakSet()
        # Compiled in the block, but neither made nor used there yet.
        self._compiled: weakref.WeakSet[keras.Model] = weakref.WeakSet()
        self._made_variables: list[weakref.ref] = []
        self._tracks = False

    def note_what_is_made(self) -> None:
        """Track objects created in the scope from here on, for release."""
        self._tracks = True

    def created(self, model: keras.Model) -> None:
        """Register a model that was created in the strategy's scope.

        It may be trained outside the scope, so its methods enter the scope
        themselves.
        """
        if self._tracks:
            self._created.add(model)
        model_binding.enter_scope_in_methods(model, self._config)
        if self._keeps or not self._tracks:
            model_binding.set_home(model, self._config)

    def compiled(self, model: keras.Model) -> None:
        """Register a model compiled in the scope, maybe to be trained later."""
        if model in self._models:
            # Its loop may go on, such as after a callback.
            self.claim(model)
            self.bind(model)
        if self._keeps and self._tracks and home_of(model) is None:
            self._compiled.add(model)

    def makes_once(self, variable: keras.Variable) -> bool:
        """Whether a variable that is created in the block exists once.

        In a scope() it is as TensorFlow has it. Once is enough in a custom
        loop, too: only optimizers write weights, on the sums of gradients, and
        what replicas add to one variable is the sum of what they would add to
        several. TensorFlow could take no gradient of its own copies outside of
        replicas, and rounds what it divides.
        """
        adds = variable.aggregation == "sum" and self._config.peers.size == 1
        return self._tracks and (variable.trainable or adds)

    def made_variable(self, variable: keras.Variable, once: bool) -> None:
        """Register a variable that was created in the scope, maybe ``once``."""
        if once and variable.trainable:
            self._update.copies.place(variable)
        if self._tracks:
            self._made_variables.append(weakref.ref(variable))

    def made_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Make an optimizer created in the scope reduce over the towers."""
        self._update.take_optimizer(optimizer)
        # Of those of a subclass, none is there yet.
        for variable in optimizer._variables:
            self._update.copies.hold_once(variable)

    def claim(self, model: keras.Model) -> None:
        """Bind a model, its optimizers and nested models to the strategy."""
        self.refuse_others(model)
        for optimizer in state_lib.collect(model).optimizers:
            self._update.place_optimizer(optimizer)
        for trainer in state_lib.trainers(model):
            # Each by itself, since a nested model may outlive the outer one.
            self._notes_of(trainer)
            model_binding.bind(trainer, self._config)

    def refuse_others(self, model: keras.Model) -> None:
        """Reject a model that is placed on another strategy."""
        self._compiled.discard(model)
        for trainer in state_lib.trainers(model):
            if home_of(trainer) is not self._config.strategy:
                model_binding.release_from_home(trainer)
            owner = home_of(trainer)
            if owner is not None and owner is not self._config.strategy:
                raise TowerError(
                    f"model {model.name!r} lives on another "
                    f"{another(owner, self._config.strategy)}. A model can be "
                    "on one strategy at a time: leave the other one's `with` "
                    "block first, or build the model outside of any scope."
                )

    def is_prepared(self, model: keras.Model, kind: str) -> bool:
        """Whether a method is prepared for the model's current compilation."""
        if model not in self._models:
            return False
        return self._models[model].known.get(kind) == _compilation(model)

    def mark_prepared(self, model: keras.Model, kind: str) -> None:
        """Record that a method of the model is prepared."""
        self._notes_of(model).known[kind] = _compilation(model)

    def made_function(self, model: keras.Model, name: str) -> bool:
        """Whether a call on the towers made the model's current function."""
        made = self._notes_of(model).functions.get(name, lambda: None)()
        return made is not None and made is getattr(model, name)

    def remember_function(self, model: keras.Model, name: str) -> None:
        """Record that a call on the towers made the model's function."""
        function = getattr(model, name)
        functions = self._notes_of(model).functions
        try:
            functions[name] = weakref.ref(function)  # It holds the model.
        except TypeError:  # One of the user's own may be of any type.
            functions[name] = lambda: function

    def _notes_of(self, model: keras.Model) -> _Notes:
        return self._models.setdefault(model, _Notes())

    def bind(self, model: keras.Model) -> bool:
        """Place a model's variables on the towers; return if any were new."""
        state = state_lib.collect(model)
        once = [*state.seeds, *state.metrics]
        moved = [
            *(self._update.copies.hold_once(v) for v in once),
            *(self._update.place(v) for v in state.weights),
        ]
        for optimizer in state.optimizers:
            self._update.place_optimizer(optimizer)
        if any(moved):
            for trainer in state_lib.trainers(model):
                model_binding.renew_functions(trainer)
        return any(moved)

    def synchronise(self, model: keras.Model, peers: Peers) -> None:
        """Broadcast weights, optimizer state and seeds from rank 0."""
        if peers.size > 1:
            rank_state.check_same(peers, held_in_common(model))
        if self._config.transport.size > 1:
            self._broadcast(model)

    def _broadcast(self, model: keras.Model) -> None:
        self.gather_slots()
        rank_state.broadcast(
            self._config.transport, [v._value for v in held_in_common(model)]
        )

    def begin_steps(self, model: keras.Model) -> None:
        """Prepare for steps of training."""
        # Steps that run as on one device update all weights.
        if not model.run_eagerly:
            self._update.drop_slots_of_others()

    def may_differ_between_ranks(self, variable: keras.Variable) -> bool:
        """Whether ranks may have values of their own until their next mean."""
        return self._update.rounds is not None

    def prepare_for_values_of_others(self) -> None:
        """Prepare for values of other ranks, also of slots."""
        self._update.gather_slots()

    def gather_slots(self) -> None:
        """Give every rank all of the optimizer's state, and equal weights."""
        self._update.end_rounds()
        self._update.gather_slots()

    def sum_metrics(self, model: keras.Model) -> None:
        """Sum what ranks have counted that train apart. Collective."""
        if self._update.rounds is not None:
            metrics = [v._value for v in state_lib.collect(model).metrics]
            sums = rank_state.sum_values(self._config.transport, metrics)
            for variable, total in zip(metrics, sums, strict=True):
                variable.assign(total)

    def end_rounds(self) -> None:
        """Make the weights of all ranks equal."""
        self._update.end_rounds()

    def broadcast(self, model: keras.Model) -> None:
        """Give all ranks the values of rank 0."""
        if self._config.transport.size > 1:
            self._broadcast(model)

    def release(self) -> None:
        """Make all models ordinary ones again."""
        models: list[keras.Model] = [*self._models, *self._created]
        # Memory may not suffice for one, which must not leave others half done.
        # The last comes first.
        with contextlib.ExitStack() as stack:
            stack.callback(self._forget)
            for model in self._compiled:
                stack.callback(model_binding.set_home, model, self._config)
            for made in self._made_variables:
                if (variable := made()) is not None:
                    stack.callback(self._release_variable, variable)
            for model in reversed(models):
                stack.callback(self.release_model, model)
            stack.callback(self._update.release)

    def _forget(self) -> None:
        self._models.clear()
        self._made_variables.clear()
        self._created = weakref.WeakSet()
        self._compiled = weakref.WeakSet()
        self._tracks = False

    def release_model(self, model: keras.Model) -> None:
        """Make one model an ordinary one again."""
        if home_of(model) is not self._config.strategy:
            return
        state = state_lib.collect(model)
        with contextlib.ExitStack() as stack:
            for trainer in state_lib.trainers(model):
                stack.callback(model_binding.unbind, trainer)
            for optimizer in state.optimizers:
                stack.callback(self._update.release_optimizer, optimizer)
            for variable in state.everything():
                stack.callback(self._release_variable, variable)

    def _release_variable(self, variable: keras.Variable) -> None:
        self._update.restore(variable)


def held_in_common(model: keras.Model) -> list[keras.Variable]:
    """Return all variables but those of metrics: equal on all ranks."""
    state = state_lib.collect(model)
    return [*state.seeds, *state.weights, *state.optimizer_variables]


def _compilation(model: keras.Model) -> tuple[Any, ...]:
    """A key that changes when the model is recompiled or built further."""
    parts = [
        getattr(model, name, None)
        for name in ("optimizer", "_compile_metrics", "_compile_loss")
    ]
    return tuple((id(part), getattr(part, "built", None)) for part in parts)
