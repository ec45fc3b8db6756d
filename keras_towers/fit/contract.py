"""What ``fit/`` asks of a strategy, and the pieces that one is made of.

A strategy is put together in its constructor:

* a ``TowerConfig``: its devices, the transport that connects the processes, and
  how a batch is dealt out;
* an ``Update``: where trained weights and the optimizer's state live, and who
  updates them with which reduction of the gradients;
* ``Calls``: how a call of ``fit``, ``evaluate``, ... is run.

The rooms of ``fit/`` ask these pieces to do their work; they never ask what
kind of strategy it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import keras
import tensorflow as tf

from keras_towers.transport import Transport

Batches: TypeAlias = Literal["split", "each"]
Gradients: TypeAlias = "Sequence[tf.Tensor | tf.IndexedSlices | None]"

# Method names of keras.Model that a strategy runs on its towers.
METHODS = (
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
)
TRAINING = ("fit", "train_on_batch")


@dataclasses.dataclass(frozen=True, eq=False)
class TowerConfig:
    """The towers of a strategy, and how a batch is dealt out to them.

    Attributes:
        strategy: TensorFlow's side of it, with its scope.
        devices: the device of every tower of this process.
        transport: connects the processes.
        batches: ``"split"``: the global batch is split over the towers.
            ``"each"``: every tower draws a batch of its own.
        average: whether a loss is a mean over the batch (gradients are
            averaged over examples) or a sum (they are summed).
        sync_every_epoch: whether all towers are set equal at an epoch's end.
        prefetches_to_towers: whether TensorFlow copies batches to the towers
            ahead, as accelerators want it.
        replicas_are_called: the word for one of them in messages.
    """

    strategy: tf.distribute.Strategy
    devices: Sequence[str]
    transport: Transport
    batches: Batches = "split"
    average: bool = True
    sync_every_epoch: bool = True
    prefetches_to_towers: bool = False
    replicas_are_called: str = "tower"

    @property
    def name(self) -> str:
        """What the user calls the strategy."""
        return type(self.strategy).__name__

    @property
    def num_towers(self) -> int:
        """The number of towers of this process."""
        return len(self.devices)

    @property
    def num_replicas(self) -> int:
        """The number of towers of all processes."""
        return self.num_towers * self.transport.size

    @property
    def first_tower(self) -> int:
        """The number of this process's first tower among all."""
        return self.num_towers * self.transport.rank


class TakesGradients(Protocol):
    """What becomes of the gradients that a tower's step computes."""

    def place_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Put an optimizer's state where it belongs, and take its calls."""
        ...

    def apply(
        self,
        optimizer: keras.optimizers.Optimizer,
        original: Callable[[list[Any], list[Any]], Any],
        grads: Gradients,
        trainable_variables: Sequence[Any] | None,
    ) -> None:
        """Take the gradients of one tower.

        Called on a tower, in the place of ``optimizer.apply``.

        Args:
            optimizer: the optimizer that the step called.
            original: its own ``apply``, for gradients and variables.
            grads: N gradients of this tower, None where there is none.
            trainable_variables: the N variables that they belong to, or None
                for those that the optimizer was built with.
        """
        ...


class Update(TakesGradients, Protocol):
    """Where trained weights and optimizers live, and who updates them.

    Attributes:
        name: one word: ``"once"``, ``"each"``, ...
        description: the same in a few words, for ``describe()``.
    """

    name: str
    description: str

    def place(self, variable: keras.Variable) -> bool:
        """Put a weight of a model where it belongs; tell whether it moved."""
        ...

    def take_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Take the calls of an optimizer that may not be complete yet."""
        ...

    def release_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Make an optimizer an ordinary one again."""
        ...

    def take_back(self, variable: keras.Variable) -> bool:
        """Make a variable the model's own again; False if it was not moved."""
        ...

    def release(self) -> None:
        """Take back all that is still elsewhere."""
        ...


class Calls(Protocol):
    """How the calls of Keras's methods are run."""

    def run(
        self,
        kind: str,
        original: Callable[..., Any],
        model: keras.Model,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one call.

        Args:
            kind: one of ``METHODS``.
            original: Keras's own method.
            model: the model that it is called on.
            args: what the user gave.
            kwargs: what the user gave by name.
        """
        ...


class Residents(Protocol):
    """The models, variables and optimizers that live on a strategy."""

    def created(self, model: keras.Model) -> None:
        """Note a model that is made in the strategy's scope."""
        ...

    def made_variable(self, variable: keras.Variable) -> None:
        """Note a variable that is made there."""
        ...

    def made_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Let an optimizer that is made there reduce over the towers."""
        ...

    def equalise(self) -> None:
        """Give all towers the mean of what each has written to itself."""
        ...

    def mark_trained(self) -> None:
        """Note that towers may have written to themselves since."""
        ...


class KerasStrategy:
    """What ``fit/`` asks of a strategy; the base class of all of them.

    Attributes:
        config: its towers.
        update: who updates the weights.
        calls: how Keras's methods run.
        adoption: the models that live on it.
    """

    config: TowerConfig
    update: Update
    calls: Calls
    adoption: Residents

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Make it the current strategy of TensorFlow for a block."""
        raise NotImplementedError


def in_force() -> KerasStrategy | None:
    """The strategy of ours whose scope or tower this code is in, or None."""
    strategy = tf.distribute.get_strategy()
    return strategy if isinstance(strategy, KerasStrategy) else None


def home_of(model: Any) -> Any:
    """The strategy that a model lives on, whoever made it, or None."""
    home = getattr(model, "_distribute_strategy", None)
    # In the middle of a call Keras sees something that stands for it.
    return getattr(home, "strategy", home)


def owner_of(model: Any) -> KerasStrategy | None:
    """The strategy of ours that a model lives on, or None."""
    home = home_of(model)
    return home if isinstance(home, KerasStrategy) else None
