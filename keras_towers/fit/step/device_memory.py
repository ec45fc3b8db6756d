"""Makes models fit into the memory of their devices, or refuses them.

Variables are checked before they are placed; a step is checked when it is
traced, before it runs. ``DeviceMemory.plan`` finds a timeline that fits.
``partition/memory_estimate.py`` estimates the memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_towers._bytes import format_bytes
from keras_towers._notices import announce, first_time, logger, silence
from keras_towers._types import Structure
from keras_towers.devices import memory_of, short_name
from keras_towers.errors import TowerError, shorten
from keras_towers.fit.components import KerasStrategy, TowerConfig
from keras_towers.fit.places import ALONE
from keras_towers.fit.step import step_reports
from keras_towers.fit.step.dry_run import (
    AbsentRanks,
    Needs,
    PlacedModel,
    dry_run,
    lay_out_dry,
)
from keras_towers.fit.step.step_layout import (
    MemoryPlan,
    StepLayout,
    StepSettings,
    with_timeline,
)
from keras_towers.fit.weights.least_loaded import byte_size
from keras_towers.partition.kept_results import KEEP_ALL, RematLimits
from keras_towers.rendezvous import rank_checks
from keras_towers.rendezvous.rank_checks import Peers
from keras_towers.settings import ENV_DEVICE_MEMORY

# How many times less a step is to need once memory has run out.
_SHRINKS = 2
# Estimates that are wrong by less stop nothing.
_MARGIN = 0.1
# If variables take this part of the memory, their slots fit, too.
_ROOM = 16


class DoesNotFit(TowerError):
    """Raised on all ranks if a model does not fit into their devices."""


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
        """Return the limit for all ranks' devices; None: unknown. Collective.

        Args:
            config: the towers of this rank.
            peers: the ranks.
        """
        mesh = [*itertools.chain(*config.mesh)]
        sizes = zip(memory_of(mesh), map(short_name, mesh), strict=True)
        own = min(((n, name) for n, name in sizes if n), default=None)
        where = "compares the memory of its devices"
        of_ranks = rank_checks.gather(peers, own, where)
        known = [(n, rank) for rank, n in enumerate(of_ranks) if n]
        if not known:
            return None
        (size, device), rank = min(known)
        return cls(size, device, rank if peers.size > 1 else None)


class DeviceMemory:
    """The memory of devices, and how models are made to fit into it.

    Args:
        config: the towers.
    """

    def __init__(self, config: TowerConfig):
        self._config = config
        self._limit: Limit | None = None
        # The bytes that devices hold of each model.
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
    ) -> None:
        """Refuse a built model whose variables do not fit. Collective.

        Args:
            model: the model, before its variables are placed.
            kind: the method of Keras that needs it.
            peers: the ranks that call it.
            is_placed: whether they have been placed for it before, or cannot
                be yet, since this rank could not build the model.

        Raises:
            DoesNotFit: they do not fit, on all ranks.
        """
        config = self._config
        self._limit = limit = self._find_limit(peers)
        if limit is None or is_placed:
            return
        if _ROOM * sum(map(byte_size, model.variables)) <= limit.size:
            # Planning takes time, and there is room for any optimizer.
            return
        ranks = config.places(kind).ranks.batch.size
        with _dry_run(config, model, ranks) as strategy:
            strategy._runner.plan_variables(model, kind)
            needs = PlacedModel(strategy._config, model).held(ranks)
        self._held[model] = needs
        self._compare(model, kind, needs)

    def _find_limit(self, peers: Peers) -> Limit | None:
        own = self._config.strategy
        assert isinstance(own, KerasStrategy), own
        # Where weights are elsewhere, or towers train alone, plans do not hold.
        return Limit.of(self._config, peers) if own._follows_options else None

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
                room = limit.size * (1 - _MARGIN)
                known[key] = (needs.total or 0) > room
        return known[key]

    def plan(
        self,
        lay_out: Callable[[StepSettings, StepLayout | None], StepLayout],
        settings: StepSettings,
    ) -> StepLayout:
        """Lay out a step, and plan it within the memory of a device.

        It tries cheap plans first: the order of operations, recomputing, and
        more micro-batches. Ranks that share a step decide alike.

        Args:
            lay_out: lays the step out, given a layout for fewer micro-batches.
            settings: what it is traced for; the micro-batches are the fewest.

        Raises:
            DoesNotFit: it does not fit beside the variables, however.
        """
        config, limit, failed = self._config, self._limit, settings.failed
        layout = lay_out(settings, None)
        while True:
            needs = self._needs_beside(layout)
            room = math.inf
            if limit is not None and needs is not None:
                room = max(limit.size * (1 - _MARGIN) - needs.held, 0)
            remat = _limits(config.options.remat, room, failed)
            layout = with_timeline(layout, config, remat)
            more = layout.settings.in_more_micro_batches()
            if more is None or not _exceeds(layout, room):
                break
            layout = lay_out(more, layout)
        step_reports.record_costs(
            config,
            settings.kind,
            settings.model,
            layout.scheduled,
            layout.settings.places,
        )
        self._say_how(layout, remat)
        # A step that runs out of memory is tried again in smaller parts.
        if needs is not None and more is None:
            needs = dataclasses.replace(needs, step=layout.plan.bytes)
            # XLA keeps less than the estimate.
            self._compare(settings.model, settings.kind, needs, settings.xla)
        return layout

    def _needs_beside(self, layout: StepLayout) -> Needs | None:
        """Return what devices need besides a step, if it is compared."""
        settings = layout.settings
        spec, model = layout.divided.spec, settings.model
        examples = _known_examples(spec, settings.examples)
        if self._limit is None or examples is None:
            return None
        ranks = settings.places.ranks.batch.size
        placed = PlacedModel(self._config, model)
        return self._held.get(model) or placed.held(ranks)

    def _say_how(self, layout: StepLayout, remat: RematLimits) -> None:
        """Announce once how a step is made to fit into memory."""
        settings, step = layout.settings, layout.scheduled.plan
        model, plan, how = settings.model, layout.plan, []
        # Segments that users mark are recomputed in any case.
        exceeds = step.bytes + step.saved > remat.limit
        if step.recomputed and exceeds and self._config.options.remat is None:
            how.append(
                f"computes {step.recomputed} operations again "
                f"({step.work:.0%} of the step's work) instead of keeping "
                f"{format_bytes(step.saved)} on each device"
            )
        if plan.micro_batches > 1 and settings.rows is not None:
            how.append(
                f"processes a tower's rows in {plan.micro_batches} parts"
            )
        is_first = settings.places.ranks.job.rank == 0
        if how and is_first and first_time(model, (settings.kind, plan)):
            why = "memory has run out" if settings.failed else self._limit
            does = " and ".join(how)
            announce(f"{settings.kind} of model {model.name!r} {does}: {why}")

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
        total = needs.held + (needs.step or 0)
        if total <= limit.size * (1 - _MARGIN):
            return
        may_fit = may_fit or total <= limit.size * (1 + _MARGIN)
        weights, slots = max(
            zip(needs.weights, needs.optimizer, strict=True), key=sum
        )
        parts = [f"{format_bytes(weights)} of weights"]
        if slots:
            parts.append(f"{format_bytes(slots)} of optimizer state")
        if needs.step is not None:
            parts.append(f"{format_bytes(needs.step)} while a step runs")
        does, about = ("may", "about ") if may_fit else ("does", "")
        text = (
            f"{kind} of model {model.name!r} {does} not fit into memory: "
            f"{limit}, and it needs {about}{format_bytes(total)} "
            f"({', '.join(parts)})"
        )
        if not may_fit:
            raise DoesNotFit(f"{text}. {self._advice(needs)}")
        if first_time(model, ("memory", kind)):
            logger.warning("%s", text)

    def _advice(self, needs: Needs) -> str:
        """Return options with which a step may fit, the cheapest one first."""
        options, advice = self._config.options, ["more devices"]
        if options.layouts is options.weights is None:
            advice = ['weights="sharded" on several devices']
        # Micro-batches help if the variables fit.
        assert self._limit is not None
        has_room = needs.held <= self._limit.size * (1 - _MARGIN)
        if has_room and options.micro_batches != "auto" and needs.step:
            advice.insert(0, 'micro_batches="auto"')
        return (
            f"Try {', '.join(advice)} or a smaller batch; `keras-towers plan` "
            "shows what devices then need. If they have more memory, set "
            f"{ENV_DEVICE_MEMORY}; 0 skips this check."
        )


def _limits(
    option: bool | float | None, room: float, failed: MemoryPlan | None
) -> RematLimits:
    """Return the limits for recomputing.

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
    """Whether a step needs more than its limit, as far as both are known."""
    plan, failed = layout.plan, layout.settings.failed
    if failed is not None and not plan.needs_less_than(failed):
        return True
    # XLA keeps less than the estimate.
    return not layout.settings.xla and plan.bytes > room


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
