"""How variables are divided over towers, and what ranks call them.

Ports the first stage of ZeRO, and the third, which is also FSDP (Rajbhandari et
al., "ZeRO: memory optimizations toward training trillion parameter models", SC
2020). Keras's ``apply`` is traced with the step, and the layout divides it. A
slot has the rows of its weight, and a gradient is added up where they are.
``weight_update.py`` places what is not divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers._notices import announce, first_time
from keras_towers.fit.components import TowerConfig
from keras_towers.fit.context.identity_dict import IdentityDict
from keras_towers.fit.weights.copies import copy_on_tower, native
from keras_towers.fit.weights.model_state import slots_of
from keras_towers.fit.weights.shards import SMALLEST_BYTES, choose_layout
from keras_towers.partition.layouts import MeshLayout
from keras_towers.rendezvous import rank_checks


class VariableLayouts:
    """How a strategy divides large weights and their slots over its towers.

    Args:
        config: the towers.
        option: what the user has set, which divides them; empty: nothing is
            divided.
        divides_weights: whether weights are in shards. Otherwise only slots
            are, as in stage 1 of ZeRO: each tower computes its rows of a new
            weight, and all towers gather them.

    Attributes:
        name: one word: ``"sharded"`` or ``"mesh"``.
        option: as above.
        divides_weights: as above.
    """

    name = "sharded"

    def __init__(
        self,
        config: TowerConfig,
        option: str = "",
        divides_weights: bool = False,
    ):
        self._config = config
        self.option = option
        self.divides_weights = divides_weights
        # The places of those that ranks know.
        self._places: IdentityDict[Any, str] = IdentityDict()
        self._agreements = 0

    @property
    def description(self) -> str:
        """A short phrase for ``describe()``."""
        line = "every tower updates its share of the weights"
        if not self.divides_weights:
            return line
        least = f"{SMALLEST_BYTES // 1024} KiB"
        return f"{line}, and holds only its shards of those from {least}"

    @property
    def divide_any(self) -> bool:
        """Whether they may divide a variable."""
        return bool(self.option)

    @property
    def are_over_ranks(self) -> bool:
        """Whether each rank has rows of variables in shards."""
        return self.divide_any and self._config.shards.size > 1

    @property
    def towers(self) -> int:
        """The number of towers that divide a variable together."""
        return self._config.num_towers * self._config.shards.size

    def choose(
        self, variable: Any, shape: Sequence[int], dtype: tf.DType
    ) -> MeshLayout:
        """Return how a variable is divided.

        Args:
            variable: the variable, whose value may not exist yet.
            shape: its shape.
            dtype: its dtype.
        """
        return choose_layout(shape, dtype.size, self.towers)

    def of(self, variable: Any) -> MeshLayout:
        """Return how a weight and its slots are divided."""
        value: Any = copy_on_tower(native(variable))
        # The functions of a loaded model have the handle of such a variable.
        is_loaded = type(value) is compat.UninitializedVariable
        if not self.divide_any or is_loaded:
            return MeshLayout()
        return self.choose(variable, value.shape.as_list(), value.dtype)

    def divide_new(self, variable: keras.Variable) -> bool:
        """Whether to divide a weight that is about to be created."""
        shape, dtype = variable._shape, tf.as_dtype(variable.dtype)
        if shape is None or not variable.trainable or not self.divides_weights:
            return False
        return self.choose(variable, shape, dtype).divides

    def announce(
        self, optimizer: Any, weights: Sequence[Any], divides: bool
    ) -> None:
        """Announce once that an optimizer divides nothing, though it should.

        Args:
            optimizer: an optimizer that is ready.
            weights: the weights that it updates.
            divides: whether one of them is divided, or its slots are.
        """
        if divides or self.towers == 1:
            return
        is_first = first_time(optimizer, "nothing in shards")
        if is_first and self._config.transport.rank == 0:
            announce(
                f"{self.option} divides none of the {len(weights)} weights "
                f"that optimizer {optimizer.name!r} updates, since each is "
                f"smaller than {SMALLEST_BYTES // 1024} KiB, or has no axis "
                f"with a row for each of {self.towers} towers. Every tower "
                "holds all of them."
            )

    # ---- what ranks call variables of which each has rows --------------------

    def may_divide(self, variable: Any) -> bool:
        """Whether ranks have agreed on a variable, if each is to have rows."""
        return not self.are_over_ranks or variable in self._places

    def place_of(self, variable: Any) -> str:
        """Return what all ranks call a variable; empty: they need no name."""
        return self._places.get(variable, "")

    def name_places(self, weights: Sequence[Any], number: int) -> None:
        """Name weights by their places in the model.

        Only then are they divided over ranks, which have agreed on their
        values.

        Args:
            weights: the weights, in the order of the model.
            number: the number of this agreement of the ranks.
        """
        self._agreements = number
        for index, weight in enumerate(weights):
            self._places.setdefault(weight, f"{number}.{index}")

    def name_created(self, weight: Any) -> None:
        """Name a weight that all ranks create in a step, with one value."""
        if self.are_over_ranks:
            path = rank_checks.without_numbers(weight.path)
            self._places[weight] = self._numbered(f"{self._agreements}: {path}")

    def name_slots(self, optimizers: Sequence[Any]) -> None:
        """Name slots whose values all ranks have agreed on."""
        for optimizer in optimizers:
            for slot, weight in slots_of(optimizer) if optimizer.built else ():
                self.name_slot(slot, weight)

    def name_slot(self, slot: keras.Variable, weight: Any) -> None:
        """Name a slot whose value is the same on all ranks, by its weight."""
        is_new = slot not in self._places and weight in self._places
        if self.are_over_ranks and is_new:
            path = rank_checks.without_numbers(slot.path)
            place = f"{self._agreements}: {path} of {self._places[weight]}"
            self._places[slot] = self._numbered(place)

    def _numbered(self, place: str) -> str:
        """Tell a place from equal ones, which ranks name in the same order."""
        others = sum(
            other.startswith(f"{place} (") for other in self._places.values()
        )
        return f"{place} ({others})"

    def forget(self, variable: keras.Variable) -> None:
        """Forget a variable that is whole again."""
        self._places.pop(variable, None)

    def forget_all(self) -> None:
        """Forget all variables."""
        for variable in [*self._places]:
            del self._places[variable]
