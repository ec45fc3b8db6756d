"""The binding of a model to a strategy: its stages, and its default strategy.

::

    FREE ──> COMPILED ──┐
      ├────> CREATED ───┤
      └─────────────────┴──> CLAIMED ──> PLACED <──> APART

From each of them a model goes back to ``FREE`` when it is released. Two more
facts are not stages of a model: a call prepares its model anew, whatever the
stage (``TowerCall``), and each variable in shards knows whether this rank has
the whole of it (``ShardedVariable``).

Traced functions are dropped or made again here, where devices change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit.components import (
    TRAINING,
    KerasStrategy,
    TowerConfig,
    active_strategy,
    tower_strategy_of,
)
from keras_towers.fit.weights import model_state as state_lib
from keras_towers.foundation import compat
from keras_towers.foundation.notices import announce, first_time
from keras_towers.jobs.rendezvous import failed_calls

# Shadows that remain on a model if calls of it in two threads overlap.
_SHADOWS_OF_CALLS = (
    "_maybe_symbolic_build",
    "_get_metrics_result_or_logs",
    "_make_function",
    "make_train_function",
    "make_test_function",
    "make_predict_function",
)

# The attributes that bind a model to a strategy and its calls.
_BOUND = (
    "_distribute_strategy",
    "train_function",
    "test_function",
    "predict_function",
    "_eval_epoch_iterator",
    *_SHADOWS_OF_CALLS,
)

# The strategies on whose towers models train outside of any block.
defaults: weakref.WeakKeyDictionary[keras.Model, Any] = (
    weakref.WeakKeyDictionary()
)


class ModelStage(enum.Enum):
    """The stages of a model on its way through a strategy."""

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
        # The stages of all models that are not ``FREE``.
        self._stages: weakref.WeakKeyDictionary[keras.Model, ModelStage] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, model: keras.Model) -> ModelStage:
        """Return the stage of a model."""
        return self._stages.get(model, ModelStage.FREE)

    def move(self, model: keras.Model, stage: ModelStage) -> None:
        """Move a model to a stage; it may be there already.

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


def strategy_that_runs(model: keras.Model, kind: str) -> KerasStrategy | None:
    """Return the strategy on whose towers a method of a model runs.

    It is the strategy of the current block, else the model's strategy, else, if
    the method trains, the strategy of the block in which the model was created
    or compiled.
    """
    strategy = active_strategy() or tower_strategy_of(model)
    outside = strategy is None and not tf.distribute.has_strategy()
    return defaults.get(model) if outside and kind in TRAINING else strategy


def announce_default(
    model: keras.Model, kind: str, config: TowerConfig
) -> None:
    """Announce once that a model trains on towers outside of a block."""
    if kind not in TRAINING or config.job.rank:
        return
    line = (
        f"{kind} of model {model.name!r} runs on the strategy under which it "
        f"was created or compiled: {config.strategy!r}"
    )
    if first_time(model, line):
        announce(line)


def release_from_default(trainer: keras.Model) -> None:
    """Turn a model placed outside of any block into an ordinary one."""
    owner = tower_strategy_of(trainer)
    if owner is not None:
        adoption = owner._adoption
        if defaults.get(trainer) is owner and not adoption.in_block:
            # Another strategy may be active.
            with compat.single_device_mode():
                adoption.release_model(trainer)


@contextlib.contextmanager
def ignoring_default_strategy(model: keras.Model) -> Iterator[None]:
    """Train on one device in this block, even if a model has a default."""
    default = defaults.pop(model, None)
    try:
        yield
    finally:
        if default is not None:
            defaults[model] = default


@contextlib.contextmanager
def unbound(model: keras.Model) -> Iterator[None]:
    """In this block, take a model off its strategy and its running calls.

    Its variables stay where they are.
    """
    with contextlib.ExitStack() as stack:
        for trainer in state_lib.models_in(model):
            own = vars(trainer)
            before = {name: own.pop(name) for name in _BOUND if name in own}
            stack.callback(own.update, before)
            unbind(trainer)
        yield


def unbind(trainer: keras.Model) -> None:
    """Unbind a model from its strategy; it may train there by default."""
    trainer._distribute_strategy = None
    drop_functions(trainer)
    for name in ("_eval_epoch_iterator", *_SHADOWS_OF_CALLS):
        vars(trainer).pop(name, None)


def drop_functions(trainer: keras.Model) -> None:
    """Drop the traced train, test and predict functions."""
    for kind in ("train", "test", "predict"):
        setattr(trainer, f"{kind}_function", None)


def renew_functions(trainer: keras.Model, but: str = "") -> None:
    """Recreate existing traced functions, for a running ``fit``.

    Args:
        trainer: the model.
        but: the name of the one that is being traced.
    """
    for kind in ("train", "test", "predict"):
        name = f"{kind}_function"
        if name != but and getattr(trainer, name) is not None:
            getattr(trainer, f"make_{kind}_function")(force=True)


class PreparedMethods:
    """The methods of models that all ranks have prepared for calls."""

    def __init__(self) -> None:
        # By model and method, the compilation for which it is prepared.
        self._for: weakref.WeakKeyDictionary[
            keras.Model, dict[str, _Compilation]
        ] = weakref.WeakKeyDictionary()

    def have(self, model: keras.Model, kind: str) -> bool:
        """Whether a method is prepared for the model's current compilation."""
        return self._for.get(model, {}).get(kind) == _compilation(model)

    def had_another(self, model: keras.Model, kind: str) -> bool:
        """Whether a method was prepared for another compilation."""
        before = self._for.get(model, {}).get(kind)
        return before is not None and before.parts != _compilation(model).parts

    def add(self, model: keras.Model, kind: str) -> None:
        """Record that a method of the model is prepared."""
        self._for.setdefault(model, {})[kind] = _compilation(model)

    def forget(self, model: keras.Model) -> None:
        """Prepare the methods of a model again before their next calls."""
        self._for.pop(model, None)

    def clear(self) -> None:
        """Forget all models."""
        self._for.clear()


@dataclasses.dataclass(frozen=True)
class _Compilation:
    """The compilation for which a method of a model is prepared.

    Attributes:
        parts: what ``compile`` has made.
        built: whether each of them is built.
        failed: how many calls of the ranks have failed.
    """

    parts: tuple[weakref.ref[Any] | None, ...]
    built: tuple[bool | None, ...]
    failed: int


def _compilation(model: keras.Model) -> _Compilation:
    """Return the compilation of a model.

    It is another one once the model is compiled again or built further, or
    ranks have connected again after a call that has failed.
    """
    parts = [
        getattr(model, name, None)
        for name in ("optimizer", "_compile_metrics", "_compile_loss")
    ]
    return _Compilation(
        # Not their ids, which are used again.
        tuple(None if part is None else weakref.ref(part) for part in parts),
        tuple(getattr(part, "built", None) for part in parts),
        failed_calls.calls.failed,
    )
