"""The order of reads and writes of resources, and the values of variables.

``rules/variables.py`` and ``undivided.py`` read and write variables through
this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_towers.partition.builder import Output
from keras_towers.partition.conversions import Converter
from keras_towers.partition.layouts import REPLICATED, Sharded, sizes_of
from keras_towers.partition.program import (
    Attributes,
    Phase,
    Tensor,
    level_after,
)
from keras_towers.partition.reasons import asserted, require
from keras_towers.partition.values import Value


class Resources:
    """The order of reads and writes of resources, at a point of the trace.

    A time is a level and a phase of it, as one number.

    Attributes:
        contents: the values of variables, as far as they are known, by the
            common handles.
        copies: the towers' handles of variables with copies, or in shards, by
            the common ones.
        rows: the layouts of variables in shards, by the common handles.
        reads_from: the earliest level at which variables are read.

    Args:
        around: for the body of a function, the resources of its caller.
    """

    def __init__(self, around: Resources | None = None) -> None:
        self.contents: dict[Tensor, Value] = {}
        self.copies: dict[Tensor, Tensor] = {}
        self.rows: dict[Tensor, Sharded] = {} if around is None else around.rows
        self.reads_from = 0
        self._common: dict[Tensor, Tensor] = {}
        self._ready: dict[Any, tuple[int, int]] = {}

    def add_copies(
        self, common: Tensor, local: Tensor, rows: Sharded | None = None
    ) -> None:
        """Register the towers' handles of a variable: copies, or shards."""
        self.copies[common] = local
        self._common[local] = common
        if rows is not None:
            self.rows[common] = rows

    def common_handle(self, handle: Tensor) -> Tensor:
        """Return the handle that all towers share."""
        return self._common.get(handle, handle)

    def earliest_level(
        self, phase: Phase, operands: Sequence[Tensor], reads: bool
    ) -> int:
        """Return the earliest level of an operation that uses resources.

        Args:
            phase: the phase in which it runs.
            operands: its inputs. Without a handle among them, the operation
                uses the resource that all such operations share.
            reads: whether it only reads resources.
        """
        ready = [self._ready.get(key, (0, 0)) for key in self._keys(operands)]
        time = max(times[0] if reads else times[1] for times in ready)
        # A phase that is over comes again in the next level.
        level = (time - phase + len(Phase) - 1) // len(Phase)
        return max(level, self.reads_from) if reads else level

    def record_use(
        self, phase: Phase, operands: Sequence[Tensor], reads: bool
    ) -> int:
        """Order later users of the same resources after an operation.

        The values that it writes are no longer known.

        Returns:
            The earliest level of the operation.
        """
        least = self.earliest_level(phase, operands, reads)
        time = len(Phase) * level_after(operands, phase, least) + phase
        for key in self._keys(operands):
            to_read, to_write = self._ready.get(key, (0, 0))
            to_read = to_read if reads else max(to_read, time)
            self._ready[key] = to_read, max(to_write, time)
            if not reads:
                self.contents.pop(key, None)
        return least

    def read_again(self) -> None:
        """Forget the values that were read so far."""
        for common, content in [*self.contents.items()]:
            tensor = content.local or content.whole
            source = None if tensor is None else tensor.operation
            if source is not None and source.type == "ReadVariableOp":
                del self.contents[common]

    def _keys(self, operands: Sequence[Tensor]) -> list[Any]:
        """Return the resources of an operation.

        None stands for a resource without a handle.
        """
        handles = [t for t in operands if t.dtype == tf.resource]
        return [self.common_handle(t) for t in handles] or [None]


