"""The components that a strategy is composed of.

The constructor of a strategy combines:

* a ``TowerConfig``: its devices, the processes, and how a batch is distributed;
* a ``WeightUpdate``: where trained weights and slot variables live, and who
  updates them. Others inherit from it;
* a ``TowerRunner``: how ``fit``, ``evaluate``, ... run. Others inherit from it.

``fit/`` depends only on these, never on the type of the strategy, and this
module on neither of the two.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit.options import Shards, StrategyOptions
from keras_towers.fit.places import ALONE, Places, Ranks
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Structure, Variable
from keras_towers.foundation.tf_strategy import Strategy
from keras_towers.jobs.rendezvous.rank_checks import Peers
from keras_towers.reduction.gradients import Gradient
from keras_towers.transport import Transport

# Methods of keras.Model that a strategy runs on its towers.
METHODS = (
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
)
TRAINING = ("fit", "train_on_batch")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TowerConfig:
    """The towers of a strategy, and how batches are distributed to them.

    Attributes:
        strategy: the ``tf.distribute.Strategy`` itself.
        devices: one device for each tower of this process.
        job: all processes that train together.
        transport: connects those that exchange tensors: all of them, or each
            is alone.
        options: how batches are distributed, and gradients summed.
        gradient_factor: multiplies the gradients of this process before they
            leave it.
        prefetches_to_towers: whether TensorFlow prefetches batches to the
            tower devices, as accelerators need.
        other_columns: for each tower, the further devices that divide its part
            of a step, as model parallelism does.
    """

    strategy: Strategy
    devices: Sequence[str]
    job: Peers
    transport: Transport
    options: StrategyOptions
    gradient_factor: float = 1.0
    prefetches_to_towers: bool = False
    other_columns: Sequence[Sequence[str]] = ()

    def places(self, kind: str) -> Places:
        """Return where the steps of a method compute, and with whom.

        Args:
            kind: one of ``METHODS``.
        """
        options = self.options
        job = self.job if self.job.size > 1 else ALONE
        # Ranks with data of their own predict independently, and train so if
        # they exchange nothing.
        is_own = options.batches == "each" and (
            job is not self.transport or kind.startswith("predict")
        )
        batch = ALONE if is_own else job
        in_rounds = options.sync_every is not None and kind in TRAINING
        step = ALONE if batch is ALONE or in_rounds else self.transport
        shards = ALONE if step is ALONE else self.shards
        ranks = Ranks(job, batch, step, shards, batch is self.transport)
        number = options.micro_batches
        given = number if isinstance(number, int) else 1
        return Places(ranks, self.mesh, given)

    @property
    def shards(self) -> Transport:
        """The ranks over whose towers variables in shards are divided."""
        within = self.options.shard_over == "process"
        return ALONE if within else self.transport

    @property
    def name(self) -> str:
        """The class name of the strategy, for messages."""
        return type(self.strategy).__name__

    @property
    def num_towers(self) -> int:
        """Number of towers in this process."""
        return len(self.devices)

    @property
    def mesh(self) -> list[list[str]]:
        """The devices of this process: for each tower, those of its columns."""
        others = self.other_columns or [[] for _ in self.devices]
        return [
            [device, *more]
            for device, more in zip(self.devices, others, strict=True)
        ]

    @property
    def divides(self) -> bool:
        """Whether steps differ from those of plain Keras."""
        cells = self.num_towers * self.job.size * len(self.mesh[0])
        options = self.options
        has_parts = options.micro_batches not in (None, 1)
        is_other = has_parts or bool(options.remat)
        return cells > 1 or is_other


@dataclasses.dataclass(eq=False)
class NamedGradients:
    """The gradients of N named variables; None for a missing gradient."""

    names: tuple[str, ...]
    grads: list[Gradient | None]

    def describe_gradients(self) -> list[str]:
        """Describe each gradient: variable, shape or ``sparse``, dtype."""
        lines = []
        for name, grad in zip(self.names, self.grads, strict=True):
            if grad is not None:
                sparse = isinstance(grad, tf.IndexedSlices)
                shape = "sparse" if sparse else grad.shape
                lines.append(f"{name} {shape} {grad.dtype.name}")
        return lines


def name_of(variable: Variable) -> str:
    """Return the Keras path of a variable if it has one, else its name."""
    return getattr(variable, "path", variable.name)


def check_equal_gradients(towers: Sequence[NamedGradients]) -> None:
    """Raise a TowerError if K towers have gradients of different variables."""
    first = towers[0]
    for index, other in enumerate(towers[1:], 1):
        if other.names != first.names:
            odd = sorted(set(first.names) ^ set(other.names)) or other.names
            raise TowerError(
                f"tower {index} and tower 0 train different variables: they "
                f"differ in {', '.join(odd)}. Every tower must run the same "
                "model: create variables in build(), independent of the data "
                "and of the replica."
            )
        odd = [
            name
            for name, a, b in zip(
                first.names, first.grads, other.grads, strict=True
            )
            if (a is None) != (b is None)
        ]
        if odd:
            raise TowerError(
                f"tower {index} and tower 0 do not have gradients for the same "
                f"variables: they differ in {', '.join(odd)}. Every tower has "
                "to compute the same loss."
            )


@dataclasses.dataclass(eq=False)
class ApplyCall(NamedGradients):
    """A call of an optimizer's ``apply`` in a step, for N variables."""

    optimizer: keras.optimizers.Optimizer
    # The optimizer's own ``apply``, of gradients and variables.
    original: Callable[[list[Gradient | None], list[Variable]], object]
    variables: list[Variable]
    # The names of those that the step reads after the call, where it is known.
    read_later: Sequence[str] = ()

    def update_variables(self) -> None:
        """Update the variables as Keras does."""
        self.original(self.grads, self.variables)


