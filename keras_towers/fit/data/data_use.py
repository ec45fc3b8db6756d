"""The use of data by a call of Keras, and who has divided the data."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import keras
import tensorflow as tf

from keras_towers.fit.components import TowerConfig, words_for_another
from keras_towers.fit.places import Places
from keras_towers.foundation.errors import TowerError

if TYPE_CHECKING:
    from keras_towers.fit.data.shuffle_order import ShuffleOrder


class Owner(enum.Enum):
    """The owner of a dataset: who has made or distributed it."""

    ALL = "of all ranks: every tower takes its rows of each batch"
    RANK = "of this rank: every tower takes batches of its own"
    TOWER = "of one tower, which takes the next batch when it needs one"
    USER = "of the user, who has divided it over the towers"


@dataclasses.dataclass(frozen=True, eq=False)
class DataUse:
    """The use of data by a call of a Keras method.

    Attributes:
        config: the towers.
        places: those of its steps.
        kind: the method of Keras that reads the data.
        order: makes all ranks shuffle identically.
        whole: whether each batch is for one tower.
        epochs: how often it is iterated over with the same data iterator; None:
            unknown.
        state: returns the variables that steps write.
        on_next_step: called before each step.
        end_data: called with the number of batches if data that all ranks share
            ends at a batch that Keras expects.
        within: returns the block in which code of the data runs in this thread,
            given where: "Mine.on_epoch_end".
    """

    config: TowerConfig
    places: Places
    kind: str
    order: ShuffleOrder | None = None
    whole: bool = False
    epochs: int | None = None
    state: Callable[[], Collection[keras.Variable]] = list
    on_next_step: Callable[[], None] = lambda: None
    end_data: Callable[[int], None] = lambda batches: None
    within: Callable[[str], contextlib.AbstractContextManager[None]] = (
        lambda where: contextlib.nullcontext()
    )

    def owner_of(self, dataset: tf.data.Dataset) -> Owner:
        """Return the owner of a dataset.

        Raises:
            TowerError: it is distributed by another strategy, or each tower
                takes whole batches.
        """
        if isinstance(dataset, tf.distribute.DistributedDataset):
            self._check_distributed(dataset)
            return Owner.USER
        if self.whole:
            return Owner.TOWER
        # Ranks with their own training data have their own validation data.
        each = self.config.options.batches == "each"
        own = each and (self.kind == "fit" or self.places.ranks.in_lockstep)
        return Owner.RANK if own else Owner.ALL

    def _check_distributed(self, dataset: tf.data.Dataset) -> None:
        """Reject a distributed dataset of another strategy, or of pieces."""
        own, other = self.config.strategy, dataset._strategy
        if self.whole:
            raise TowerError(
                f"{self.config.name} gives each tower whole batches, but "
                "fit() got a distributed dataset: pass the original dataset "
                "instead."
            )
        if other is not own:
            raise TowerError(
                f"{self.kind}() runs on a {self.config.name}, but its "
                "dataset was distributed by another "
                f"{words_for_another(other, own)}: pass the original dataset "
                "instead."
            )
