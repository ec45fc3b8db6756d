"""Re-homing a model onto towers, and back."""

from __future__ import annotations

import weakref
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit import agreement, hooks, sharing, trainers
from keras_towers.fit import state as state_lib
from keras_towers.fit import variables as variables_lib


class Adoption:
    """The models that live on a strategy's towers.

    A model that was built outside gets copies of its variables on towers 1 to
    K - 1; its own ``tf.Variable``s are tower 0's. Optimizers stay where they
    are, on tower 0, unless every tower updates its own copy.

    Attributes:
        trained: whether towers may have written what they do not share since
            they were last made equal.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self._strategy = strategy
        self._trainers: list[trainers.Before] = []
        self._models: list[keras.Model] = []
        self._created: weakref.WeakSet[keras.Model] = weakref.WeakSet()
        self._bound: dict[int, keras.Variable] = {}
        self._shared = sharing.SharedWeights(strategy)
        self._known: dict[tuple[int, str], tuple[Any, ...]] = {}
        self._written: dict[tuple[int, bool], set[int]] = {}
        self.trained = False
        self._made_variables: list[weakref.ref] = []
        self._made_optimizers: list[weakref.ref] = []

    def created(self, model: keras.Model) -> None:
        """Remember a model that is made in the strategy's ``with`` block."""
        if self._strategy.entered:
            self._created.add(model)

    def made_variable(self, variable: keras.Variable) -> None:
        """Remember a variable that is made in the ``with`` block."""
        if self._strategy.entered:
            self._made_variables.append(weakref.ref(variable))

    def made_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Remember an optimizer that is made in the ``with`` block."""
        if self._strategy.entered:
            self._made_optimizers.append(weakref.ref(optimizer))

    def claim(self, model: keras.Model) -> None:
        """Make the strategy the one that ``model`` trains with.

        Raises:
            TowerError: the model lives on another strategy.
        """
        self.refuse_others(model)
        if not any(known is model for known in self._models):
            self._models.append(model)
        for optimizer in state_lib.collect(model).optimizers:
            optimizer._distribution_strategy = _default_strategy()
        for trainer in state_lib.trainers(model):
            if trainer._jit_compile:
                trainers.log_xla_once(trainer)
                self._trainers.append(
                    trainers.Before(
                        trainer, trainer._jit_compile, trainer._compile_config
                    )
                )
                trainer._jit_compile = False
            if trainer._distribute_strategy is not self._strategy:
                trainer._distribute_strategy = self._strategy
                trainers.drop_functions(trainer)
                hooks.hook(self._strategy, trainer)

    def refuse_others(self, model: keras.Model) -> None:
        """Refuse a model that lives on another strategy.

        Raises:
            TowerError: it does.
        """
        for trainer in state_lib.trainers(model):
            owner = trainer._distribute_strategy
            if owner is not None and owner is not self._strategy:
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
        seeds = {id(v) for v in state.seeds}
        metrics = {id(v) for v in state.metrics}
        variables = [*state.seeds, *state.weights, *state.metrics]
        if self._strategy.updates == "anytime":
            # There is one of each, written by whoever comes.
            variables = [*state.seeds, *state.metrics]
            for variable in state.weights:
                if isinstance(variable._value, compat.DistributedVariable):
                    variable._value = variables_lib.unbind(variable._value)
        bound = 0
        shares = self._strategy.updates == "shared"
        for variable in variables:
            if isinstance(variable._value, variables_lib.TowerVariable):
                continue
            special = id(variable) in metrics or id(variable) in seeds
            if shares and variable.trainable and not special:
                bound += self._shared.share(variable)
                continue
            if id(variable) in metrics:
                merge = variables_lib.SUM
            elif id(variable) in seeds:
                merge = variables_lib.STREAM
            elif variable._value.dtype.is_floating:
                merge = variables_lib.MEAN
            else:
                merge = variables_lib.FIRST
            self._bind(variable, merge)
            bound += 1
        for optimizer in state.optimizers:
            self.bind_optimizer(optimizer)
        for variable in state.synchronized:
            variable._value.same_on_all_towers = True
        if bound:
            for trainer in state_lib.trainers(model):
                trainers.renew_functions(trainer)
        return bound > 0

    def synchronise(self, model: keras.Model) -> None:
        """Give every rank the weights, optimizers and seeds of rank 0.

        Raises:
            TowerError: the ranks do not have the same variables.
        """
        transport = self._strategy.transport
        if transport.size > 1:
            agreement.check_same(transport, _shared(model))
            self._broadcast(model)

    def _broadcast(self, model: keras.Model) -> None:
        agreement.broadcast(
            self._strategy.transport, [v._value for v in _shared(model)]
        )

    def _bind(self, variable: keras.Variable, merge: str) -> None:
        value = variable._value
        if isinstance(value, compat.DistributedVariable):
            if value.distribute_strategy is not self._strategy:
                raise TowerError(
                    f"variable {variable.path!r} was made under another "
                    "strategy. Build the model outside of any scope, or inside "
                    "this one's."
                )
            # The copies of one that was made in this scope are in place, but
            # start equal where streams and sums have to differ.
            value = variables_lib.unbind(value)
        variable._value = variables_lib.spread(self._strategy, value, merge)
        self._bound[id(variable)] = variable

    def bind_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Put an optimizer's state where it is used: tower 0, or everywhere."""
        everywhere = self._strategy.updates == "each"
        for variable in optimizer.variables:
            value = variable._value
            if isinstance(value, variables_lib.TowerVariable):
                continue
            if everywhere:
                self._bind(variable, variables_lib.FIRST)
            elif isinstance(value, compat.DistributedVariable):
                variable._value = variables_lib.unbind(value)
        if self._strategy.updates == "shared" and optimizer.built:
            self._shared.share_slots(optimizer)

    def equalise(self) -> None:
        """Give all towers the mean of what each has written to itself.

        Moving statistics, that is: the optimizer's weights are equal anyhow.
        """
        transport = self._strategy.transport
        if transport.size == 1 or self.trained:
            agreement.average(
                transport, [v for v in self._averaged() if v.written_by_towers]
            )
        self.trained = False

    def hand_out(self, model: keras.Model) -> None:
        """Give all towers of all ranks what the first one has."""
        variables_lib.hand_out(
            [v for v in self._averaged() if not v.written_by_towers]
        )
        if self._strategy.transport.size > 1:
            self._broadcast(model)

    def _averaged(self) -> list[variables_lib.TowerVariable]:
        values = [variable._value for variable in self._bound.values()]
        return [
            value
            for value in values
            if isinstance(value, variables_lib.TowerVariable)
            and value.merge == variables_lib.MEAN
        ]

    def release(self) -> None:
        """Make every model on the towers an ordinary one, with its values."""
        for variable in self._bound.values():
            self._unbind(variable)
        self._bound.clear()
        self._shared.give_all_back()
        for model in {
            id(m): m for m in (*self._models, *self._created)
        }.values():
            self.release_model(model)
        self._models.clear()
        self._known.clear()
        self._written.clear()
        for before in self._trainers:
            before.restore()
        self._trainers.clear()
        for made in self._made_variables:
            if (variable := made()) is not None:
                self._unbind(variable)
        for made in self._made_optimizers:
            if (optimizer := made()) is not None:
                optimizer._distribution_strategy = _default_strategy()
        self._made_variables.clear()
        self._made_optimizers.clear()
        self._created = weakref.WeakSet()

    def release_model(self, model: keras.Model) -> None:
        """Make one model an ordinary one: variables, optimizers, trainers."""
        if model._distribute_strategy is None:
            return
        state = state_lib.collect(model)
        for variable in state.everything():
            self._unbind(variable)
        default = _default_strategy()
        for optimizer in state.optimizers:
            optimizer._distribution_strategy = default
        for trainer in state_lib.trainers(model):
            trainer._distribute_strategy = None
            trainers.drop_functions(trainer)
            vars(trainer).pop("_eval_epoch_iterator", None)
            hooks.unhook(trainer)

    def _unbind(self, variable: keras.Variable) -> None:
        value = variable._value
        if self._shared.give_back(variable):
            return
        if (
            isinstance(value, compat.DistributedVariable)
            and value.distribute_strategy is self._strategy
        ):
            variable._value = variables_lib.unbind(value)


def _shared(model: keras.Model) -> list[keras.Variable]:
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


def _default_strategy() -> tf.distribute.Strategy:
    with compat.single_device_mode():
        return tf.distribute.get_strategy()
