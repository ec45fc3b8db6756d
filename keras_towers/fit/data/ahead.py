"""Seeing the end of a dataset before a step starts.

A step that runs out of data in the middle cancels what its devices exchange,
and TensorFlow reports every cancelled exchange on standard error. Here the next
batch is drawn first, as a ``tf.experimental.Optional``, and the step gets an
iterator that yields it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_towers.fit.context.by_identity import ByIdentity

_ends_unseen: ByIdentity[tf.data.Iterator, None] = ByIdentity()


def look_ahead(iterator: tf.data.Iterator) -> None:
    """Make steps see the end of an iterator before they start."""
    _ends_unseen[iterator] = None


def seeing_ends(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a train or test function that sees the end of its data.

    Args:
        function: takes one batch of the iterator that it is called with.
    """

    def see(iterator: Any) -> Any:
        if iterator not in _ends_unseen:
            return function(iterator)
        batch = iterator.get_next_as_optional()
        if not batch.has_value():
            raise StopIteration
        return function(_Drawn(batch, iterator.element_spec))

    return see


class _Drawn(tf.data.Iterator):
    """An iterator with one batch, which has been drawn already."""

    def __init__(self, batch: tf.experimental.Optional, element_spec: Any):
        self._batch = batch
        self._element_spec = element_spec

    @property
    def element_spec(self) -> Any:
        return self._element_spec

    @property
    def _type_spec(self) -> tf.TypeSpec:
        return _DrawnSpec(self._element_spec)

    def get_next(self) -> Any:
        return self._batch.get_value()

    def get_next_as_optional(self) -> tf.experimental.Optional:
        return self._batch

    def __next__(self) -> Any:
        return self.get_next()

    def __iter__(self) -> Any:
        return self


class _DrawnSpec(tf.TypeSpec):
    """The type of a ``_Drawn`` as an argument of a ``tf.function``."""

    def __init__(self, element_spec: Any):
        self._element_spec = element_spec

    @property
    def value_type(self) -> type:
        return _Drawn

    def _serialize(self) -> tuple[Any, ...]:
        return (self._element_spec,)

    @property
    def _component_specs(self) -> Any:
        return tf.OptionalSpec(self._element_spec)

    def _to_components(self, value: _Drawn) -> Any:
        return value._batch

    def _from_components(self, components: Any) -> _Drawn:
        return _Drawn(components, self._element_spec)
