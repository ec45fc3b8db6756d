"""Which weights and slots are copied, placed or sharded (ZeRO) over towers.

Sharding follows stages 1 and 3 of ZeRO; the latter is also known as FSDP
(Rajbhandari et al., "ZeRO: memory optimizations toward training trillion
parameter models", SC 2020). A slot has the rows of its weight, and gradients
are summed where these rows are. Keras's ``apply`` is traced with the step, and
the layout divides it. ``weight_update.py`` asks a policy, and places variables;
``strategies/modes.py`` chooses the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit.components import TowerConfig
from keras_towers.fit.options import Shards
from keras_towers.fit.weights.copies import copy_on_tower, native
from keras_towers.fit.weights.least_loaded import Placement
from keras_towers.fit.weights.shards import SMALLEST_BYTES, choose_layout
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.incomplete_classes import name_of
from keras_towers.foundation.notices import announce, first_time
from keras_towers.partition.ir.layouts import MeshLayout
from keras_towers.transport import devices


class ShardingPolicy:
    """Decides where towers have weights and slots: here, whole on tower 0.

    Tower 0 has the slot variables, updates the weights, and copies them to the
    other towers.

    Args:
        config: the towers.
        mirrors: whether each tower has a copy of the weights; None: unless all
            towers are on the host.

    Attributes:
        name: one word: ``"once"``, ``"each"``, ...
        option: the option that divides variables, as text; empty: nothing is
            divided.
        divides_weights: whether weights are in shards. Otherwise only slots
            are, as in stage 1 of ZeRO: each tower computes its rows of a new
            weight, and all towers gather them.
        keeps_devices: whether each weight has a device of its own.
        each: whether every tower has, and updates, weights and slots.
        mirrors: whether each tower has a copy of the weights.
    """

    name = "once"
    option = ""
    divides_weights = False
    keeps_devices = False
    each = False

    def __init__(self, config: TowerConfig, mirrors: bool | None = None):
        self._config = config
        if mirrors is None:
            mirrors = not devices.all_on_host(config.devices)
        self.mirrors: bool = mirrors and config.num_towers > 1

    @property
    def description(self) -> str:
        """A short phrase for ``describe()``."""
        copied = " and copied to the other towers" if self.mirrors else ""
        return f"weights are updated on tower 0{copied}"

    def device_of(self, weight: keras.Variable) -> str:
        """Return the device of a weight, if it has one of its own."""
        raise NotImplementedError

    @property
    def divide_any(self) -> bool:
        """Whether any variable may be divided."""
        return bool(self.option)

    @property
    def shards(self) -> Shards | None:
        """What is divided: weights, with their slots, or only updates."""
        if not self.divide_any:
            return None
        return "weights" if self.divides_weights else "updates"

    @property
    def is_given(self) -> bool:
        """Whether the user has chosen the option. Otherwise memory required it.

        A mesh has layouts.
        """
        return self.option in (*self._config.options.in_shards, "layouts")

    @property
    def to_stay_whole(self) -> str:
        """What a user does to have whole variables, as a part of a sentence."""
        name = self.option.partition("=")[0]
        if self.is_given:
            return f"leave {name} out"
        # Memory would require shards of slots next.
        weights = 'weights="whole" and ' if self.divides_weights else ""
        return f'give {weights}updates="once"'

    @property
    def divides_over_ranks(self) -> bool:
        """Whether each rank has rows of variables in shards."""
        return self.divide_any and self._config.shards.size > 1

    @property
    def updates_each(self) -> bool:
        """Whether every tower updates its own copy of undivided variables."""
        return (self.each or self.divide_any) and self.mirrors

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
        return MeshLayout()

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
        """Announce that nothing is divided, if the user may expect it.

        Args:
            optimizer: an optimizer that is ready.
            weights: the weights that it updates.
            divides: whether one of them is divided, or its slots are.
        """


class OnEachTower(ShardingPolicy):
    """Policy: every tower has copies of weights and slots, and updates them."""

    name = "each"
    each = True

    def __init__(self, config: TowerConfig):
        super().__init__(config, mirrors=True)

    @property
    def description(self) -> str:
        return "every tower updates its own weights"


class OnDevices(ShardingPolicy):
    """Policy: each weight, with its slots, is on one device that updates it.

    Args:
        config: the towers.
        place: returns the device of a weight.
    """

    name = "at_variable"
    keeps_devices = True

    def __init__(self, config: TowerConfig, place: Placement):
        super().__init__(config, mirrors=False)
        self._place = place

    @property
    def description(self) -> str:
        return "trained weights exist once and are updated in place"

    def device_of(self, weight: keras.Variable) -> str:
        chosen = self._place(weight)
        known = [d.name for d in tf.config.list_logical_devices()]
        if not isinstance(chosen, str) or not any(
            devices.same_device(chosen, name) for name in known
        ):
            raise TowerError(
                f"the placement {name_of(self._place)} puts {weight.path} on "
                f"{chosen!r}: it must return one of {', '.join(known)}."
            )
        return chosen


class ShardedOverTowers(ShardingPolicy):
    """Policy: large weights, or only their slots, are divided (ZeRO).

    Args:
        config: the towers.
        option: the option that divides variables, as text.
        divides_weights: whether weights are divided, or only their slots.
        each: whether every tower has, and updates, undivided variables.
    """

    name = "sharded"

    def __init__(
        self,
        config: TowerConfig,
        option: str,
        divides_weights: bool,
        each: bool = False,
    ):
        super().__init__(config, mirrors=True if each else None)
        self.option = option
        self.divides_weights = divides_weights
        self.each = each

    @property
    def description(self) -> str:
        line = "every tower updates its share of the weights"
        if not self.divides_weights:
            return line
        least = f"{SMALLEST_BYTES // 1024} KiB"
        return f"{line}, and holds only its shards of those from {least}"

    def choose(
        self, variable: Any, shape: Sequence[int], dtype: tf.DType
    ) -> MeshLayout:
        return choose_layout(shape, dtype.size, self.towers)

    def announce(
        self, optimizer: Any, weights: Sequence[Any], divides: bool
    ) -> None:
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
