"""Sharded updates: each tower updates a share of the weights.

Ports the first stage of ZeRO (Rajbhandari et al., "ZeRO: memory optimizations
toward training trillion parameter models", SC 2020), with whole weights as the
unit. Keras's ``apply`` still runs once on every rank for all of them, so its
treatment of all gradients together (clipping by their global norm, loss
scaling) needs no special handling.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit.context import patches
from keras_towers.fit.context.identity_dict import IdentityDict
from keras_towers.fit.contract import TowerConfig, UpdateCall
from keras_towers.fit.update.step_order import done_by_all
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.fit.weights import model_state as state_lib
from keras_towers.fit.weights.model_state import optimizers_in
from keras_towers.fit.weights.placement import LeastLoadedPlacement, byte_size
from keras_towers.fit.weights.tower_variables import (
    RelocatedVariables,
    component,
    overwrite,
)
from keras_towers.reduction import (
    Gradient,
    Gradients,
    Reduction,
    sum_at_variables,
)
from keras_towers.transport import Transport
from keras_towers.transport.keys import next_key
from keras_towers.transport.messages import packed

logger: logging.Logger = logging.getLogger("keras_towers")

_HOST = "CPU:0"
# Ranks gather so much at a time: it is in memory three times then.
_GATHERED_BYTES = 64 * 2**20


class UpdateSharded(WeightUpdate):
    """Each tower of each rank updates its share of the weights.

    The other towers copy the result. Slots of a weight are on the tower that
    updates it. While steps run, other ranks do not have slots of its update
    rule, but moving averages and accumulated gradients, which Keras computes
    from values that all ranks have. Without a ``reduction`` a gradient is
    summed on the tower that updates its weight.
    """

    name = "sharded"
    description = "each tower updates its share of the weights"
    # Slots of all weights may be too large for the tower of Keras's build().
    builds_optimizers = True

    def __init__(
        self,
        config: TowerConfig,
        over_ranks: Callable[[list[Gradient]], list[Gradient]],
        reduction: Reduction | None = None,
    ):
        super().__init__(config, reduction)
        self._over_ranks = over_ranks
        self._shares = Shares(config)
        self._slots = RelocatedVariables()
        self._of_ranks = SlotsSharedByRanks(config.transport)
        if config.transport.size > 1:
            self._only = self._shares
        self.updater = self._shares.tower_of
        self.sums_at_weights = reduction is None
        self._slot_bytes_before: list[int] = []

    @staticmethod
    def _mirrors(config: TowerConfig) -> bool:
        return True

    def make_ready(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Build the optimizer, with its slots on the right towers."""
        self._shares.add(variables)
        super().make_ready(optimizer, variables)
        for part in optimizers_in(optimizer):
            self._of_ranks.make_ready(part.variables)

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Put slots on the towers that update their weights."""
        super().place_optimizer(optimizer)
        # A wrapper has the slots of what it wraps, and knows less of them.
        placed: set[int] = set()
        for part in reversed(list(optimizers_in(optimizer))):
            if part.built:
                self._shares.add(part._trainable_variables)
                self._place_slots(part, placed)

    def _place_slots(
        self, optimizer: keras.optimizers.Optimizer, placed: set[int]
    ) -> None:
        if self._only is not None:
            state_lib.check_known(optimizer)
        of_rule = {id(slot) for slot in state_lib.of_update_rule(optimizer)}
        for slot, weight in state_lib.slots_of(optimizer):
            value = getattr(weight, "_value", weight)
            if id(slot) in placed or value not in self._shares:
                continue
            placed.add(id(slot))
            home = component(value).device
            rank = self._shares.rank_of(value)
            if self._only is not None and id(slot) in of_rule:
                self._of_ranks.add(slot, rank, home)
                if rank != self.config.transport.rank:
                    continue
            here = component(value, self.updater).device
            self._slots.place(slot, here, home)

    @property
    def slot_bytes(self) -> list[int]:
        """The bytes of the slots on each tower, now or in the last block."""
        now = [self._slots.bytes_on(d) for d in self.config.devices]
        return now if any(now) else self._slot_bytes_before

    def drop_slots_of_others(self) -> None:
        self._of_ranks.drop_those_of_others()

    def gather_slots(self) -> None:
        self._of_ranks.gather()

    def restore(self, variable: keras.Variable) -> None:
        self._slots.restore(variable)
        self._of_ranks.restore(variable)
        super().restore(variable)

    def release(self) -> None:
        self._slot_bytes_before = self.slot_bytes
        try:
            self._slots.restore_all()
            absent = self._of_ranks.restore_all()
        finally:
            self._shares.clear()
            super().release()
        if absent:
            logger.warning(
                "training failed while other ranks held %d of the "
                "optimizer's variables, which have no value on this rank "
                "now: load them from a checkpoint, or compile the model again",
                absent,
            )

    def apply(self, call: UpdateCall) -> None:
        """Sum gradients over all towers; each tower updates its share."""
        if self._only is not None:
            raise TowerError(
                'updates="sharded" works over several ranks only with fit() '
                "and train_on_batch(): leave updates out in a custom "
                "training loop."
            )
        super().apply(call)

    def _update(self, call: UpdateCall, rows: Gradients) -> None:
        # The optimizer may have been built just now.
        self.drop_slots_of_others()
        super()._update(call, rows)

    def _reduce(
        self, rows: Gradients, variables: Sequence[Any]
    ) -> list[list[Gradient]]:
        values = [getattr(v, "_value", v) for v in variables]
        if self._reduction is not None:
            sums = self._reduction(rows, self.config.devices)
            towers = map(self._shares.tower_of, values)
            return [[sums[tower][i] for i, tower in enumerate(towers)]]
        places = [component(v, self.updater).device for v in values]
        sums = sum_at_variables(rows, self.config.devices, places)
        return [self._over_ranks(sums)]


class Shares:
    """Divides weights between all towers of all ranks, large ones first.

    The shares then differ by less than the largest weights do. All ranks come
    to the same result, as they have the same weights in the same order.
    """

    def __init__(self, config: TowerConfig):
        self._towers = config.num_towers
        self._transport = config.transport
        self._places = [
            f"/job:rank/task:{rank}/device:CPU:{tower}"
            for rank in range(config.transport.size)
            for tower in range(config.num_towers)
        ]
        self._placement = LeastLoadedPlacement(self._places)
        # By the value of the weight, and by its component on that tower.
        self._owners: IdentityDict[Any, int] = IdentityDict()

    def add(self, variables: Sequence[Any]) -> None:
        """Choose a tower for each weight that no tower updates yet."""
        new = [
            v
            for v in variables
            if isinstance(v, keras.Variable)
            and self._is_placed(v._value)
            and v._value not in self._owners
        ]
        for v in sorted(new, key=_bytes, reverse=True):
            place = self._placement.of(v)
            self._owners[v._value] = self._places.index(place)
            updated = component(v._value, self.tower_of)
            self._owners[updated] = self._owners[v._value]

    def _is_placed(self, value: Any) -> bool:
        """Whether a weight already has copies on the towers."""
        copied = isinstance(value, compat.DistributedVariable)
        return copied or self._towers == 1

    def __contains__(self, value: Any) -> bool:
        return value in self._owners

    def tower_of(self, value: Any) -> int:
        """Return the tower of this rank that has the new value of a weight."""
        return self._owners.get(value, 0) % self._towers

    def rank_of(self, value: Any) -> int:
        """Return the rank that updates a weight."""
        return self._owners.get(value, 0) // self._towers

    def clear(self) -> None:
        """Forget all weights."""
        self._owners.clear()
        self._placement.clear()

    def shadows(self) -> patches.Shadows:
        """Return methods of an optimizer that update this rank's share.

        Its update rule sees these weights alone. The new values of all are
        there before constraints and moving averages are computed from them.
        """
        return {
            "_apply_weight_decay": self._apply_weight_decay,
            "_backend_update_step": self._update_step,
        }

    def slot_device(self, weight: tf.Variable) -> str:
        """Return the device on which to create slots of a weight."""
        return weight.device if self._is_mine(weight) else _HOST

    def _is_mine(self, weight: Any) -> bool:
        value = getattr(weight, "_value", weight)
        return self.rank_of(value) == self._transport.rank

    def _apply_weight_decay(
        self,
        optimizer: Any,
        original: Callable[..., None],
        weights: Sequence[Any],
    ) -> None:
        original([weight for weight in weights if self._is_mine(weight)])

    def _update_step(
        self,
        optimizer: Any,
        original: Callable[..., None],
        gradients: Sequence[Any],
        weights: Sequence[Any],
        learning_rate: Any,
    ) -> None:
        is_mine = [self._is_mine(weight) for weight in weights]
        original(
            [g for g, here in zip(gradients, is_mine, strict=True) if here],
            [w for w, here in zip(weights, is_mine, strict=True) if here],
            learning_rate,
        )
        # Every rank has to take part in the sums that others use.
        sums = tf.nest.flatten(list(gradients), expand_composites=True)
        with tf.control_dependencies(done_by_all(sums)):
            self._exchange([getattr(w, "_value", w) for w in weights])

    def _exchange(self, weights: Sequence[tf.Variable]) -> None:
        """Send the new values to all ranks."""
        for rank in range(self._transport.size):
            theirs = [w for w in weights if self.rank_of(w) == rank]

            def send(tensors: list[tf.Tensor], rank: int = rank) -> Any:
                return self._transport.broadcast(
                    tensors, next_key("weights"), rank
                )

            sent = packed([weight.read_value() for weight in theirs], send)
            for weight, value in zip(theirs, sent, strict=True):
                with tf.device(weight.device):
                    weight.assign(value, read_value=False)


def _bytes(variable: keras.Variable) -> int:
    return byte_size(variable.shape, variable.dtype) or 0


class OnAnotherRankError(TowerError, AttributeError):
    """The value of a variable is on another rank."""


class _Absent:
    """A placeholder for the value of a slot variable on another rank.

    Reading it is an error, which says where the value is.
    """

    def __init__(self, slot: keras.Variable, held: tf.Variable, rank: int):
        self.shape = held.shape
        self.dtype = held.dtype
        self.name = held.name
        self.device = held.device
        self._unique_id = held._unique_id
        self.held = held
        self.lost = False
        self._slot = slot
        self._rank = rank

    def assign(self, value: Any, **kwargs: Any) -> Any:
        """Accept a value, if training is over."""
        if not self.lost:
            self._refuse("written")
        overwrite(self.held, tf.cast(value, self.dtype))
        self._slot._value = self.held
        return self.held

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse("read")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse("read")

    def __tf_tensor__(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse("read")

    def _refuse(self, done: str) -> NoReturn:
        if self.lost:
            raise OnAnotherRankError(
                f"optimizer variable {self._slot.path!r} has no value: rank "
                f"{self._rank} had it when training ended by an error. Load "
                "the optimizer's state from a checkpoint, or compile the model "
                "anew."
            )
        raise OnAnotherRankError(
            f"optimizer variable {self._slot.path!r} cannot be {done} between "
            f'two steps: with updates="sharded" rank {self._rank} has it. All '
            "ranks have it from the end of an epoch to the beginning of the "
            "next one, after evaluate(), and when the strategy's block ends. "
            'Save then (for Keras\'s callbacks: save_freq="epoch"), or leave '
            "updates out."
        )


def is_elsewhere(variable: Any) -> bool:
    """Whether only another rank currently has the value of a variable."""
    return isinstance(getattr(variable, "_value", None), _Absent)


class SlotsSharedByRanks:
    """Slot variables, each held by a single rank while steps run.

    Between calls every rank has all slots; other ranks' slots are on the host.
    """

    def __init__(self, transport: Transport):
        self._transport = transport
        # Ranks have to gather the same variables, so none is ever forgotten.
        self._ranks: IdentityDict[keras.Variable, int] = IdentityDict(
            weak=False
        )
        # Those that steps use, and whether one rank alone has them now.
        self._shared: IdentityDict[keras.Variable, bool] = IdentityDict(
            weak=False
        )
        self._on_host = RelocatedVariables()
        self._are_all_shared = False

    def add(self, slot: keras.Variable, rank: int, home: str) -> None:
        """Record which rank needs a slot variable, unless already known."""
        if slot in self._ranks:
            return
        self._ranks[slot] = rank
        if rank != self._transport.rank:
            self._on_host.place(slot, _HOST, home)

    def make_ready(self, variables: Iterable[keras.Variable]) -> None:
        """Start sharing the known slots among these variables.

        Until then their values are those of rank 0, which may have loaded them.
        """
        for slot in variables:
            if slot in self._ranks and slot not in self._shared:
                self._shared[slot] = self._are_all_shared = False

    def drop_those_of_others(self) -> None:
        """Drop the values that other ranks keep, before steps."""
        if self._are_all_shared:
            return
        for slot in self._shared:
            self._shared[slot] = True
            if self._ranks[slot] != self._transport.rank:
                self._drop(slot)
        self._are_all_shared = True

    def _drop(self, slot: keras.Variable) -> None:
        held = slot._value
        if isinstance(held, _Absent):
            return
        with tf.init_scope():
            slot._value = _Absent(slot, held, self._ranks[slot])
            overwrite(held, tf.zeros([0], held.dtype))

    def gather(self) -> None:
        """Give all ranks the values of all slots, if any rank lacks some."""
        # Collective: every rank has to call it.
        for rank in range(self._transport.size):
            for slots in self._portions(rank):
                values = self._transport.broadcast(
                    [self._to_send(slot) for slot in slots],
                    next_key("slots"),
                    root=rank,
                )
                if rank != self._transport.rank:
                    for slot, value in zip(slots, values, strict=True):
                        _put_back(slot, value)
        for slot in self._shared:
            self._shared[slot] = self._are_all_shared = False

    def _portions(self, rank: int) -> Iterator[list[keras.Variable]]:
        """Yield one rank's slots, in portions that fit in memory."""
        portion: list[keras.Variable] = []
        filled = 0
        for slot in self._shared:
            if self._ranks[slot] != rank or not self._shared[slot]:
                continue
            size = byte_size(slot.shape, slot.dtype) or 0
            if portion and filled + size > _GATHERED_BYTES:
                yield portion
                portion, filled = [], 0
            portion.append(slot)
            filled += size
        if portion:
            yield portion

    def _to_send(self, slot: keras.Variable) -> tf.Tensor:
        value = slot._value
        with tf.device(_HOST):
            if isinstance(value, _Absent):
                return tf.zeros(value.shape, value.dtype)
            return tf.identity(value.read_value())

    def restore(self, slot: keras.Variable) -> None:
        """Restore the original, if another rank holds the slot."""
        if slot not in self._ranks:
            return
        del self._ranks[slot]
        self._shared.pop(slot, None)
        if isinstance(slot._value, _Absent):
            slot._value.held = self._on_host.pop_original(slot)
            slot._value.lost = True
        else:
            self._on_host.restore(slot)

    def restore_all(self) -> int:
        """Restore every slot; return how many lack a value here."""
        absent = [s for s in self._ranks if isinstance(s._value, _Absent)]
        for slot in list(self._ranks):
            self.restore(slot)
        return len(absent)


def _put_back(slot: keras.Variable, value: tf.Tensor) -> None:
    there = slot._value
    # A Ctrl-C may have left some here.
    held = there.held if isinstance(there, _Absent) else there
    overwrite(held, value)
    slot._value = held
