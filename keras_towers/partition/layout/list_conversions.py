"""Converts lists of tensors to the layouts that operations need.

A list is converted as the stack of its elements. A tower without rows has lists
of one row: XLA also compiles the rounds of a loop that never run, and these
take an element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import tensorflow as tf

from keras_towers.partition.ir.layouts import (
    PARTIAL,
    REPLICATED,
    Layout,
    ListOf,
    Partial,
    Sharded,
    is_row_per_element,
    may_hold_rows,
    stacked_layout,
)
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.reasons import (
    EXCHANGE,
    SHAPE,
    NotDivided,
    asserted,
    require,
    unless_none,
)
from keras_towers.partition.ir.sizes import Dimension
from keras_towers.partition.ir.values import Elements, Value
from keras_towers.partition.layout.conversions import Converter


class CannotGather(Exception):
    """Raised if an operation without a rule needs lists of rows whole."""


class ListConverter(Converter):
    """Converts tensors and lists of tensors to other layouts."""

    def _assemble(self, value: Value) -> Tensor:
        is_list = isinstance(value.layout, ListOf)
        # TensorFlow cannot join ragged rows that a loop has encoded.
        is_encoded = value.sharded is not None and value.own.dtype == tf.variant
        if not is_list and not is_encoded:
            return super()._assemble(value)
        require(self.builder.can_exchange, EXCHANGE)
        try:
            require(is_list)
            return self._gather_list(value)
        except NotDivided:
            raise CannotGather from None

    def to_layout(self, value: Value, layout: Layout) -> Tensor:
        """Return the local tensor, or list, of a value in another layout.

        Raises:
            NotDivided: this would need an exchange.
        """
        if isinstance(layout, ListOf):
            return self._local_list(value, layout)
        return super().to_layout(value, layout)

    def _local_list(self, value: Value, layout: ListOf) -> Tensor:
        """Return the local list of a list on every tower.

        Raises:
            NotDivided: the list cannot have this layout.
        """
        if value.layout == layout:
            return value.own
        require(value.is_replicated)
        elements, element = unless_none(value.elements), layout.element
        handle = self.replicate(value)
        if _is_empty_optional(elements):
            return handle
        declared = self._declared_shape(elements, element)
        if elements.item is None:
            made_by = handle.operation
            if made_by is not None and made_by.type == "EmptyTensorList":
                # XLA needs to know how many elements it may get.
                _, most = made_by.inputs
                return self.builder.op(
                    "EmptyTensorList",
                    [declared, most],
                    (),
                    element_dtype=elements.dtype,
                )
            if is_row_per_element(element):
                length = self.builder.cast(
                    self.units.least_one(element.unit.count), tf.int32
                )
            else:
                length = self.builder.op("TensorListLength", [handle], ())
            return self.builder.op(
                "TensorListReserve",
                [declared, length],
                (),
                element_dtype=elements.dtype,
            )
        require(elements.is_full and not isinstance(element, ListOf))
        whole = self._stacked(handle, elements)
        if isinstance(element, Partial):
            rows = self.to_partial(whole)
        else:
            rows = self.shard(whole, stacked_layout(element))
        if is_row_per_element(element):
            rows = self.units.pad_empty(rows, stacked_layout(element))
        return self.builder.op("TensorListFromTensor", [rows, declared], ())

    def _gather_list(self, value: Value) -> Tensor:
        """Return the whole list, gathered from all towers.

        Raises:
            NotDivided: the facts do not suffice to gather it.
        """
        elements = unless_none(value.elements)
        element = cast("ListOf", value.layout).element
        # Lists of lists stay where they are.
        require(not isinstance(element, ListOf))
        require(elements.dtype != tf.variant)
        declared = self._declared_shape(elements, PARTIAL)
        rows = self._stacked(value.local, elements, element)
        whole = self.assemble(rows)
        return self.builder.op("TensorListFromTensor", [whole, declared], ())

    def _stacked(
        self,
        handle: Tensor | None,
        elements: Elements,
        layout: Layout = REPLICATED,
    ) -> Value:
        """Return the stack of the elements of a list with a layout."""
        # TensorFlow needs the full shape if a tower has no elements.
        sizes = self.element_shape(elements.shape, layout)
        stacked = self.builder.op(
            "TensorListStack",
            [asserted(handle), sizes],
            element_dtype=elements.dtype,
        )
        shape = (elements.length, *(elements.shape or ()))
        rows = stacked_layout(layout)
        if is_row_per_element(layout):
            stacked = self.units.drop_padding(stacked, shape, rows)
        return Value(rows, stacked, shape=shape)

    def element_shape(
        self, shape: Sequence[Dimension] | None, layout: Layout | None = None
    ) -> Tensor:
        """Return the local shape of the elements of a list.

        Args:
            shape: the global shape.
            layout: the layout of the elements.

        Raises:
            NotDivided: the shape is not known completely.
        """
        sizes = [
            self.units.global_size(size) for size in unless_none(shape, SHAPE)
        ]
        if isinstance(layout, Sharded) and 0 <= layout.axis < len(sizes):
            sizes[layout.axis] = self.units.local_rows(layout)
        return self.builder.size_vector(
            [unless_none(size, SHAPE) for size in sizes], tf.int32
        )

    def _declared_shape(
        self, elements: Elements, layout: Layout | None
    ) -> Tensor:
        """Return the element shape that the local list declares."""
        declared = elements.declared
        if declared is not None and not np.ndim(declared):
            return self.builder.constant(-1, tf.int32)
        if declared and isinstance(layout, Sharded) and layout.axis >= 0:
            require(may_hold_rows(declared[layout.axis], layout))
        return self.element_shape(declared, layout)


def _is_empty_optional(elements: Elements) -> bool:
    """Whether a value is an optional without an element, or nests one."""
    if elements.item is None:
        return elements.is_optional
    inner = elements.item.elements
    return inner is not None and _is_empty_optional(inner)
