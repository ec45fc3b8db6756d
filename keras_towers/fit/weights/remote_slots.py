"""Slot variables that a single rank holds while steps run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import keras
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.fit.weights.placement import byte_size
from keras_towers.fit.weights.tower_variables import TowerVariables, overwrite
from keras_towers.transport import Transport, next_key

_HOST = "CPU:0"
# Ranks gather this many bytes at a time, which takes three times the memory.
_GATHERED_BYTES = 64 * 2**20


class OnAnotherRankError(TowerError, AttributeError):
    """The value of a variable is on another rank."""


class _RemoteSlot:
    """A slot variable that only one rank needs in steps.

    On the other ranks it replaces the variable's value while steps run. Reading
    it there raises an error that says which rank has the value.

    Attributes:
        variable: the slot variable.
        rank: the rank that needs it.
        held: the ``tf.Variable`` that has the value, or had it.
        is_used: whether steps use it. Before that, all ranks have rank 0's
            value, which may be loaded from a file.
        is_on_owner_only: whether only ``rank`` has the value.
        is_lost: whether training has ended without the value.
    """

    def __init__(self, variable: keras.Variable, rank: int):
        self.variable = variable
        self.rank = rank
        self.held = variable._value
        if self.is_absent:
            # The value was lost in an earlier block.
            self.held = variable._value.held
        self.is_used = self.is_on_owner_only = self.is_lost = False

    @property
    def is_absent(self) -> bool:
        """Whether this process does not have the value."""
        return isinstance(self.variable._value, _RemoteSlot)

    def drop(self) -> None:
        """Free the memory of the value."""
        with tf.init_scope():
            self.held, self.variable._value = self.variable._value, self
            overwrite(self.held, tf.zeros([0], self.held.dtype))

    def put_back(self, value: Any) -> None:
        """Give the slot variable a value again."""
        if not self.is_absent:
            self.held = self.variable._value
        overwrite(self.held, value)
        self.variable._value = self.held

    def sent(self) -> tf.Tensor:
        """Return the value for a broadcast; a placeholder if it is absent."""
        with tf.device(_HOST):
            if self.is_absent:
                return tf.zeros(self.held.shape, self.held.dtype)
            return tf.identity(self.variable._value.read_value())

    def assign(self, value: Any, **kwargs: Any) -> Any:
        """Accept a value, if training is over."""
        if not self.is_lost:
            self._refuse()
        self.put_back(tf.cast(value, self.held.dtype))
        return self.held

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "dtype", "name", "device", "_unique_id"):
            return getattr(self.held, name)
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse()

    def __tf_tensor__(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse()

    def _refuse(self) -> NoReturn:
        path = self.variable.path
        if self.is_lost:
            raise OnAnotherRankError(
                f"optimizer variable {path!r} has no value: rank {self.rank} "
                "had it when training ended with an error. Load the "
                "optimizer's state from a checkpoint, or compile the model "
                "again."
            )
        raise OnAnotherRankError(
            f"optimizer variable {path!r} cannot be read or written between "
            f'two steps: with updates="sharded" rank {self.rank} has it. All '
            "ranks have it from the end of an epoch to the beginning of the "
            "next one, after evaluate(), and when the strategy's block ends. "
            'Save then (for Keras\'s callbacks: save_freq="epoch"), or leave '
            "updates out."
        )


class RemoteSlots:
    """Slot variables, each held by a single rank while steps run.

    Between calls every rank has all slots; other ranks' slots are on the host.
    """

    def __init__(self, transport: Transport, variables: TowerVariables):
        self._transport = transport
        self._variables = variables
        # By the ids of the variables. All are kept until the end, since ranks
        # have to gather the same slots.
        self._slots: dict[int, _RemoteSlot] = {}

    def add(self, variable: keras.Variable, rank: int) -> None:
        """Record which rank needs a slot variable, unless already known."""
        if id(variable) not in self._slots:
            self._slots[id(variable)] = _RemoteSlot(variable, rank)

    def use(self, variables: Iterable[keras.Variable]) -> None:
        """Note that steps use the known slots among these variables."""
        for variable in variables:
            if id(variable) in self._slots:
                self._slots[id(variable)].is_used = True

    def has_here(self, variable: keras.Variable) -> bool:
        """Whether this rank needs a slot variable."""
        slot = self._slots.get(id(variable))
        return slot is None or slot.rank == self._transport.rank

    def drop_remote_slots(self) -> None:
        """Drop the values that other ranks need in steps."""
        for slot in self._slots.values():
            if slot.is_used and not slot.is_on_owner_only:
                slot.is_on_owner_only = True
                if slot.rank != self._transport.rank and not slot.is_absent:
                    slot.drop()

    def gather(self) -> None:
        """Give all ranks the values of all slots, if any rank lacks some."""
        # Collective: every rank has to call it.
        for rank in range(self._transport.size):
            for slots in self._portions(rank):
                values = self._transport.broadcast(
                    [slot.sent() for slot in slots], next_key("slots"), rank
                )
                if rank != self._transport.rank:
                    for slot, value in zip(slots, values, strict=True):
                        slot.put_back(value)
        for slot in self._slots.values():
            slot.is_on_owner_only = False

    def _portions(self, rank: int) -> Iterator[list[_RemoteSlot]]:
        """Yield the slots that one rank has, in portions of limited size."""
        portion: list[_RemoteSlot] = []
        filled = 0
        for slot in self._slots.values():
            if slot.rank != rank or not slot.is_on_owner_only:
                continue
            size = byte_size(slot.variable)
            if portion and filled + size > _GATHERED_BYTES:
                yield portion
                portion, filled = [], 0
            portion.append(slot)
            filled += size
        if portion:
            yield portion

    def forget(self, variable: keras.Variable) -> bool:
        """Forget a variable; return whether its value is lost."""
        slot = self._slots.pop(id(variable), None)
        if slot is None or variable._value is not slot:
            return False
        slot.held = self._variables.pop_original(variable)
        slot.is_lost = True
        return True

    def forget_all(self) -> int:
        """Forget all variables; return the number of lost values."""
        slots = list(self._slots.values())
        return sum(self.forget(slot.variable) for slot in slots)
