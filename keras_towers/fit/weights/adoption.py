"""Adoption: places models on towers, and releases them again.

``fit/calls/tower_call.py`` claims a model and places its variables
(``tower_variables.py``) before the first step. The end of a block releases it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_towers.fit.components import (
    TowerConfig,
    strategy_of,
    words_for_another,
)
from keras_towers.fit.options import free_shards
from keras_towers.fit.weights import agreement, model_state as state_lib
from keras_towers.fit.weights.copies import bytes_on
from keras_towers.fit.weights.model_binding import (
    ModelStage,
    ModelStages,
    PreparedMethods,
    defaults,
    drop_functions,
    release_from_default,
    renew_functions,
    unbind,
)
from keras_towers.fit.weights.shards import choose_layout, spans_ranks
from keras_towers.fit.weights.without_memory import (
    DeferredVariable,
    is_deferred,
    is_repeatable,
)
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Variable
from keras_towers.jobs.rendezvous import failed_calls, rank_checks
from keras_towers.jobs.rendezvous.rank_checks import Peers
from keras_towers.reduction.rank_sum import sum_over_ranks
from keras_towers.transport.devices import memory_of

if TYPE_CHECKING:
    from keras_towers.fit.update.weight_update import WeightUpdate

# New weights are whole until they take this part of a device's memory.
_WHOLE_PART = 8


class Adoption:
    """The models that are placed on a strategy's towers.

    The update places weights and optimizers; other variables get a single copy.
    Models created in a block also train on its towers after it, if ``keeps`` is
    set for them.

    Attributes:
        stages: where each model is on its way through the strategy.
        prepared: which methods of each model are prepared for calls.
        in_block: whether a block is open, which ``release`` ends.
    """

    def __init__(
        self, config: TowerConfig, update: WeightUpdate, keeps: bool = True
    ):
        self._config = config
        self._keeps = keeps
        self.update = update
        self.stages: ModelStages = ModelStages()
        self.prepared: PreparedMethods = PreparedMethods()
        # Variables that the user's own loops may train; ranks have not compared
        # them yet.
        self._new: list[weakref.ref[Variable]] = []
        # In the block, or in the previous one.
        self._held: dict[str, Mapping[str, int]] = {}
        self.in_block: bool = False
        # Of the weights that were made in the block.
        self._made_bytes = 0
        self._failed = failed_calls.calls.failed

    @property
    def models(self) -> list[keras.Model]:
        """The models on the towers, and those created in the block."""
        return [*self.stages.bound, *self.stages.at(ModelStage.CREATED)]

    def has_placed(self, model: keras.Model) -> bool:
        """Whether a model's variables are on the towers."""
        return self.stages.of(model) in (ModelStage.PLACED, ModelStage.APART)

    def register_created(self, model: keras.Model) -> None:
        """Register a model that was created in the strategy's scope."""
        if self.in_block and self.stages.of(model) is ModelStage.FREE:
            self.stages.move(model, ModelStage.CREATED)
        if self._keeps or not self.in_block:
            defaults[model] = self._config.strategy

    def register_compiled(self, model: keras.Model) -> None:
        """Register a model compiled in the scope, maybe to be trained later."""
        stage, keeps = self.stages.of(model), self._keeps and self.in_block
        if stage.is_bound:
            # A running loop may continue, for example after a callback.
            self.claim(model)
            self.bind(model)
        elif stage is ModelStage.FREE and keeps and strategy_of(model) is None:
            self.stages.move(model, ModelStage.COMPILED)

    @contextlib.contextmanager
    def registering_variable(self, variable: keras.Variable) -> Iterator[None]:
        """Register a variable whose value is created in this block.

        In a ``scope()`` TensorFlow creates its own copies. In the strategy's
        block a single copy is enough, even in a custom loop: only optimizers
        write weights, with sums of gradients, and replicas can add to one
        variable instead of several. With TensorFlow's copies, gradients could
        not be computed outside of replicas, and divided values would be
        rounded.
        """
        adds = variable.aggregation == "sum" and self._config.job.size == 1
        once = self.in_block and (variable.trainable or adds)
        once = once and tf.distribute.in_cross_replica_context()
        creates = compat.parts_of_sums(variable)
        is_divided = once and self.update.sharding.divide_new(variable)
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                compat.single_device_mode() if once else creates
            )
            if is_divided:
                # A device may be too small for the whole.
                stack.enter_context(tf.device(compat.HOST))
            yield
        if once and variable.trainable and not is_deferred(variable):
            self.update.place_created(variable)
        if once and not is_divided:
            self.note_created(variable)
        if self.in_block:
            # It is to be put back, whatever model has it.
            self.update.variables.register(variable)

    def note_created(self, variable: Variable) -> None:
        """Note a variable that replicas of all ranks may use."""
        # Replicas have parts of those that are summed when they are read.
        is_read = isinstance(variable, compat.SyncOnReadVariable)
        if self._config.transport.size > 1 and not is_read:
            self._new.append(weakref.ref(variable))

    def share_created(self) -> None:
        """Give all ranks rank 0's values of new variables. Collective."""
        if self._new:
            # Ranks may have collected unused variables at different times.
            gc.collect()
        new = [v for v in (named() for named in self._new) if v is not None]
        self._new.clear()
        if new:
            self.agree_on_values(self._config.job, new)

    def defer(
        self, variable: keras.Variable, initializer: Any
    ) -> DeferredVariable | None:
        """Return the first value of a weight that will be, or may be, divided.

        Ranks divide it once they have agreed on it, and until then none holds
        the whole. Where memory is short, a plan of the first step decides.

        Args:
            variable: the weight, which has no value yet.
            initializer: returns its first value, given a shape and a dtype.

        Returns:
            None: its value is to be made at once.
        """
        sharding, in_block = self.update.sharding, self.in_block
        if not (in_block and tf.distribute.in_cross_replica_context()):
            return None
        awaits_plan = self._awaits_plan(variable)
        if not is_repeatable(initializer):
            return None
        if sharding.divides_over_ranks and sharding.divide_new(variable):
            return DeferredVariable(variable, initializer)
        if awaits_plan:
            device = self._config.devices[0]
            return DeferredVariable(variable, initializer, device)
        return None

    def _awaits_plan(self, variable: keras.Variable) -> bool:
        """Whether a new weight may have to be divided, as far as is known.

        The weights that were made first, up to a part of a device's memory, are
        whole in any case.
        """
        config, shape = self._config, variable._shape
        strategy: Any = config.strategy
        free = strategy._follows_options and variable.trainable
        free = free and "weights" in free_shards(config.options)
        limit = self._memory if free else None
        if limit is None or shape is None or self.update.sharding.divide_any:
            return False
        item_bytes = tf.as_dtype(variable.dtype).size
        self._made_bytes += item_bytes * math.prod(shape)
        towers = config.num_towers * config.shards.size
        divides = choose_layout(shape, item_bytes, towers).divides
        return divides and self._made_bytes > limit / _WHOLE_PART

    @functools.cached_property
    def _memory(self) -> int | None:
        """The bytes of the smallest of this process's devices, if known."""
        mesh = [*itertools.chain(*self._config.mesh)]
        return min(filter(None, memory_of(mesh)), default=None)

    def defer_in_step(
        self, variable: keras.Variable, initializer: Any
    ) -> DeferredVariable | None:
        """Return the first value of a weight that a step makes, to be divided.

        It takes no memory in the trace that makes it, which never runs. See
        ``defer``.
        """
        divides = self.update.sharding.divide_new(variable)
        defers = divides and is_repeatable(initializer)
        return DeferredVariable(variable, initializer) if defers else None

    def claim(self, model: keras.Model) -> None:
        """Bind a model, its optimizers and nested models to the strategy."""
        self.refuse_others(model)
        if self._failed != failed_calls.calls.failed:
            # In a call that has failed ranks may have come differently far.
            self._failed = failed_calls.calls.failed
            for known in self.stages.bound:
                drop_functions(known)
        self._renew(self._place_optimizers(model))
        for trainer in state_lib.models_in(model):
            # Each by itself: a nested model may outlive the outer one.
            if not self.stages.of(trainer).is_bound:
                self.stages.move(trainer, ModelStage.CLAIMED)
            strategy = self._config.strategy
            if strategy_of(trainer) is not strategy:
                trainer._distribute_strategy = strategy
                drop_functions(trainer)

    def refuse_others(self, model: keras.Model) -> None:
        """Reject a model that is placed on another strategy."""
        for trainer in state_lib.models_in(model):
            if strategy_of(trainer) is not self._config.strategy:
                release_from_default(trainer)
            owner = strategy_of(trainer)
            if owner is not None and owner is not self._config.strategy:
                raise TowerError(
                    f"model {model.name!r} lives on another "
                    f"{words_for_another(owner, self._config.strategy)}. A "
                    "model can be on one strategy at a time: first leave the "
                    "other one's `with` block, or build the model outside "
                    "of any scope."
                )

    def bind(
        self,
        model: keras.Model,
        placed: Sequence[keras.Variable] = (),
        renews: bool = True,
        but: str = "",
    ) -> bool:
        """Place a model's variables on the towers; return if any were new.

        Args:
            model: the model.
            placed: those of its weights that were placed just now.
            renews: whether functions that have used them are made again.
            but: the name of the model's function that is being traced.
        """
        state = state_lib.collect(model)
        hold_once, place = self.update.variables.hold_once, self.update.place
        moved = [*placed]
        moved += [v for v in (*state.seeds, *state.metrics) if hold_once(v)]
        moved += [v for v in state.weights if place(v)]
        if renews:
            moved += self._place_optimizers(model)
            self._renew(moved, (model, but))
        else:
            self._place_optimizers(model)
        if self.stages.of(model) is ModelStage.CLAIMED:
            self.stages.move(model, ModelStage.PLACED)
        return bool(moved)

    def _place_optimizers(self, model: keras.Model) -> list[keras.Variable]:
        """Place the variables of a model's optimizers; return those moved."""
        optimizers = state_lib.collect(model).optimizers
        moved = map(self.update.place_optimizer, optimizers)
        return [*itertools.chain.from_iterable(moved)]

    def _renew(
        self,
        moved: Sequence[keras.Variable],
        but: tuple[keras.Model | None, str] = (None, ""),
    ) -> None:
        """Make functions again that may use what variables were before.

        Args:
            moved: the variables.
            but: the model and the name of the function that is being traced.
        """
        changed = {*map(id, moved)}
        for model in self.stages.bound if moved else ():
            used = state_lib.collect(model).everything()
            # A nested model may have been placed before, and may train.
            if not changed.isdisjoint(map(id, used)):
                renew_functions(model, but[1] if model is but[0] else "")

    def synchronize(
        self,
        model: keras.Model,
        peers: Peers,
        trains: bool,
    ) -> None:
        """Give all ranks rank 0's weights and seeds. Collective.

        Args:
            model: the model.
            peers: the ranks.
            trains: whether they need the state of its optimizers, too.
        """
        if peers.size == 1:
            return
        variables = state_lib.shared_variables(model, optimizers=trains)
        if trains:
            self.end_rounds()
        self.agree_on_values(peers, variables)

    def agree_on_values(
        self, peers: Peers, variables: Sequence[Variable]
    ) -> None:
        """Compare variables, and give all ranks rank 0's values. Collective.

        Args:
            peers: the ranks.
            variables: the variables, in the order of the model.
        """
        differing = self.compare(peers, variables)
        if differing:
            agreement.broadcast(self._config.transport, differing)

    def compare(self, peers: Peers, variables: Sequence[Variable]) -> list[Any]:
        """Return the variables whose values differ from rank 0's. Collective.

        Args:
            peers: the ranks.
            variables: the variables, in the order of the model.
        """
        # Sending takes long on a slow link, and most values agree already.
        sends = self._config.transport.size > 1
        return agreement.compare_variables(peers, variables, sends)

    def agree_on_wholes(
        self,
        model: keras.Model,
        peers: Peers,
        trains: bool,
    ) -> list[keras.Variable]:
        """Give all ranks rank 0's values before they divide them. Collective.

        Each rank then keeps its rows only, and no rank has to hold a whole
        until it gets rank 0's.

        Args:
            model: the model.
            peers: the ranks.
            trains: whether they divide the slots of its optimizer, too.

        Returns:
            The weights that are divided already.
        """
        sharding = self.update.sharding
        if peers.size == 1 or not sharding.divides_over_ranks:
            return []
        state = state_lib.collect(model)
        optimizers = state.optimizers if trains else []
        built = [bool(optimizer.built) for optimizer in optimizers]
        known = self.update.variables.access.known
        ranks = rank_checks.gather(
            peers,
            (known.agreements, known.unused(), built),
            "agrees on what ranks divide",
        )
        known.agreements = 1 + max(number for number, _, _ in ranks)
        known.forget(set.intersection(*({*unused} for _, unused, _ in ranks)))
        weights = [*state.seeds, *state.weights]
        differing = self.compare(peers, weights)
        self.update.variables.name_weights(weights)
        # A weight that no rank holds must not become whole here.
        deferred = [
            weight
            for weight in differing
            if peers.rank and isinstance(weight._value, DeferredVariable)
        ]
        placed = [weight for weight in deferred if self.update.place(weight)]
        if differing:
            agreement.broadcast(self._config.transport, differing)
        if not any(itertools.chain(*(of_rank for _, _, of_rank in ranks))):
            return placed
        own, trained = model.optimizer, model.trainable_variables
        if state_lib.has_keras_step(model) and not own.built:
            # Another rank has restored it, say.
            if peers.rank == 0:
                self.update.build_whole(own, trained)
            else:
                self.update.make_ready(own, trained)
        self.agree_on_values(peers, state.optimizer_variables)
        self.update.variables.name_slots(optimizers)
        return placed

    def begin_steps(self, model: keras.Model) -> None:
        """Prepare for steps of training."""
        if state_lib.runs_eagerly(model):
            return
        # A model that its first step places begins again after that.
        is_placed = self.stages.of(model) is ModelStage.PLACED
        if is_placed and self._config.transport.size > 1:
            self.stages.move(model, ModelStage.APART)

    def ranks_diverge(self, model: keras.Model) -> bool:
        """Whether a model's ranks train on their own until the next average."""
        # Each rank runs an eager step on the batch of all ranks.
        in_rounds = self.update.local_sgd is not None
        return in_rounds and not state_lib.runs_eagerly(model)

    def are_apart(self, model: keras.Model) -> bool:
        """Whether ranks have trained a model on their own since an average."""
        is_apart = self.stages.of(model) is ModelStage.APART
        return is_apart and self.ranks_diverge(model)

    def end_rounds(self) -> None:
        """Give every rank equal weights. Collective."""
        self.update.end_rounds()
        for model in self.stages.at(ModelStage.APART):
            self.stages.move(model, ModelStage.PLACED)

    def sum_metrics(self, model: keras.Model) -> None:
        """Sum the metrics of ranks that train independently. Collective."""
        if self.ranks_diverge(model):
            metrics = [v._value for v in state_lib.collect(model).metrics]
            values = [variable.read_value() for variable in metrics]
            sums = sum_over_ranks(self._config.transport, values)
            for variable, total in zip(metrics, sums, strict=True):
                variable.assign(total)

    def leave_metrics_to_rank_0(self, model: keras.Model) -> None:
        """Reset metrics on all ranks but rank 0, which keeps the ranks' sums.

        Ranks that train independently sum their metrics again later.
        """
        if self.ranks_diverge(model) and self._config.job.rank > 0:
            for variable in state_lib.collect(model).metrics:
                variable.assign(tf.zeros_like(variable._value))

    def broadcast(self, model: keras.Model) -> None:
        """Give all ranks the weights, optimizer state and seeds of rank 0.

        Variables in shards over the ranks are left out: ranks have them
        together.
        """
        transport = self._config.transport
        if transport.size > 1:
            self.end_rounds()
            shared = state_lib.shared_variables(model)
            whole = [v for v in shared if not spans_ranks(v)]
            self.agree_on_values(transport, whole)

    def held_bytes(self) -> dict[str, Mapping[str, int]]:
        """Return the bytes of all models' variables on each device, by kind.

        They are those in this block or, after it, in the last one.
        """
        states = [state_lib.collect(model) for model in self.stages.bound]
        if not states:
            return self._held
        weights = [v for state in states for v in state.weights]
        slots = [v for state in states for v in state.optimizer_variables]
        mesh = self._config.mesh
        return {
            "weights": bytes_on(mesh, weights),
            "optimizer state": bytes_on(mesh, slots),
        }

    def describe_held(self) -> list[str]:
        """Describe the bytes of all models' variables on each device."""
        lines = []
        for kind, by_device in self.held_bytes().items():
            parts = [f"{n:,} bytes on {d}" for d, n in by_device.items() if n]
            lines += [f"{kind}: {', '.join(parts)}"] if parts else []
        return lines

    def release(self, asks_ranks: bool = True) -> None:
        """Turn all models into ordinary ones.

        Args:
            asks_ranks: as for ``TowerVariables.restore``.
        """
        models = self.models
        # If one model does not fit in memory, the rest must still be released.
        # The stack runs in reverse order.
        with contextlib.ExitStack() as stack:
            stack.callback(self._forget)
            for model in self.stages.at(ModelStage.COMPILED):
                strategy = self._config.strategy
                stack.callback(defaults.__setitem__, model, strategy)
            for model in reversed(models):
                stack.callback(self.release_model, model, asks_ranks)
            stack.callback(self.update.release, asks_ranks)
            stack.callback(self._note_held)

    def _note_held(self) -> None:
        self._held = self.held_bytes()

    def _forget(self) -> None:
        self.stages.free_all()
        self.prepared.clear()
        self.in_block = False

    def release_model(
        self, model: keras.Model, asks_ranks: bool = True
    ) -> None:
        """Turn a model into an ordinary one; see ``release``."""
        if self.stages.of(model) is ModelStage.COMPILED:
            self.stages.move(model, ModelStage.FREE)
        if strategy_of(model) is not self._config.strategy:
            return
        state = state_lib.collect(model)
        with contextlib.ExitStack() as stack:
            for trainer in state_lib.models_in(model):
                # It is to be claimed and compared again when it is used again.
                stack.callback(self.prepared.forget, trainer)
                stack.callback(self.stages.move, trainer, ModelStage.FREE)
                stack.callback(unbind, trainer)
            for variable in state.everything():
                restore = self.update.variables.restore
                stack.callback(restore, variable, asks_ranks)
