"""Types for objects of TensorFlow, Keras and users that come without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

Logs: TypeAlias = "dict[str, Any] | None"
"""The logs of a batch or an epoch, as methods of callbacks get them."""

Structure: TypeAlias = Any
"""Tensors or arrays, nested as ``tf.nest`` allows."""

Variable: TypeAlias = "keras.Variable | tf.Variable"
"""A variable of Keras, or its value."""

JsonObject: TypeAlias = "dict[str, Any]"
"""An object of JSON."""

Step: TypeAlias = "Callable[[Structure], Structure]"
"""A step of a model: it takes a batch, and returns logs or predictions."""

CompressionName: TypeAlias = Literal[
    "none",
    "fp16",
    "fp16-shards",
    "bf16",
    "fp16-feedback",
    "bf16-feedback",
    "power-sgd",
]
"""How gradients are exchanged between processes."""

Plain = TypeVar("Plain")
"""Plain data that a rank sends, and others of that kind that it receives."""


class ConcreteFunction(Protocol):
    """A ``tf.function`` that is traced for certain inputs."""

    @property
    def graph(self) -> tf.Graph: ...

    @property
    def name(self) -> bytes: ...

    @property
    def outputs(self) -> Sequence[tf.Tensor]: ...

    @property
    def captured_inputs(self) -> Sequence[tf.Tensor]: ...

    @property
    def structured_outputs(self) -> Structure: ...

    def __call__(self, *args: object, **kwargs: object) -> Structure: ...


class DataAdapter(Protocol):
    """The adapter from which Keras reads the data of a call."""

    @property
    def num_batches(self) -> int | None: ...

    def on_epoch_begin(self) -> None: ...

    def on_epoch_end(self) -> None: ...


class EpochIterator(Protocol):
    """Keras's iterator over the steps of an epoch."""

    data_adapter: DataAdapter
    steps_per_epoch: int | None
    _distributed_dataset: tf.data.Dataset
    _get_iterator: Callable[[], Iterator[Structure]]
