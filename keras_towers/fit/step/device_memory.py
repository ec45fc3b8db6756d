"""Whether a model fits into the memory of its devices, before its first step.

What devices hold is compared before variables are placed, and what a step adds
to it when it is traced, before it runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers._bytes import format_bytes
from keras_towers._notices import announce, first_time, silence
from keras_towers._types import Structure
from keras_towers.devices import memory_of, short_name
from keras_towers.errors import TowerError, shorten
from keras_towers.fit.components import TRAINING, KerasStrategy, TowerConfig
from keras_towers.fit.data.batches import Leaf
from keras_towers.fit.places import ALONE
from keras_towers.fit.step.planned_step import (
    LaidOutStep,
    Needs,
    PlacedModel,
    PlannedRanks,
    lay_out_planned,
    planning,
)
from keras_towers.fit.step.step_layout import (
    MemoryPlan,
    StepLayout,
    StepSettings,
    scheduled,
)
from keras_towers.fit.weights.least_loaded import byte_size
from keras_towers.partition.schedule import KEEP_ALL, RematLimits
from keras_towers.rendezvous import rank_checks
from keras_towers.rendezvous.rank_checks import Peers
from keras_towers.settings import ENV_DEVICE_MEMORY

logger = logging.getLogger("keras_towers")

# How many times less a step is to need once memory has run out.
_SHRINKS = 2
# Estimates that are wrong by less stop nothing.
_MARGIN = 0.1
# Of variables that take this part of the memory, slots fit, too.
_ROOM = 16
# How many times as many devices are planned; of those whose memory has room
# for the variables, so many.
_TIMES = 2, 4, 8, 32, 128, 512
_MOST_TRIES = 2


class DoesNotFit(TowerError):
    """A model that all ranks have refused, for the memory of their devices."""


@dataclasses.dataclass(frozen=True)
class Limit:
    """The smallest memory of the devices of all ranks.

    Attributes:
        size: its bytes.
        device: the name of the device.
        rank: its rank, of several; None: there is one.
    """

    size: int
    device: str
    rank: int | None

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" of rank {self.rank}"
        return f"{self.device}{rank} has {format_bytes(self.size)}"

    @classmethod
    def of(cls, config: TowerConfig, peers: Peers) -> Limit | None:
        """Return that of the devices of all ranks; None: unknown. Collective.

        Args:
            config: the towers of this rank.
            peers: the ranks.
        """
        mesh = [*itertools.chain(*config.mesh)]
        sizes = zip(memory_of(mesh), map(short_name, mesh), strict=True)
        own = min(((n, name) for n, name in sizes if n), default=None)
        of_ranks = [own]
        if peers.size > 1:
            where = "compares the memory of its devices"
            of_ranks = rank_checks.gather(peers, own, where)
        known = [(n, rank) for rank, n in enumerate(of_ranks) if n]
        if not known:
            return None
        (size, device), rank = min(known)
        return cls(size, device, rank if peers.size > 1 else None)


class MemoryCheck:
    """Compares what a model needs with the memory of devices.

    Args:
        config: the towers.
    """

    def __init__(self, config: TowerConfig):
        self._config = config
        self._limit: Limit | None = None
        # What devices hold of models.
        self._held: weakref.WeakKeyDictionary[keras.Model, Needs]
        self._held = weakref.WeakKeyDictionary()
        # Whether steps of one device do not fit, by their batches.
        self._exceeding: weakref.WeakKeyDictionary[keras.Model, dict[str, bool]]
        self._exceeding = weakref.WeakKeyDictionary()

    def check_variables(
        self,
        model: keras.Model,
        kind: str,
        peers: Peers,
        is_placed: bool = False,
        batch: Structure = None,
        examples: int | None = None,
    ) -> None:
        """Refuse a built model whose variables do not fit. Collective.

        Args:
            model: the model, before its variables are placed.
            kind: the method of Keras that needs it.
            peers: the ranks that call it.
            is_placed: whether they have been placed for it before, or cannot
                be yet, since this rank could not build the model.
            batch: the specs of a batch, or one; None: unknown.
            examples: the number of examples of a batch; None: unknown.

        Raises:
            DoesNotFit: they do not fit, on all ranks.
        """
        config, own = self._config, self._config.strategy
        assert isinstance(own, KerasStrategy), own
        # Where weights are elsewhere, or towers train alone, plans do not hold.
        limit = Limit.of(config, peers) if own._follows_options else None
        self._limit = limit
        if limit is None or is_placed:
            return
        batch = None if batch is None else tf.nest.map_structure(_spec, batch)
        examples = _known_examples(batch, examples)
        planner = _Planner(config, model, kind, batch, examples)
        if _ROOM * sum(map(byte_size, model.variables)) <= limit.size:
            # Planning takes time, and there is room for any optimizer.
            return
        needs = planner.variables_of({})
        self._held[model] = needs
        if needs.held > limit.size * (1 + _MARGIN):
            raise DoesNotFit(_describe(planner, needs, limit))
        if needs.held > limit.size * (1 - _MARGIN):
            _warn(planner, needs, limit)

    @functools.cached_property
    def is_limited(self) -> bool:
        """Whether the memory of the device of the only tower is known."""
        own = self._config.strategy
        assert isinstance(own, KerasStrategy), own
        limit = Limit.of(self._config, ALONE) if own._follows_options else None
        self._limit = limit
        return limit is not None

    def exceeds(
        self,
        model: keras.Model,
        kind: str,
        batch: Structure,
        examples: int | None,
    ) -> bool:
        """Whether a step of plain Keras does not fit into a device, as planned.

        Args:
            model: the model.
            kind: the method of Keras that the step belongs to.
            batch: the specs of a batch.
            examples: the number of examples of a batch; None: unknown.
        """
        config, limit = self._config, self._limit
        examples = _known_examples(batch, examples)
        if limit is None or examples is None:
            return False
        known = self._exceeding.setdefault(model, {})
        key = f"{examples} {batch}"
        if key not in known:
            planner = _Planner(config, model, kind, batch, examples)
            known[key] = False
            try:
                [(_, needs)] = planner.needs_of({}, 1, [1], None)
            except Exception as error:
                # Keras has the error of a step that cannot be traced.
                logger.debug("no plan of a step: %s", shorten(error))
            else:
                room = limit.size * (1 - _MARGIN)
                known[key] = (needs.total or 0) > room
        return known[key]

    def plan(
        self,
        lay_out: Callable[[StepSettings], StepLayout],
        settings: StepSettings,
    ) -> StepLayout:
        """Lay a step out and schedule it, within the memory of a device.

        What is tried goes from cheap to dear: order, computing again, and more
        micro-batches. Ranks that share a step decide alike.

        Args:
            lay_out: lays the step out.
            settings: what it is traced for; the micro-batches are the fewest.

        Raises:
            DoesNotFit: it does not fit beside the variables, however.
        """
        config, limit, failed = self._config, self._limit, settings.failed
        while True:
            layout = lay_out(settings)
            held = self._held_beside(layout)
            room = math.inf
            if limit is not None and held is not None:
                room = max(limit.size * (1 - _MARGIN) - held.held, 0)
            remat = _limits(config.options.remat, room, failed)
            layout = scheduled(layout, config, remat)
            more = settings.in_more_parts()
            if more is None or not _exceeds(layout, room):
                break
            settings = more
        self._say_how(layout, remat)
        if held is not None:
            self._report(layout, held)
        return layout

    def _held_beside(self, layout: StepLayout) -> Needs | None:
        """Return what devices hold beside a step; None: nothing is compared."""
        settings = layout.settings
        spec, model = layout.divided.spec, settings.model
        examples = _known_examples(spec, settings.examples)
        if self._limit is None or examples is None:
            return None
        step = LaidOutStep(self._config, model, layout.traced, layout.program)
        ranks = settings.places.ranks.batch.size
        return self._held.get(model) or step.held(ranks)

    def _say_how(self, layout: StepLayout, remat: RematLimits) -> None:
        """Say once how a step is to fit into memory."""
        settings, schedule = layout.settings, layout.program.schedule
        assert schedule is not None, "a step without a schedule"
        model, plan, how = settings.model, layout.plan, []
        # What users have chosen is computed again all the same.
        exceeds = schedule.bytes + schedule.saved > remat.limit
        if schedule.again and exceeds and self._config.options.remat is None:
            how.append(
                f"computes {schedule.again} operations again "
                f"({schedule.work:.0%} of the step's work) instead of keeping "
                f"{format_bytes(schedule.saved)} on each device"
            )
        if plan.parts > 1 and settings.rows is not None:
            how.append(f"processes a tower's rows in {plan.parts} parts")
        is_first = settings.places.ranks.job.rank == 0
        if how and is_first and first_time(model, (settings.kind, plan)):
            why = "memory has run out" if settings.failed else self._limit
            does = " and ".join(how)
            announce(f"{settings.kind} of model {model.name!r} {does}: {why}")

    def _report(self, layout: StepLayout, held: Needs) -> None:
        """Refuse a step that does not fit, or warn.

        Raises:
            DoesNotFit: it does not fit beside the variables, however.
        """
        limit, config, settings = self._limit, self._config, layout.settings
        assert limit is not None, "nothing to compare with"
        total = held.held + layout.plan.bytes
        # What runs out of memory is tried again, in smaller parts.
        may_be_cut = settings.in_more_parts() is not None
        if total <= limit.size * (1 - _MARGIN) or may_be_cut:
            return
        spec, model = layout.divided.spec, settings.model
        examples = _known_examples(spec, settings.examples)
        planner = _Planner(config, model, settings.kind, spec, examples)
        needs = dataclasses.replace(held, step=layout.plan.bytes)
        # Of what XLA compiles, it keeps less.
        if settings.xla or total <= limit.size * (1 + _MARGIN):
            _warn(planner, needs, limit)
        else:
            raise DoesNotFit(_describe(planner, needs, limit))


def _limits(
    option: bool | float | None, room: float, failed: MemoryPlan | None
) -> RematLimits:
    """Return what may be computed again.

    Args:
        option: the option ``remat``.
        room: the bytes that a step may need.
        failed: the plan with which memory has run out.
    """
    if option is None:
        most = math.inf if failed is None else failed.bytes / _SHRINKS
        return RematLimits(min(room, most))
    if option is False:
        return KEEP_ALL
    return RematLimits(0) if option is True else RematLimits(0, option)


def _exceeds(layout: StepLayout, room: float) -> bool:
    """Whether a step needs more than it may, as far as that is known."""
    plan, failed = layout.plan, layout.settings.failed
    if failed is not None and not plan < failed:
        return True
    # Of what XLA compiles, it keeps less.
    return not layout.settings.xla and plan.bytes > room


def _spec(leaf: Leaf | tf.TypeSpec | None) -> tf.TypeSpec | None:
    """Return the spec of a part of a batch: an array, a tensor or a spec."""
    if leaf is None or isinstance(leaf, tf.TypeSpec):
        return leaf
    return tf.TensorSpec(leaf.shape, leaf.dtype)


def _known_examples(spec: Structure, examples: int | None) -> int | None:
    """Return the number of examples, if all other sizes are known."""
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


@dataclasses.dataclass(frozen=True)
class _Planner:
    """Plans a step of a model with other options, or on more devices.

    Attributes:
        config: the towers that it is to run on.
        model: the model.
        kind: the method of Keras that the step belongs to.
        batch: the specs of its batch; None: unknown.
        examples: the number of examples of a batch; None: unknown.
    """

    config: TowerConfig
    model: keras.Model
    kind: str
    batch: Structure
    examples: int | None

    @property
    def ranks(self) -> int:
        """The number of ranks that share a batch."""
        return self.config.places(self.kind).ranks.batch.size

    def variables_of(
        self, options: Mapping[str, object], times: int = 1
    ) -> Needs:
        """Return what devices hold, with options.

        Args:
            options: those that are other ones.
            times: how many times as many devices there are.
        """
        ranks = times * self.ranks
        with self._planning(options, ranks) as strategy:
            strategy._runner.plan_variables(self.model, self.kind)
            return PlacedModel(strategy._config, self.model).held(ranks)

    def needs_of(
        self,
        options: Mapping[str, object],
        times: int,
        parts: Sequence[int],
        limit: int | None,
    ) -> Iterator[tuple[int, Needs]]:
        """Yield what devices need with numbers of micro-batches.

        Args:
            options: those that are other ones.
            times: how many times as many devices there are.
            parts: the numbers: 1 alone, or all larger.
            limit: the bytes of a device, for which as much is computed again
                as is needed; None: nothing is.
        """
        ranks, examples = times * self.ranks, self.examples
        assert examples is not None, "a batch of unknown size"
        batch = tf.nest.map_structure(
            lambda s: (
                tf.TensorSpec([examples, *s.shape[1:]], s.dtype)
                if s.shape.rank
                else s
            ),
            self.batch,
        )
        options = {**options, "micro_batches": parts[0]}
        with self._planning(options, ranks) as strategy:
            step = lay_out_planned(
                strategy, self.model, batch, examples, self.kind
            )
            for number in parts:
                yield number, step.needs(examples, ranks, number, limit)

    @contextlib.contextmanager
    def _planning(
        self, options: Mapping[str, object], ranks: int
    ) -> Iterator[KerasStrategy]:
        own: Any = self.config.strategy
        make = functools.partial(own._planned, PlannedRanks(ranks), **options)
        with silence(), planning(self.model, make, builds=False) as strategy:
            yield strategy

    def option_within(self, size: int, needs: Needs) -> tuple[str, Needs]:
        """Return the first option with which it fits, and what it then needs.

        Args:
            size: the bytes of a device.
            needs: what it needs without one.

        Raises:
            TowerError: none is known.
        """
        tries = 0
        for options, times in self._choices():
            held = self.variables_of(options, times) if options else needs
            if held.held > size:
                continue
            if self.examples is None:
                return self._name(options, times), held
            cells = times * self.ranks * self.config.num_towers
            rows = -(-self.examples // cells)
            larger = [2**k for k in range(1, rows.bit_length())]
            # It is known already what it needs as it is.
            tries += times > 1
            for parts in ([1], larger) if options else (larger,):
                found = (
                    self.needs_of(options, times, parts, size) if parts else ()
                )
                for number, needed in found:
                    if needed.total is not None and needed.total <= size:
                        return self._name(options, times, number), needed
            if tries == _MOST_TRIES:
                break
        raise TowerError("no known option makes it fit")

    def _choices(self) -> Iterator[tuple[Mapping[str, object], int]]:
        """Yield options, and how many times as many devices they are for."""
        own = self.config.options
        divides = own.weights is not None or own.layouts is not None
        in_shards: dict[str, object] = {"weights": "sharded", "updates": None}
        yield {}, 1
        if not divides and self.config.divides:
            if self.kind in TRAINING and own.updates != "sharded":
                yield {"updates": "sharded"}, 1
            yield in_shards, 1
        if own.layouts is None:
            for times in _TIMES:
                yield in_shards, times

    def _name(
        self, options: Mapping[str, object], times: int, parts: int = 1
    ) -> str:
        """Say how a user chooses options, and how many devices."""
        named = [f'{k}="{v}"' for k, v in options.items() if v]
        named += [f"micro_batches={parts}"] if parts > 1 else []
        text = " and ".join(named)
        if times == 1:
            return text
        config = self.config
        number = times * self.ranks
        if self.ranks > 1:
            return f"{text} on {number} ranks"
        return f"{text} on {number * config.num_towers} devices"


def _describe(planner: _Planner, needs: Needs, limit: Limit) -> str:
    """Say what a model needs, and with which option it fits."""
    text = f"{_compare(planner, needs, limit)}."
    try:
        option, then = planner.option_within(limit.size, needs)
    except Exception as error:
        # What it needs as it is, is known all the same.
        logger.debug("no option is known: %s", shorten(error))
        text += " No known option makes it fit: use a smaller batch"
    else:
        size = format_bytes(then.total or then.held)
        beside = "" if then.total else ", without the step"
        text += f" It fits with {option}: {size}{beside}"
    return (
        f"{text}. If devices have more memory, set {ENV_DEVICE_MEMORY}; 0 "
        "skips this check."
    )


def _compare(planner: _Planner, needs: Needs, limit: Limit) -> str:
    """Say what a model needs, and what there is."""
    held = [*zip(needs.weights, needs.optimizer, strict=True)]
    weights, slots = max(held, key=sum)
    parts = [f"{format_bytes(weights)} of weights"]
    if slots:
        parts.append(f"{format_bytes(slots)} of optimizer state")
    if needs.step is not None:
        parts.append(f"{format_bytes(needs.step)} while a step runs")
    total = format_bytes(needs.held + (needs.step or 0))
    return (
        f"{planner.kind} of model {planner.model.name!r} does not fit into "
        f"memory: {limit}, and it needs {total} ({', '.join(parts)})"
    )


def _warn(planner: _Planner, needs: Needs, limit: Limit) -> None:
    """Warn once that a model may not fit."""
    text = _compare(planner, needs, limit).replace("does not", "may not")
    text = text.replace("and it needs", "and it needs about")
    if first_time(planner.model, ("memory", planner.kind)):
        logger.warning("%s", text)
