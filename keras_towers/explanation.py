"""``kt.explain``: what a step of training does on towers, line by line."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit.calls.synchronous_calls import TowerCalls
from keras_towers.fit.context import patches
from keras_towers.fit.data.epoch_iterator import Undistributed
from keras_towers.fit.step.program_text import describe_program
from keras_towers.fit.weights import adoption, model_state
from keras_towers.strategies.base import BaseStrategy
from keras_towers.verification import checked_strategy, restored_values


@dataclasses.dataclass(frozen=True)
class Explanation:
    """A step of training on towers, as text.

    Attributes:
        description: the strategy's ``describe()``.
        program: the lines of the step: levels, and in each of them operations,
            exchanges and updates.
    """

    description: str
    program: Sequence[str]

    def __str__(self) -> str:
        return "\n".join([self.description, *self.program])


def explain(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    *,
    strategy: Any = None,
    batch_size: int | None = None,
) -> Explanation:
    """Explain what a step of ``fit`` does on towers, without running it.

    This traces and divides the step as ``fit`` does. Each line of the result
    describes operations, an exchange or an update of a level:

    * the place: ``once``, if one device computes it for all; all ``towers`` or
      their ``columns``; or the axes of an exchange;
    * the layout of the result: ``rows`` of the batch or a ``shard`` of a
      variable on each tower, a ``partial`` sum, or the ``whole``; its dtype,
      and its shape on one device. A ``local`` value exists only on towers, and
      has its shape on a tower. On columns, shapes are those of a column's part;
    * the operations, or the bytes of an exchange, and the line of code.

    Afterwards, variables and the random generators of Python and NumPy have
    their old values. If the model is not built, this builds it. A generator has
    lost the batch that was drawn.

    Args:
        model: a compiled model.
        x: data, as for ``fit``: arrays, dictionaries, datasets, generators.
        y: targets, as for ``fit``.
        sample_weight: weights of the examples, as for ``fit``.
        strategy: the towers; None: ``TowerStrategy()``.
        batch_size: examples in a batch of arrays, as for ``fit``.

    Raises:
        TowerError: the model is not compiled, runs eagerly, or is on towers;
            there is no data, or ``strategy`` is invalid or divides no step.

    Example:
        >>> print(keras_towers.explain(model, x, y))
        TowerStrategy: 2 towers (/device:CPU:0 to /device:CPU:1)
          ...
        1 level, for n examples in the global batch
        level 0
          towers           rows float32[n, 3]     MatMul, AddV2: dense, in ...
          sum over towers  partial float32[5, 3]  60 bytes, gradient of ...
          update                                  SGD: 2 weights
    """
    strategy = checked_strategy("explain", model, x, strategy)
    if model_state.runs_eagerly(model):
        raise TowerError(
            f"explain got model {model.name!r}, which runs eagerly, so towers "
            "do not divide its steps: leave out "
            f"{model_state.eager_cause(model)}."
        )
    calls = _calls_of(strategy)
    arrays = (x, y, sample_weight, batch_size)
    reader = compat.TFEpochIterator(Undistributed, *arrays)
    dataset = reader._distributed_dataset
    size = reader.data_adapter.batch_size or compat.batch_size_of(dataset)
    with (
        restored_values(model),
        adoption.ignoring_default_strategy(model),
        # The description says it.
        patches.shadowed(strategy, {"_announce": lambda: None}),
        strategy,
    ):
        traced, program = calls.plan(model, dataset.element_spec, size)
        lines = describe_program(traced, program, calls.places("fit"), size)
    return Explanation(strategy.describe(), lines)


def _calls_of(strategy: BaseStrategy) -> TowerCalls:
    """Return the calls of a strategy that divides steps over towers."""
    calls = strategy._calls
    # Others run the steps of one device, each on a batch of its own.
    if type(calls) is not TowerCalls or calls.runs_plain_keras:
        raise TowerError(
            f"strategy={strategy!r} divides no step, so there is nothing to "
            "explain: give one whose towers share each batch, such as "
            "TowerStrategy(2)."
        )
    return calls
