"""The position of ``fit`` in a backup, and how a model gets its state back.

Each rank reads the rows of its own towers, whatever the number of ranks that
wrote them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from keras_towers.backups.backup_folder import CallFolder
from keras_towers.fit import components
from keras_towers.fit.calls import tower_call
from keras_towers.fit.components import FitStart
from keras_towers.fit.places import ALONE
from keras_towers.fit.weights import agreement, checkpoint
from keras_towers.fit.weights.model_state import collect, trained_by
from keras_towers.fit.weights.shards import spans_ranks
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Variable
from keras_towers.jobs.rendezvous import rank_checks
from keras_towers.reduction.rank_sum import RankSum, StateLayout
from keras_towers.transport import Transport


def ranks_now() -> Transport:
    """Return the transport to the ranks that train, which may be one."""
    strategy = components.active_strategy()
    return ALONE if strategy is None else strategy._config.transport


def rank_sum_now() -> RankSum | None:
    """Return the ``RankSum`` of the current strategy, or None."""
    strategy = components.active_strategy()
    return None if strategy is None else strategy._update.rank_sum


def divides_over_ranks() -> bool:
    """Whether each rank has rows of variables, and must write them."""
    strategy = components.active_strategy()
    return strategy is not None and strategy._update.sharding.divides_over_ranks


@dataclasses.dataclass
class Position(FitStart):
    """The position of a call of ``fit``.

    Attributes:
        history: the logs of the epochs that are done.
        begun: how many calls of ``fit`` with this folder have begun.
    """

    history: dict[str, list[object]] = dataclasses.field(default_factory=dict)
    begun: int = 0


@dataclasses.dataclass
class SavedState:
    """The state of a model in a backup.

    Attributes:
        name: that of its checkpoint.
        variables: their names there, in the order of the model.
        shapes: of each, the shape and dtype.
        trained: for each optimizer, the numbers of the weights that it updates.
    """

    name: str
    variables: list[str]
    shapes: list[str]
    trained: list[list[int]]

    def restore(
        self,
        model: keras.Model,
        folder: CallFolder,
        metrics: Sequence[np.ndarray] | None,
    ) -> None:
        """Restore a model's state. Collective.

        Args:
            model: the model.
            folder: that of the backup.
            metrics: the metrics in the middle of an epoch; None: it is not in
                the middle of one.
        """
        call = tower_call.current()
        if call is not None:
            call.prepare_all()
        self._build_optimizers(model)
        variables = [*checkpoint.named_variables(model).values()]
        saved, own = [*self.shapes], [*variables]
        if metrics is not None:
            saved += shapes_of(metrics)
            own += collect(model).metrics
        if saved != shapes_of(own):
            raise TowerError(
                f"{folder.path} is the backup of another model, or of one "
                f"that was compiled differently from {model.name!r}: use "
                "another folder, or delete it."
            )
        prefix = folder.prefix(self.name)
        pairs = [*zip(variables, self.variables, strict=True)]
        common = [(v._value, name) for v, name in pairs if not spans_ranks(v)]
        transport = ranks_now()

        def read_own_rows() -> None:
            with folder.refusing_damage():
                for variable, name in pairs:
                    if spans_ranks(variable):
                        checkpoint.read_into(prefix, name, variable)

        def read(number: int) -> tf.Tensor:
            value, name = common[number]
            with folder.refusing_damage():
                return checkpoint.read(prefix, name, value.dtype)

        if len(common) < len(pairs):
            where = "reads its part of the backup"
            rank_checks.gather_result(transport, read_own_rows, where)
        values = [value for value, _ in common]
        agreement.broadcast(transport, values, given=read)

    def _build_optimizers(self, model: keras.Model) -> None:
        """Create the slots of optimizers that a step would create."""
        strategy, state = components.active_strategy(), collect(model)
        # Other optimizers or weights are refused later.
        pairs = zip(state.optimizers, self.trained, strict=False)
        for optimizer, numbers in pairs:
            trained = [
                state.weights[n] for n in numbers if n < len(state.weights)
            ]
            if strategy is not None and trained and not optimizer.built:
                strategy._update.make_ready(optimizer, trained)


def trained_in(model: keras.Model) -> list[list[int]]:
    """Return the numbers of the weights that each optimizer updates."""
    state = collect(model)
    numbers = {id(w): n for n, w in enumerate(state.weights)}
    return [
        [numbers[id(w)] for w in trained_by(o) if id(w) in numbers]
        for o in state.optimizers
    ]


def shapes_of(variables: Iterable[Variable | np.ndarray]) -> list[str]:
    """Return the shape and dtype of each variable, as text."""
    return [f"{list(v.shape)} {v.dtype}" for v in variables]


def of_hook(rank: int, number: int) -> str:
    """Return the name of a tensor of a communication hook's state."""
    return f"hook/{rank:03d}/{number:03d}"


def leaves_of(
    layout: StateLayout,
) -> Iterator[tuple[list[int | None], str, bool]]:
    """Yield the tensors of a hook's state, given its layout."""
    for states in layout:
        yield from itertools.chain(*states)