@dataclasses.dataclass
class FitStart:
    """The position at which a ``fit`` starts, and how it shuffles.

    Attributes:
        epoch: the first epoch, as Keras counts.
        batch: the number of batches of this epoch that are done.
        seed: orders arrays if there is no global seed.
        random_state: of Python's ``random`` before the first one, which orders
            ``PyDataset``s.
        epochs: those that are done.
    """

    epoch: int = 0
    batch: int = 0
    seed: int = 0
    random_state: Sequence[Any] = ()
    epochs: list[int] = dataclasses.field(default_factory=list)

    @property
    def done(self) -> int:
        """How many epochs are done."""
        return len(self.epochs)


@dataclasses.dataclass(frozen=True, eq=False)
class KerasCall:
    """A call of a Keras method, with its arguments by name."""

    # One of ``METHODS``, and Keras's original method.
    kind: str
    original: Callable[..., Structure]
    model: keras.Model
    # Changed in place, for example to replace callbacks.
    arguments: dict[str, Any]

    @classmethod
    def of(
        cls,
        kind: str,
        original: Callable[..., object],
        model: keras.Model,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> KerasCall:
        """Bind the user's arguments to their names."""
        bound = inspect.signature(original).bind(model, *args, **kwargs)
        _, *arguments = bound.arguments.items()
        named = dict(arguments)
        named.update(named.pop("kwargs", {}))
        return cls(kind, original, model, named)

    @property
    def trains(self) -> bool:
        """Whether its steps train."""
        return self.kind in TRAINING

    def call_keras(self) -> Structure:
        """Run Keras's own method."""
        return self.original(self.model, **self.arguments)


class TowerFunction:
    """A train, test or predict function for towers.

    Attributes:
        alone: the function for calls that only some ranks make, if any.
    """

    alone: TowerFunction | None = None

    def __call__(self, data: Structure) -> Structure:
        """Run the model's ``steps_per_execution`` steps.

        Args:
            data: an iterator of batches, or a list of them.
        """
        raise NotImplementedError


class KerasStrategy:
    """The base class of all strategies, as ``fit/`` sees them."""

    # Internal: its components. The base classes of the other two are above this
    # module, in ``fit/update`` and ``fit/calls``.
    _config: TowerConfig
    _update: Any
    _runner: Any
    # Whether options say where variables are, and who updates them.
    _follows_options: bool

    @property
    def _adoption(self) -> Any:
        return self._runner.adoption

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """Make the strategy TensorFlow's current one inside a block."""
        raise NotImplementedError

    def _divide(self, shards: Shards) -> None:
        """Divide variables from now on, by an option that was left out.

        Those that are on the towers already move when they are placed again.

        Args:
            shards: the option.
        """
        raise NotImplementedError

    def _for_dry_run(self, transport: Transport) -> KerasStrategy:
        """Return a strategy like this one that plans steps and never runs.

        Args:
            transport: connects its ranks.
        """
        raise NotImplementedError


def active_strategy() -> KerasStrategy | None:
    """Return the current strategy if it is a ``KerasStrategy``, else None."""
    strategy = tf.distribute.get_strategy()
    return strategy if isinstance(strategy, KerasStrategy) else None


def strategy_of(model: keras.Model) -> Any:
    """Return the strategy of any kind that a model is placed on, or None."""
    return getattr(model, "_distribute_strategy", None)


def tower_strategy_of(model: keras.Model) -> KerasStrategy | None:
    """Return the ``KerasStrategy`` that a model is placed on, or None."""
    strategy = strategy_of(model)
    return strategy if isinstance(strategy, KerasStrategy) else None


def words_for_another(strategy: object, than: object) -> str:
    """Return the words after "another" in a message about two strategies."""
    kind = type(strategy).__name__
    if kind == type(than).__name__:
        return kind
    return f"strategy ({kind})"