class VariableContents(Resources):
    """Resources, and the values of variables, at a point of the trace.

    Args:
        converter: converts values of the graph, or of the function.
        around: for a function, what variables hold where it is called.

    Attributes:
        gathers: whether functions that are called get the whole of variables in
            shards.
    """

    def __init__(
        self, converter: Converter, around: VariableContents | None = None
    ):
        super().__init__(around)
        self.gathers: bool = around is not None and around.gathers
        self._builder, self._converter = converter.builder, converter
        self._around = around

    def content_of(self, variable: Value) -> Value:
        """Return a variable's value at this point of the trace.

        A function gets it from its caller, unless it has written it.

        Raises:
            NotDivided: the variable is not an input of the step.
        """
        handle = self._converter.replicate(variable)
        require(handle.handle is not None)
        common = self.common_handle(handle)
        if common in self.contents:
            return self.contents[common]
        around = self._around
        if around is not None:
            content = around.content_of(Value(REPLICATED, whole=handle))
            if self.gathers:
                content = around._converter.gathered(content)
            return around._converter.captured(content)
        local = self.copies.get(common)
        rows = self.rows.get(common)
        _, shape = type_of_content(common)
        sizes = None if shape.rank is None else sizes_of(shape)
        if rows is not None:
            content = Value(rows, self.read(asserted(local)), shape=sizes)
        else:
            # Towers update their own copies.
            needs_whole = local is None or not self._builder.of_update
            content = Value(
                REPLICATED,
                local=None if local is None else self.read(local),
                whole=self.read(common) if needs_whole else None,
                shape=sizes,
            )
        self.contents[common] = content
        return content

    def read(self, handle: Tensor) -> Tensor:
        """Read a shared variable, the towers' copies of it, or their shards."""
        dtype, shape = type_of_content(handle)
        (value,) = self.add_in_order(
            "ReadVariableOp", [handle], {"dtype": dtype}, [(dtype, shape)]
        )
        return value

    def add_in_order(
        self,
        type_: str,
        operands: Sequence[Tensor],
        attributes: Attributes,
        outputs: Sequence[Output] = (),
        reads: bool = True,
    ) -> list[Tensor]:
        """Add an operation after earlier users of the same variables.

        Args:
            type_: its type.
            operands: its inputs.
            attributes: its attributes.
            outputs: the dtypes and shapes of its outputs.
            reads: whether it only reads variables.
        """
        phase = self._builder.phase_of(type_, operands)
        least = self.record_use(phase, operands, reads)
        return self._builder.add(
            type_, operands, attributes, outputs, least, has_effect=not reads
        )

    def assign(self, variable: Value, content: Value) -> None:
        """Assign a value to a variable, and to all of its copies.

        A function leaves this to its caller.

        Raises:
            NotDivided: the variable is not an input of the step.
        """
        handle = self._converter.replicate(variable)
        require(handle.handle is not None)
        common = self.common_handle(handle)
        if self._around is not None:
            self.contents[common] = content
            return
        handle, value = self._operands(handle, content)
        if (rows := self.rows.get(common)) is not None:
            content = Value(rows, value, shape=content.shape)
        self.add_in_order(
            "AssignVariableOp",
            [handle, value],
            {"dtype": value.dtype, "validate_shape": False},
            reads=False,
        )
        self.contents[common] = content

    def add_in_place(self, type_: str, variable: Value, term: Value) -> bool:
        """Add a term to a variable and all of its copies, in their memory.

        Args:
            type_: the type of the operation that adds or subtracts it.
            variable: the variable.
            term: the term.

        Returns:
            Whether this has been done. Functions return new values of
            variables, those of towers, too.
        """
        handle = self._converter.replicate(variable)
        if self._around is not None or handle.handle is None:
            return False
        is_shared = self.common_handle(handle) not in (self.copies)
        if not is_shared and not self._builder.of_update:
            return False
        handle, value = self._operands(handle, term)
        self.add_in_order(
            type_, [handle, value], {"dtype": value.dtype}, reads=False
        )
        return True

    def _operands(
        self, handle: Tensor, content: Value
    ) -> tuple[Tensor, Tensor]:
        """Return a handle and a value for an operation that writes.

        The handle is of shards, of copies, or of a shared variable.
        """
        common = self.common_handle(handle)
        rows = self.rows.get(common)
        if rows is not None:
            _, shape = type_of_content(common)
            if shape.rank is not None:
                # The trace may not know the sizes of what is assigned.
                content.shape = sizes_of(shape)
            local = self.copies[common]
            return local, self._converter.shard(content, rows)
        if "towers" in handle.axes:
            return handle, self._converter.replicate(content)
        return handle, self._converter.assemble(content)

    def rows_of(self, variable: Value) -> Sharded | None:
        """Return the layout of a variable in shards; None if it is whole."""
        whole = variable.whole
        return None if whole is None else self.rows.get(whole)


def type_of_content(handle: Tensor) -> tuple[tf.DType, tf.TensorShape]:
    """Return the dtype and the shape of a variable's value."""
    (spec,) = handle.handle.shape_and_type
    return tf.as_dtype(spec.dtype), tf.TensorShape(spec.shape)
