"""The base of all strategies: components in a TensorFlow strategy."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Self, SupportsIndex, TypeVar

import keras
import numpy as np
import tensorflow as tf

from keras_towers import devices as devices_lib
from keras_towers import reduction as reduction_lib
from keras_towers._notices import announce
from keras_towers._strategy import MirroredStrategy
from keras_towers.errors import TowerError
from keras_towers.fit.calls.synchronous import TowerCalls
from keras_towers.fit.context import blocks, interrupts
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.contract import (
    Batches,
    Calls,
    Components,
    Extent,
    KerasStrategy,
    TowerConfig,
    another,
)
from keras_towers.fit.hooks import keras as hooks
from keras_towers.fit.update.reduce import UpdateOnce
from keras_towers.meeting.environments import (
    HOW_TO_BE_ALONE,
    ClusterEnvironment,
    detect,
    tf_config,
)
from keras_towers.strategies.extended import TowerExtended
from keras_towers.transport import SingleProcess, Transport

logger: logging.Logger = logging.getLogger("keras_towers")

U = TypeVar("U", bound=UpdateOnce)

# TensorFlow numbers the collectives of every strategy from this base; two
# strategies of different size in one process must not share numbers.
_collective_key_bases = itertools.count(1_000_000, 100_000)


class BaseStrategy(MirroredStrategy, KerasStrategy):
    """A ``tf.distribute.Strategy`` made of the components ``fit/`` needs.

    Args:
        devices: the towers of this process.
        update: creates the component that updates the weights.
        calls: creates the component that runs Keras's methods.
        all_reduce: sums K lists of N values over all processes without loss;
            for values other than gradients.
        transport: connects the processes within a step.
        others: as for ``TowerConfig``.
        gradient_factor: as for ``TowerConfig``.
        average: True for a loss that is a mean over the batch, False for one
            that is a sum.
        batches: ``"split"`` or ``"each"``.
        sync_every_epoch: synchronize all towers at the end of each epoch.
        exact: sets ``batch_norm`` and ``random`` to ``"global"``, and has
            Keras's losses and layers that couple the examples of a batch
            computed from the global batch.
        batch_norm: ``"tower"`` (default): BatchNormalization uses the
            statistics of its tower's share of the batch. ``"global"``: those
            of the global batch.
        random: ``"tower"`` (default): random layers draw an own stream on each
            tower. ``"global"``: each tower gets its rows of the draw that one
            device would have made.
        replicas_are_called: the word for a replica in messages.

    Raises:
        TowerError: an argument is invalid, or contradicts ``exact``.
    """

    def __init__(
        self,
        devices: Sequence[str],
        update: Callable[[TowerConfig], U],
        all_reduce: reduction_lib.Reduction,
        calls: Callable[[U], Calls] = TowerCalls,
        transport: Transport | None = None,
        average: bool = True,
        batches: Batches = "split",
        sync_every_epoch: bool = True,
        exact: bool = False,
        batch_norm: Extent | None = None,
        random: Extent | None = None,
        replicas_are_called: str = "tower",
        others: Transport | None = None,
        gradient_factor: float = 1.0,
    ):
        one_of("batches", batches, ("split", "each"))
        one_of("exact", exact, (True, False))
        if not isinstance(average, (bool, np.bool_)):
            raise TowerError(
                f"average={average!r} is not allowed: give True for a loss "
                "that is a mean over the batch, or False for one that is a sum."
            )
        transport = transport or SingleProcess()
        self._collective_key_base = next(_collective_key_bases)
        tf.distribute.Strategy.__init__(
            self,
            TowerExtended(
                self,
                devices,
                reduction_lib.ReductionCrossDeviceOps(all_reduce, transport),
                transport,
            ),
        )
        on_host = devices_lib.all_on_host(devices)
        # The components of a strategy of one's own may ask for its towers.
        config = self._config = TowerConfig(
            strategy=self,
            devices=tuple(self.extended.worker_devices),
            transport=transport,
            batches=batches,
            average=bool(average),
            sync_every_epoch=bool(sync_every_epoch),
            prefetches_to_towers=not on_host
            and (others or transport).size == 1,
            batch_norm=_extent("batch_norm", batch_norm, exact),
            random=_extent("random", random, exact),
            exact=bool(exact),
            replicas_are_called=replicas_are_called,
            others=others,
            gradient_factor=gradient_factor,
        )
        updates = update(config)
        self._components = Components(config, updates, calls(updates))
        self._entered: contextlib.ExitStack | None = None

    @property
    def num_towers(self) -> int:
        """The number of towers of this process."""
        return self._config.num_towers

    @property
    def num_replicas(self) -> int:
        """The number of towers of all processes."""
        return self._config.num_replicas

    @property
    def first_tower(self) -> int:
        """The index of this process's first tower among all towers."""
        return self._config.first_tower

    @property
    def average(self) -> bool:
        """Whether a loss is a mean over the batch."""
        return self._config.average

    @property
    def batches(self) -> Batches:
        """Whether the global batch is split, or each tower draws one."""
        return self._config.batches

    @property
    def sync_every_epoch(self) -> bool:
        """Whether all towers are synchronized at the end of each epoch."""
        return self._config.sync_every_epoch

    @property
    def updates(self) -> str:
        """Who updates the weights: ``"once"``, ``"each"``, ..."""
        return self._components.update.name

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of towers of all processes; 1 inside a step of ``fit``.

        There the strategy itself averages over the towers, and a loss must not
        be divided again. ``tf.distribute.get_replica_context()`` always has the
        number of towers of all processes.
        """
        inside = tower_lib.current() is not None
        return 1 if inside else self.num_replicas

    def describe(self) -> str:
        """Describe the towers, what runs on them, and why.

        Example:
            >>> print(TowerStrategy(4).describe())
            TowerStrategy: 4 towers (/device:CPU:0 to /device:CPU:3)
              mode "cpu": all towers are on the host, ...
        """
        lines = (f"  {line}" for line in self._described())
        return "\n".join([repr(self), *lines])

    def __repr__(self) -> str:
        names = [tower_lib.short_name(d) for d in self._config.devices]
        span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        towers = f"{self.num_towers} tower{'s' * (self.num_towers > 1)}"
        return f"{type(self).__name__}: {towers} ({span})"

    def _described(self) -> list[str]:
        """The lines of ``describe`` after the first."""
        gradients = "averaged over examples" if self.average else "summed"
        data = {
            "split": "the global batch is split over the towers",
            "each": "every tower draws a whole batch",
        }[self.batches]
        return [
            f"gradients are {gradients}; {self._components.update.description}",
            data,
        ]

    @contextlib.contextmanager
    def scope(self) -> Iterator[Self]:
        """Make this the current strategy, as with any TensorFlow strategy.

        A model that is built inside stays on the towers permanently.
        """
        current = tf.distribute.get_strategy()
        if tf.distribute.has_strategy() and current is not self:
            raise TowerError(
                f"{type(self).__name__} cannot be entered inside the scope of "
                f"another {another(current, self)}: leave that one first."
            )
        with hooks.installed(self._config.random == "global"), super().scope():
            yield self

    def __enter__(self) -> Self:
        if self._entered is not None:
            raise TowerError(
                f"this {type(self).__name__} has been entered already: a "
                "strategy can be entered only once at a time."
            )
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.scope())
            if self._config.num_replicas > 1:
                stack.enter_context(blocks.entered(type(self).__name__))
            self._announce()
            self._entered = stack.pop_all()
        self._components.adoption.note_what_is_made()
        return self

    def _announce(self) -> None:
        """Say in one line what trains now."""
        alone = isinstance(self._config.peers, SingleProcess)
        if alone:
            _warn_of_others(type(self).__name__)
        one = self._config.num_replicas == len(devices_lib.resolve(None)) == 1
        if one and alone:
            logger.warning(
                "%r: this process sees no other device, so training runs as "
                "without a strategy. To try several towers on a CPU, call "
                "keras_towers.virtual_towers(4) before anything else.",
                self,
            )
        elif self._config.peers.rank == 0:
            announce(repr(self))

    def __exit__(self, *error: Any) -> None:
        stack, self._entered = self._entered, None
        try:
            if error[0] is None and self._config.transport.size > 1:
                self._components.adoption.equalise()
            if stack is not None:
                stack.__exit__(*error)
        finally:
            # A second Ctrl-C here would leave a model half on the towers.
            with interrupts.deferred():
                self._components.adoption.release()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # It is its devices, and models on it: what is copied shares it.
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TowerError(
            f"a {type(self).__name__} cannot be pickled: create it in the "
            "process that uses it."
        )

    def adopt(self, model: keras.Model) -> None:
        """Put a built model on the towers now instead of at its first ``fit``.

        Raises:
            TowerError: the model belongs to another strategy.
        """
        if self.num_replicas > 1:
            self._components.adoption.claim(model)
            with self.scope():
                self._components.adoption.bind(model)


@functools.cache
def _warn_of_others(name: str) -> None:
    """Say that each process trains for itself, if there are several."""
    member: ClusterEnvironment | tf_config.Cluster | None = detect()
    others, advice = "HorovodStrategy", HOW_TO_BE_ALONE
    if member is None:
        # One process needs no cluster, and none that is described well.
        with contextlib.suppress(TowerError):
            member = tf_config.from_environment()
        if member is not None and not member.trains:
            return
        others = "MultiWorkerTowerStrategy"
        advice = f"If that is what you want, unset {tf_config.VARIABLE}."
    # One of an unknown number may be meant to train by itself.
    if member is None or member.size in (None, 1):
        return
    logger.warning(
        "%s trains within one process, and this is %s: each of them trains a "
        "model of its own. %s trains one in all of them. %s",
        name,
        member,
        others,
        advice,
    )


def _extent(name: str, given: Extent | None, exact: bool) -> Extent:
    one_of(name, given, ("tower", "global", None))
    if exact and given == "tower":
        raise TowerError(
            f'{name}="tower" contradicts exact=True: leave one of them out.'
        )
    return given or ("global" if exact else "tower")


def one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Check that a value is one of those allowed.

    Raises:
        TowerError: it is not; the message lists the allowed values.
    """
    if value not in allowed:
        raise TowerError(
            f"{name}={value!r} is not allowed: give one of "
            f"{', '.join(map(repr, allowed))}."
        )
