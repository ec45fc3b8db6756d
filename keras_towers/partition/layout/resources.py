"""The order of reads and writes of resources, and the values of variables.

``rules/variables.py`` and ``undivided.py`` read and write variables through
this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_towers.partition.ir.builder import Output
from keras_towers.partition.ir.layouts import REPLICATED, Sharded, sizes_of
from keras_towers.partition.ir.program import (
    Attributes,
    Event,
    Operation,
    Tensor,
)
from keras_towers.partition.ir.reasons import asserted, require
from keras_towers.partition.ir.values import Value
from keras_towers.partition.layout.conversions import Converter


class VariableContents:
    """What variables hold at a point of the trace, and who uses them.

    Args:
        converter: converts values of the graph, or of the function.
        around: for a function, what variables hold where it is called.

    Attributes:
        before: by operation: the earlier users of its resources that it
            follows. Reads follow writes, and writes follow all.
        contents: the values of variables, as far as they are known, by the
            common handles.
        copies: the towers' handles of variables with copies, or in shards, by
            the common ones.
        rows: the layouts of variables in shards, by the common handles.
        reads_follow: what reads follow besides.
        gathers: whether functions that are called get the whole of variables in
            shards.
    """

    def __init__(
        self, converter: Converter, around: VariableContents | None = None
    ):
        self.contents: dict[Tensor, Value] = {}
        self.copies: dict[Tensor, Tensor] = {}
        self.rows: dict[Tensor, Sharded] = {} if around is None else around.rows
        self.before: dict[Event, Sequence[Event]] = {}
        self.reads_follow: Sequence[Event] = ()
        self.gathers: bool = around is not None and around.gathers
        self._builder, self._converter = converter.builder, converter
        self._around = around
        self._common: dict[Tensor, Tensor] = {}
        # By resource: what has written it last, and what has read it since.
        self._written: dict[Any, Operation] = {}
        self._read: dict[Any, list[Operation]] = {}

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

    def record_use(self, operation: Operation, reads: bool) -> None:
        """Order an operation after earlier users of its resources.

        The values that it writes are no longer known.

        Args:
            operation: the operation. Without a handle among its inputs, it uses
                the resource that all such operations share.
            reads: whether it only reads resources.
        """
        before = [*self.reads_follow] if reads else list[Event]()
        for key in self._keys(operation.inputs):
            if key in self._written:
                before.append(self._written[key])
            if reads:
                self._read.setdefault(key, []).append(operation)
                continue
            before += self._read.pop(key, ())
            self._written[key] = operation
            self.contents.pop(key, None)
        self.before[operation] = before

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
        _, shape = common.type_of_content
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
        dtype, shape = handle.type_of_content
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
        results = self._builder.add(
            type_, operands, attributes, outputs, has_effect=not reads
        )
        self.record_use(self._builder.last, reads)
        return results

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
            _, shape = common.type_of_content
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
