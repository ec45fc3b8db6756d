"""A model's way through a strategy: its stages, and which one follows which.

::

    FREE ──> COMPILED ──┐
      ├────> CREATED ───┤
      └─────────────────┴──> CLAIMED ──> PLACED <──> APART

From each of them a model goes back to ``FREE`` when it is released. Two more
facts are not stages of a model: a call prepares its model anew, whatever the
stage (``TowerCall``), and each variable in shards knows whether this rank has
the whole of it (``ShardedVariable``).
"""

from __future__ import annotations

import enum
import weakref

import keras


class ModelStage(enum.Enum):
    """Where a model is on its way through a strategy."""

    FREE = "an ordinary model, of which the strategy knows nothing"
    COMPILED = "compiled in the block, and not created or used there"
    CREATED = "created in the block, and not used there"
    CLAIMED = "bound to the strategy, as are its optimizers and nested models"
    PLACED = "bound, and its variables are on the towers"
    APART = "placed, and since a step each rank may have a part of its state"

    @property
    def is_bound(self) -> bool:
        """Whether the strategy runs the calls of a model."""
        return self in (ModelStage.CLAIMED, ModelStage.PLACED, ModelStage.APART)


NEXT: dict[ModelStage, frozenset[ModelStage]] = {
    ModelStage.FREE: frozenset(
        (ModelStage.COMPILED, ModelStage.CREATED, ModelStage.CLAIMED)
    ),
    ModelStage.COMPILED: frozenset((ModelStage.CLAIMED, ModelStage.FREE)),
    ModelStage.CREATED: frozenset((ModelStage.CLAIMED, ModelStage.FREE)),
    ModelStage.CLAIMED: frozenset((ModelStage.PLACED, ModelStage.FREE)),
    ModelStage.PLACED: frozenset((ModelStage.APART, ModelStage.FREE)),
    ModelStage.APART: frozenset((ModelStage.PLACED, ModelStage.FREE)),
}
"""The stages that may follow each one."""


class ModelStages:
    """The stages of models on one strategy.

    Models that the user has dropped are freed, even inside the block.
    """

    def __init__(self) -> None:
        # Those that are not free.
        self._stages: weakref.WeakKeyDictionary[keras.Model, ModelStage] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, model: keras.Model) -> ModelStage:
        """Return the stage of a model."""
        return self._stages.get(model, ModelStage.FREE)

    def move(self, model: keras.Model, stage: ModelStage) -> None:
        """Move a model to a stage, where it may be already.

        Raises:
            AssertionError: the stage does not follow that of the model.
        """
        before = self.of(model)
        if stage is not before and stage not in NEXT[before]:
            raise AssertionError(
                f"model {model.name!r} cannot go from stage {before.name} to "
                f"{stage.name}: it is {before.value}."
            )
        if stage is ModelStage.FREE:
            self._stages.pop(model, None)
        else:
            self._stages[model] = stage

    def at(self, *stages: ModelStage) -> list[keras.Model]:
        """Return the models at some stages."""
        return [m for m, stage in self._stages.items() if stage in stages]

    @property
    def bound(self) -> list[keras.Model]:
        """The models whose calls the strategy runs."""
        return [m for m, stage in self._stages.items() if stage.is_bound]

    def free_all(self) -> None:
        """Move all models to ``FREE``."""
        self._stages.clear()
