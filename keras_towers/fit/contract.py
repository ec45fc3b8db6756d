"""The components that a strategy is composed of.

The constructor of a strategy combines:

* a ``TowerConfig``: its devices, the transport between processes, and how a
  batch is distributed;
* an object that ``UpdatesWeights``: where trained weights and slot variables
  live, and how reduced gradients are applied;
* one that ``RunsCalls`` of ``fit``, ``evaluate``, ..., with one that
  ``AdoptsModels``.

``fit/`` depends only on these, never on the type of the strategy, and these on
nothing in ``fit/`` that implements them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf

from keras_towers._strategy import Strategy
from keras_towers.errors import TowerError
from keras_towers.fit.options import StrategyOptions
from keras_towers.reduction import RankSum
from keras_towers.rendezvous.rank_checks import Peers
from keras_towers.transport import SingleProcess, Transport

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
        transport: connects the processes within a step.
        options: how batches are distributed, and gradients summed.
        others: connects all processes that train together, for strategies that
            exchange nothing within a step; None: ``transport`` does.
        gradient_factor: multiplies the gradients of this process before they
            leave it.
        prefetches_to_towers: whether TensorFlow prefetches batches to the
            tower devices, as accelerators need.
        other_columns: for each tower, the further devices that divide its part
            of a step, as model parallelism does.
    """

    strategy: Strategy
    devices: Sequence[str]
    transport: Transport
    options: StrategyOptions
    others: Peers | None = None
    gradient_factor: float = 1.0
    prefetches_to_towers: bool = False
    other_columns: Sequence[Sequence[str]] = ()

    def __post_init__(self) -> None:
        if self.options.micro_batches == "auto" and self.peers.size > 1:
            raise TowerError(
                f'micro_batches="auto" is for one process, and {self.name} '
                f"connects {self.peers.size}: each might choose a different "
                "number. Give all processes the same number."
            )

    @property
    def peers(self) -> Peers:
        """All processes that train together, for exchanges between steps."""
        return self.others or self.transport

    def without_other_processes(self) -> TowerConfig:
        """Return the same towers without the other processes."""
        alone = SingleProcess()
        return dataclasses.replace(self, transport=alone, others=None)

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
        """For each tower of this process, the devices of its columns."""
        others = self.other_columns or [[] for _ in self.devices]
        return [
            [device, *more]
            for device, more in zip(self.devices, others, strict=True)
        ]

    @property
    def num_columns(self) -> int:
        """Number of devices of each tower."""
        return len(self.mesh[0])

    @property
    def num_replicas(self) -> int:
        """Number of towers in all processes."""
        return self.num_towers * self.peers.size

    @property
    def divides(self) -> bool:
        """Whether steps are divided, over devices or into micro-batches."""
        many = self.num_replicas > 1 or self.num_columns > 1
        return many or self.options.micro_batches != 1

    def runs_alone(self, kind: str) -> bool:
        """Whether a rank takes a method's steps without the other ranks."""
        # Ranks with their own data predict independently.
        predicts = kind.startswith("predict")
        rank_batches = predicts and self.options.batches == "each"
        return rank_batches or self.transport.size == 1

    @property
    def first_tower(self) -> int:
        """Global index of this process's first tower."""
        return self.num_towers * self.peers.rank


@dataclasses.dataclass(eq=False)
class NamedGradients:
    """The gradients of N named variables; None for a missing gradient."""

    names: tuple[str, ...]
    grads: list[Any]

    def describe_gradients(self) -> list[str]:
        """Describe each gradient: variable, shape or ``sparse``, dtype."""
        lines = []
        for name, grad in zip(self.names, self.grads, strict=True):
            if grad is not None:
                sparse = isinstance(grad, tf.IndexedSlices)
                shape = "sparse" if sparse else grad.shape
                lines.append(f"{name} {shape} {grad.dtype.name}")
        return lines


def name_of(variable: Any) -> str:
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
                f"differ in {', '.join(odd)}. Every tower has to run the same "
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
    original: Callable[[list[Any], list[Any]], Any]
    variables: list[Any]
    # Whether XLA compiles the step that it belongs to.
    is_compiled: bool = False

    def update_variables(self) -> None:
        """Update the variables as Keras does."""
        self.original(self.grads, self.variables)


class FitStart(NamedTuple):
    """Where a ``fit`` starts, and how it shuffles.

    Attributes:
        epoch: the first epoch, as Keras counts.
        done: how many epochs are done.
        batch: the number of batches of this epoch that are done.
        seed: orders arrays if there is no global seed.
        random_state: of Python's ``random`` before the first one, which orders
            ``PyDataset``s.
    """

    epoch: int
    done: int
    batch: int
    seed: int
    random_state: Sequence[Any]


