"""Makes models fit into the memory of their devices, or refuses them.

Variables are checked before they are placed; a step is checked when it is
traced, before it runs. If either needs more than devices have, options that the
user has left out help: ``plan_search.py`` tries them, and
``memory_messages.py`` says so. ``partition/timeline/memory_estimate.py``
estimates the memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit.components import TRAINING, KerasStrategy, TowerConfig
from keras_towers.fit.options import Shards, free_shards
from keras_towers.fit.places import ALONE
from keras_towers.fit.step.graph.step_layout import (
    StepLayout,
    StepSettings,
    with_timeline,
)
from keras_towers.fit.step.plan import memory_messages
from keras_towers.fit.step.plan.dry_run import (
    Needs,
    PlacedModel,
    dry_run,
    lay_out_dry,
)
from keras_towers.fit.step.plan.memory_limit import MARGIN, Limit
from keras_towers.fit.step.plan.plan_search import PlanSearch, Room, Tried
from keras_towers.fit.step.reports import step_reports
from keras_towers.fit.weights.copies import bytes_on
from keras_towers.fit.weights.least_loaded import byte_size
from keras_towers.fit.weights.model_state import collect
from keras_towers.foundation.byte_sizes import format_bytes
from keras_towers.foundation.errors import TowerError, shorten
from keras_towers.foundation.notices import (
    announce,
    first_time,
    logger,
    silence,
)
from keras_towers.foundation.object_types import Structure
from keras_towers.jobs.rendezvous.rank_checks import Peers
from keras_towers.transport.absent_ranks import AbsentRanks

# If variables take this part of the memory, their slots fit, too.
_ROOM = 16
# The part of its weights that a tower gathers at a time, the bytes that are not
# worth a limit, and those that suffice for any model.
_GATHERED_PART = 4
_LEAST_GATHERED, _MOST_GATHERED = 2**24, 2**29


class DoesNotFit(TowerError):
    """Raised on all ranks if a model does not fit into their devices."""


class DeviceMemory:
    """The memory of devices, and how models are made to fit into it.

    Args:
        config: the towers.
    """

    def __init__(self, config: TowerConfig):
        self._config = config
        self._limit: Limit | None = None
        # What devices hold of each model, by whether it trains, and by the
        # option that divides its variables.
        self._held: weakref.WeakKeyDictionary[
            keras.Model, dict[tuple[bool, Shards | None], Needs]
        ]
        self._held = weakref.WeakKeyDictionary()
        # The bytes that a step needs as it is, by the model and the method.
        self._whole: weakref.WeakKeyDictionary[keras.Model, dict[str, int]]
        self._whole = weakref.WeakKeyDictionary()
        # The method of Keras for which variables of a model were divided.
        self._divided_for: weakref.WeakKeyDictionary[keras.Model, str]
        self._divided_for = weakref.WeakKeyDictionary()
        self._refuses = True
        # Whether steps of one device do not fit, by their batches.
        self._exceeding: weakref.WeakKeyDictionary[keras.Model, dict[str, bool]]
        self._exceeding = weakref.WeakKeyDictionary()

    def check_variables(
        self,
        model: keras.Model,
        kind: str,
        peers: Peers,
        is_placed: bool = False,
    ) -> None:
        """Divide variables that do not fit, or refuse them. Collective.

        Args:
            model: the built model, before its variables are placed.
            kind: the method of Keras that needs it.
            peers: the ranks that call it.
            is_placed: whether they have been placed for it before, or cannot
                be yet, since this rank could not build the model.

        Raises:
            DoesNotFit: they do not fit, on all ranks.
        """
        self._limit = limit = self._find_limit(peers, model)
        if limit is None or is_placed:
            return
        if _ROOM * sum(map(byte_size, model.variables)) <= limit.size:
            # Planning takes time, and there is room for any optimizer.
            return
        ranks = self._config.places(kind).ranks.batch.size
        best: tuple[Shards | None, Needs] | None = None
        for shards in self._choices():
            needs = self._held_by(shards, model, kind, ranks)
            if best is None or needs.held < best[1].held:
                best = shards, needs
            if needs.held <= limit.room:
                break
        assert best is not None, "no choice"
        chosen, needs = best
        self._compare(model, kind, needs)
        if chosen != self._now:
            assert chosen is not None
            self._divided_for[model] = kind
            self._own._divide(chosen)

    @property
    def _own(self) -> KerasStrategy:
        """The strategy."""
        own = self._config.strategy
        assert isinstance(own, KerasStrategy), own
        return own

    @property
    def _now(self) -> Shards | None:
        """The option by which variables are divided now."""
        shards: Shards | None = self._own._update.sharding.shards
        return shards

    def _choices(self) -> Sequence[Shards | None]:
        """Return how variables may be divided, as they are now first."""
        choices: list[Shards | None] = [None]
        if self._config.num_towers * self._config.shards.size > 1:
            choices += free_shards(self._config.options)
        now = self._now
        return choices[choices.index(now) :] if now in choices else [now]

    def _held_by(
        self, shards: Shards | None, model: keras.Model, kind: str, ranks: int
    ) -> Needs:
        """Return what devices hold of a model if an option divides it."""
        config, known = self._config, self._held.setdefault(model, {})
        state, trains = collect(model), kind in TRAINING
        is_there = shards == self._now and self._own._adoption.has_placed(model)
        if is_there and (not trains or all(o.built for o in state.optimizers)):
            return PlacedModel(config, model).held(ranks)
        key = trains, shards
        if key not in known:
            with _dry_run(config, model, ranks) as strategy:
                if shards in free_shards(config.options):
                    strategy._divide(shards)
                strategy._runner.plan_variables(model, kind)
                known[key] = PlacedModel(strategy._config, model).held(ranks)
        return known[key]

    def _find_limit(
        self, peers: Peers, model: keras.Model | None = None
    ) -> Limit | None:
        # Where weights are elsewhere, or towers train alone, plans do not hold.
        if not self._own._follows_options:
            return None
        return Limit.of(self._config, peers, self._held_of_others(model))

    def _held_of_others(self, model: keras.Model | None) -> Mapping[str, int]:
        """Return the bytes that devices hold of other models than one."""
        if model is None:
            return {}
        own = {*map(id, collect(model).everything())}
        bound = self._own._adoption.stages.bound
        variables = [
            variable
            for other in bound
            for variable in collect(other).everything()
            if id(variable) not in own
        ]
        return bytes_on(self._config.mesh, variables)

    def assume(self, size: int, device: str) -> None:
        """Plan for some memory, and take the smallest plan if none fits.

        Args:
            size: the bytes of a device.
            device: what messages call it.
        """
        self._limit, self._refuses = Limit(size, device, None), False

    @property
    def has_limit(self) -> bool:
        """Whether a call has found that the memory of devices is known."""
        return self._limit is not None

    @functools.cached_property
    def own_limit(self) -> Limit | None:
        """The memory of this process's devices; None: unknown."""
        return self._find_limit(ALONE)

    def exceeds(
        self,
        model: keras.Model,
        kind: str,
        batch: Structure,
        examples: int | None,
    ) -> bool:
        """Whether the planned step of plain Keras does not fit into its device.

        Args:
            model: the model.
            kind: the method of Keras that the step belongs to.
            batch: the specs of a batch.
            examples: the number of examples of a batch; None: unknown.
        """
        config, limit = self._config, self.own_limit
        examples = _known_examples(batch, examples)
        if limit is None or examples is None:
            return False
        known = self._exceeding.setdefault(model, {})
        key = f"{examples} {batch}"
        if key not in known:
            known[key] = False
            specs = tf.nest.map_structure(
                lambda s: (
                    tf.TensorSpec([examples, *s.shape[1:]], s.dtype)
                    if s.shape.rank
                    else s
                ),
                batch,
            )
            try:
                with _dry_run(config, model, 1) as strategy:
                    needs = lay_out_dry(
                        strategy, model, specs, examples, kind
                    ).needs(examples, 1)
            except Exception as error:
                # Keras has the error of a step that cannot be traced.
                logger.debug("no plan of a step: %s", shorten(error))
            else:
                known[key] = (needs.total or 0) > limit.room
        return known[key]

    def plan(
        self,
        lay_out: Callable[[StepSettings, StepLayout | None], StepLayout],
        settings: StepSettings,
        batch: Structure,
    ) -> StepLayout | None:
        """Lay out a step, and plan it within the memory of a device.

        Ranks that share a step decide alike.

        Args:
            lay_out: lays the step out, given a layout for fewer micro-batches.
            settings: what it is traced for; the micro-batches are the fewest.
            batch: the specs of its batch.

        Returns:
            The layout; None: variables have been divided further, so the step
            has to be traced again.

        Raises:
            DoesNotFit: it does not fit beside the variables, however.
        """
        config, model, kind = self._config, settings.model, settings.kind
        places = settings.places
        ranks = places.ranks.batch.size
        examples = _known_examples(batch, settings.examples)
        is_free = config.options.micro_batches is None
        if self._limit and is_free and examples and settings.rows is None:
            rows = -(-examples // (places.towers * ranks))
            settings = dataclasses.replace(settings, rows=rows)
        room = self._room_for(settings, examples)
        schedule = functools.partial(with_timeline, config)
        search = PlanSearch(config.options, settings, room, lay_out, schedule)
        found = search.best()
        layout, plan = found.layout, found.plan
        whole = self._whole.setdefault(model, {})
        if room.is_known and self._now not in free_shards(config.options):
            whole.setdefault(kind, search.needed)
        if plan.shards != self._now:
            assert settings.divide is not None and plan.shards is not None
            self._divided_for[model] = kind
            settings.divide(plan.shards)
            return None
        if plan.total > room.size:
            held = PlacedModel(config, model).held(ranks)
            needs = dataclasses.replace(held, step=plan.bytes)
            # XLA keeps less than the estimate.
            self._compare(model, kind, needs, settings.xla)
        how = self._how(found, whole.get(kind), search.next_cheaper(found))
        step_reports.record_costs(
            config,
            kind,
            model,
            layout.scheduled,
            layout.settings.places,
            how,
        )
        return layout

    def _room_for(self, settings: StepSettings, examples: int | None) -> Room:
        """Return what devices have for a step, and what they hold besides."""
        config, model, limit = self._config, settings.model, self._limit
        ranks = settings.places.ranks.batch.size
        gather_bytes = _gather_bytes_for(config, settings)
        is_known = limit is not None and examples is not None
        may_fail = settings.repeats or settings.failed is not None
        if not (is_known or may_fail):
            return Room(choices=[self._now], gather_bytes=gather_bytes)
        placed = PlacedModel(config, model)

        @functools.cache
        def held_by(shards: Shards | None) -> Needs:
            if shards == self._now:
                return placed.held(ranks)
            return self._held_by(shards, model, settings.kind, ranks)

        return Room(
            limit.room if limit and is_known else math.inf,
            self._choices() if settings.divide else [self._now],
            held_by,
            max(map(byte_size, model.weights), default=0),
            gather_bytes,
        )

    def _how(
        self, found: Tried, whole: int | None, cheaper: Tried | None
    ) -> str:
        """Return, and announce once, how a step is made to fit into memory.

        Args:
            found: its plan.
            whole: as for ``how_it_fits``.
            cheaper: as for ``how_it_fits``.
        """
        settings, plan = found.layout.settings, found.plan
        model, kind = settings.model, settings.kind
        how = memory_messages.how_it_fits(
            found,
            self._config.options,
            self._divided_for.get(model) == kind,
            "memory has run out" if settings.failed else str(self._limit),
            whole,
            cheaper,
        )
        is_first = settings.places.ranks.job.rank == 0
        if how and is_first and first_time(model, (kind, plan)):
            announce(f"{kind} of model {model.name!r} {how}")
        return how

    def _compare(
        self, model: keras.Model, kind: str, needs: Needs, may_fit: bool = False
    ) -> None:
        """Refuse a step that does not fit; warn once of one that may not.

        Args:
            model: the model.
            kind: the method of Keras.
            needs: what devices need for it.
            may_fit: whether it may fit all the same.

        Raises:
            DoesNotFit: it does not fit.
        """
        limit = self._limit
        assert limit is not None, "nothing to compare with"
        own = needs.held + (needs.step or 0)
        if own <= limit.room or not self._refuses:
            return
        total = own + limit.others
        may_fit = may_fit or total <= limit.size * (1 + MARGIN)
        does = "may" if may_fit else "does"
        text = (
            f"{kind} of model {model.name!r} {does} not fit into memory: "
            f"{memory_messages.needed(needs, limit, may_fit)}"
        )
        if not may_fit:
            least = format_bytes(total - limit.size)
            advice = memory_messages.advice(self._config.options, needs, limit)
            raise DoesNotFit(f"{text}, which is {least} too much. {advice}")
        if first_time(model, ("memory", kind)):
            logger.warning("%s", text)


def _gather_bytes_for(config: TowerConfig, settings: StepSettings) -> int:
    """Return the bytes of gathered weights at a time, as options say."""
    number = config.options.gathered_bytes
    if number is not None:
        return number
    whole = sum(map(byte_size, settings.model.weights))
    return min(max(_LEAST_GATHERED, whole // _GATHERED_PART), _MOST_GATHERED)


def _known_examples(spec: Structure, examples: int | None) -> int | None:
    """Return the number of examples if all other sizes are known."""
    leaves = [s for s in tf.nest.flatten(spec) if s is not None]
    if not all(isinstance(leaf, tf.TensorSpec) for leaf in leaves):
        return None
    if any(leaf.shape.rank is None for leaf in leaves):
        return None
    rows = {leaf.shape[0] for leaf in leaves if leaf.shape.rank}
    if any(None in leaf.shape[1:] for leaf in leaves if leaf.shape.rank):
        return None
    static = rows - {None}
    return examples or (static.pop() if len(static) == 1 else None)


@contextlib.contextmanager
def _dry_run(
    config: TowerConfig, model: keras.Model, ranks: int
) -> Iterator[KerasStrategy]:
    """Let a strategy like the given one place a model, to plan with.

    Args:
        config: the towers.
        model: the model.
        ranks: the number of ranks that share a batch.
    """
    own: Any = config.strategy
    make = functools.partial(own._for_dry_run, AbsentRanks(ranks))
    with silence(), dry_run(model, make, builds=False) as strategy:
        yield strategy
