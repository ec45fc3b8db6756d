"""Variables on chosen devices, or on other ranks, until they are given back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import keras
import tensorflow as tf

from keras_towers.devices import same_device
from keras_towers.errors import TowerError
from keras_towers.fit.context.by_identity import ByIdentity
from keras_towers.fit.weights import tower_variables as variables_lib
from keras_towers.placement import byte_size
from keras_towers.transport import Transport, next_key

_HOST = "CPU:0"
# Ranks gather so much at a time: it is in memory three times then.
_GATHERED_BYTES = 64 * 2**20


class RelocatedVariables:
    """Moves variables to chosen devices, and back."""

    def __init__(self, empties: bool = True) -> None:
        self._empties = empties
        # The original tf.Variable of each, to which users may hold references,
        # and the device that it goes back to.
        self._before: ByIdentity[keras.Variable, tuple[tf.Variable, str]] = (
            ByIdentity()
        )

    def __contains__(self, variable: keras.Variable) -> bool:
        return variable in self._before

    def place(
        self, variable: keras.Variable, device: str, home: str | None = None
    ) -> None:
        """Move a variable.

        Its home is where it is to be in the end, by default where it was before
        its first move.
        """
        value = variable._value
        if variable in self._before:
            variable._value = variables_lib.relocated(value, device)
            return
        # Recorded first, so that a Ctrl-C in between is undone too.
        self._before[variable] = value, home or value.device
        variable._value = variables_lib.relocated(value, device)
        if self._empties and variable._value is not value:
            overwrite(value, tf.zeros([0], value.dtype))

    def pop_original(self, variable: keras.Variable) -> tf.Variable:
        """Return the original ``tf.Variable`` without restoring it."""
        before, _ = self._before[variable]
        del self._before[variable]
        return before

    def bytes_on(self, device: str) -> int:
        """Return the bytes of all variables that were moved to a device."""
        return sum(
            byte_size(variable.shape, variable.dtype) or 0
            for variable in self._before
            if same_device(variable._value.device, device)
        )

    def restore(self, variable: keras.Variable) -> None:
        """Restore the original ``tf.Variable``, with the current value."""
        if variable not in self._before:
            return
        before, home = self._before[variable]
        if before is not variable._value:
            overwrite(before, variable._value.read_value())
        variable._value = variables_lib.relocated(before, home)
        del self._before[variable]

    def restore_all(self) -> None:
        """Restore every variable that is still moved, whatever fails."""
        with contextlib.ExitStack() as stack:
            for variable in self._before:
                stack.callback(self.restore, variable)


def overwrite(variable: tf.Variable, value: tf.Tensor) -> None:
    """Assign a value of any shape."""
    with tf.device(variable.device):
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


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
        """Take a value, if training is over."""
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
    """Whether only another rank has the value of a variable now."""
    return isinstance(getattr(variable, "_value", None), _Absent)


class SlotsSharedByRanks:
    """Slot variables that one rank each holds while steps run.

    Between calls every rank has all of them, those of others on the host.
    """

    def __init__(self, transport: Transport):
        self._transport = transport
        # Ranks have to gather the same variables, so they pop_original none.
        self._ranks: ByIdentity[keras.Variable, int] = ByIdentity(weak=False)
        # Those that steps use, and whether one rank alone has them now.
        self._shared: ByIdentity[keras.Variable, bool] = ByIdentity(weak=False)
        self._on_host = RelocatedVariables()
        self._are_all_shared = False

    def add(self, slot: keras.Variable, rank: int, home: str) -> None:
        """Note which rank needs a slot variable, unless it is known."""
        if slot in self._ranks:
            return
        self._ranks[slot] = rank
        if rank != self._transport.rank:
            self._on_host.place(slot, _HOST, home)

    def make_ready(self, variables: Iterable[keras.Variable]) -> None:
        """Share the known slots among some variables from now on.

        Until then their values are those of rank 0, which may have loaded them.
        """
        for slot in variables:
            if slot in self._ranks and slot not in self._shared:
                self._shared[slot] = self._are_all_shared = False

    def drop_those_of_others(self) -> None:
        """Drop the values that other ranks keep: steps follow."""
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
        """Give all ranks the values of all slots, if not all have them."""
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
        """Restore the original, if the slot is another rank's."""
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
        """Restore every slot; return how many have no value here."""
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