@dataclasses.dataclass(frozen=True, eq=False)
class KerasCall:
    """A call of a Keras method, with its arguments by name."""

    # One of ``METHODS``, and Keras's original method.
    kind: str
    original: Callable[..., Any]
    model: keras.Model
    # Changed in place, for example to replace callbacks.
    arguments: dict[str, Any]

    @classmethod
    def of(
        cls,
        kind: str,
        original: Callable[..., Any],
        model: keras.Model,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
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

    def call_keras(self) -> Any:
        """Run Keras's own method."""
        return self.original(self.model, **self.arguments)


class TowerFunction:
    """A train, test or predict function for towers.

    Attributes:
        alone: the function for calls that only some ranks make, if any.
    """

    alone: TowerFunction | None = None

    def __call__(self, data: Any) -> Any:
        """Run the model's ``steps_per_execution`` steps.

        Args:
            data: an iterator of batches, or a list of them.
        """
        raise NotImplementedError


class UpdatesWeights(Protocol):
    """Where trained weights and optimizer state live, and who updates them.

    Attributes:
        rank_sum: sums gradients over the ranks, and has the state of their
            communication hook; None: nothing does.
    """

    rank_sum: RankSum | None

    @property
    def has_absent_weights(self) -> bool:
        """Whether no rank has the whole of the weights, until an epoch ends."""
        ...

    def make_ready(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Build the optimizer if needed, and place its slot variables."""
        ...

    def apply_in_replica(self, call: ApplyCall) -> None:
        """Sum the gradients over all replicas, then update once."""
        ...

    def apply_outside(self, call: ApplyCall) -> None:
        """Update outside of steps and replicas, as one device does."""
        ...


class AdoptsModels(Protocol):
    """The models placed on a strategy's towers.

    Attributes:
        in_block: whether a block is open, at whose end models are released.
    """

    in_block: bool

    @property
    def models(self) -> Sequence[keras.Model]:
        """The models on the towers, and those created in the block."""
        ...

    def register_created(self, model: keras.Model) -> None:
        """Register a model that was created in the strategy's scope."""
        ...

    def register_compiled(self, model: keras.Model) -> None:
        """Register a model compiled in the scope, maybe to be trained later."""
        ...

    def registering_variable(
        self, variable: keras.Variable
    ) -> contextlib.AbstractContextManager[None]:
        """Register a variable whose value is created in this block."""
        ...

    def claim(self, model: keras.Model) -> None:
        """Bind a model, its optimizers and nested models to the strategy."""
        ...

    def bind(self, model: keras.Model) -> bool:
        """Place a model's variables on the towers; return if any were new."""
        ...

    def release(self) -> None:
        """Turn all models into ordinary ones."""
        ...

    def release_model(self, model: keras.Model) -> None:
        """Turn a model into an ordinary one."""
        ...

    def describe_held(self) -> list[str]:
        """Describe the bytes of all models' variables on each device."""
        ...

    def ranks_diverge(self, model: keras.Model) -> bool:
        """Whether a model's ranks train on their own until the next average."""
        ...

    def gather_slots(self) -> None:
        """Give every rank the whole optimizer state, and equal weights."""
        ...

    def broadcast(self, model: keras.Model) -> None:
        """Give all ranks the weights, optimizer state and seeds of rank 0."""
        ...

    def sum_metrics(self, model: keras.Model) -> None:
        """Sum the metrics of ranks that train independently. Collective."""
        ...


class RunsCalls(Protocol):
    """How a call of a method of Keras runs."""

    @property
    def adoption(self) -> AdoptsModels: ...

    @property
    def runs_plain_keras(self) -> bool:
        """Whether all calls run as plain Keras does, without towers."""
        ...

    def run_call(self, keras_call: KerasCall) -> Any:
        """Run a call of a method of Keras."""
        ...


class KerasStrategy:
    """The base class of all strategies, as ``fit/`` sees them."""

    # Internal: its components.
    _config: TowerConfig
    _update: UpdatesWeights
    _calls: RunsCalls

    @property
    def _adoption(self) -> AdoptsModels:
        return self._calls.adoption

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Make the strategy TensorFlow's current one inside a block."""
        raise NotImplementedError


def active_strategy() -> KerasStrategy | None:
    """Return the current strategy if it is a ``KerasStrategy``, else None."""
    strategy = tf.distribute.get_strategy()
    return strategy if isinstance(strategy, KerasStrategy) else None


def strategy_of(model: Any) -> Any:
    """Return the strategy of any kind that a model is placed on, or None."""
    placed_on = getattr(model, "_distribute_strategy", None)
    # During a call the attribute holds a StrategyProxy.
    return getattr(placed_on, "strategy", placed_on)


def tower_strategy_of(model: Any) -> KerasStrategy | None:
    """Return the ``KerasStrategy`` that a model is placed on, or None."""
    strategy = strategy_of(model)
    return strategy if isinstance(strategy, KerasStrategy) else None


def words_for_another(strategy: object, than: object) -> str:
    """Return the words after "another" in a message about two strategies."""
    kind = type(strategy).__name__
    if kind == type(than).__name__:
        return kind
    return f"strategy ({kind})"
