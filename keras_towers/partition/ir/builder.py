"""Builds a program: adds operations, exchanges and computations of sizes.

Rules and ``conversions.py`` call a ``Builder``. ``program.py`` has the records
that it makes.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.partition.ir.axes import AT_ROOT, COLUMNS, ONCE, Axes
from keras_towers.partition.ir.program import (
    Attributes,
    Event,
    Exchange,
    ExchangeKind,
    Operation,
    Tensor,
    axes_of,
)
from keras_towers.partition.ir.reasons import EXCHANGE, NotDivided
from keras_towers.partition.ir.sizes import Dimension

if TYPE_CHECKING:
    from tensorflow.core.framework.op_def_pb2 import OpDef

AttrValue = tf.compat.v1.AttrValue
# The dtype of computed sizes.
SIZE_DTYPE = tf.int64
Output = tuple[tf.DType, tf.TensorShape]
Operand: TypeAlias = "Tensor | Dimension | Sequence"
UNKNOWN_SHAPE: Any = tf.TensorShape(None)  # pyright: ignore[reportArgumentType]
# Operations that make lists. Every function has its own, because XLA cannot
# return a list that has no elements yet.
NEW_LISTS = ("EmptyTensorList", "TensorListReserve")
# These attributes are valid in the traced graph only.
_OF_TRACE = ("_class", "_output_shapes")


class Builder:
    """Adds operations and exchanges to a program, or operations to a function.

    Args:
        can_exchange: whether towers may exchange values; False inside loops,
            branches and compiled functions.

    Attributes:
        events: the operations and exchanges, in order.
        name: the name of the traced operation that is being laid out. It
            becomes the name of the operations that are added for it.
        gradient: the gradient that sums are for, as in ``Exchange``.
        of_update: whether operations are of an update, as in ``Operation``.
        device: where what is computed once runs, as in ``Operation``.
    """

    def __init__(self, can_exchange: bool = True):
        self.events: list[Event] = []
        self.can_exchange = can_exchange
        self.name = self.gradient = self.device = ""
        self.of_update = False
        self._constants: dict[Hashable, Tensor] = {}

    @property
    def operations(self) -> list[Operation]:
        """The operations, in order."""
        return [e for e in self.events if isinstance(e, Operation)]

    @property
    def exchanges(self) -> list[Exchange]:
        """The exchanges, in order."""
        return [e for e in self.events if isinstance(e, Exchange)]

    @property
    def last(self) -> Operation:
        """The operation that was added last."""
        (*_, last) = self.events
        assert isinstance(last, Operation), "an exchange"
        return last

    def copy(
        self,
        source: tf.Operation,
        inputs: Sequence[Tensor],
        shapes: Sequence[tf.TensorShape] | None = None,
        attributes: Attributes | None = None,
        **options: Any,
    ) -> list[Tensor]:
        """Add a traced operation with other inputs; return its outputs.

        Args:
            source: the traced operation.
            inputs: its N inputs.
            shapes: the shapes of the outputs; None: as traced.
            attributes: the attributes that differ from the trace.
            **options: further arguments of ``add``.
        """
        traced = source.node_def.attr.items()
        kept = {key: value for key, value in traced if key not in _OF_TRACE}
        sizes = shapes or [tensor.shape for tensor in source.outputs]
        dtypes = [tensor.dtype for tensor in source.outputs]
        return self.add(
            source.type,
            inputs,
            kept | dict(attributes or {}),
            list(zip(dtypes, sizes, strict=True)),
            source=source,
            **options,
        )

    def op(
        self,
        type_: str,
        inputs: Sequence[Operand],
        shape: Any = None,
        is_repeated: bool = False,
        suffix: str = "",
        **attributes: Any,
    ) -> Tensor:
        """Add an operation with a single output; return the output.

        Args:
            type_: the type of the operation.
            inputs: its inputs: tensors, or numbers, which become constants.
            shape: the shape of the output, as far as it is known.
            is_repeated: whether every function that uses it adds it again.
            suffix: as in ``Operation``.
            **attributes: the attributes that do not follow from the inputs.
        """
        definition = compat.op_definition(type_)
        known = {**_defaults(type_), **attributes}
        # No operation that rules add takes two lists.
        longest = len(inputs) - len(definition.input_arg) + 1
        args: list[OpDef.ArgDef] = []
        for arg in definition.input_arg:
            args += [arg] * (longest if arg.number_attr else 1)
            if arg.number_attr:
                known[arg.number_attr] = longest
        for arg, operand in zip(args, inputs, strict=True):
            if arg.type_attr and isinstance(operand, Tensor):
                known[arg.type_attr] = operand.dtype
        tensors = [
            operand
            if isinstance(operand, Tensor)
            else self.constant(operand, _dtype_of(arg, known))
            for arg, operand in zip(args, inputs, strict=True)
        ]
        (output,) = definition.output_arg
        size = UNKNOWN_SHAPE if shape is None else static(shape)
        (tensor,) = self.add(
            type_,
            tensors,
            known,
            [(_dtype_of(output, known), size)],
            is_repeated=is_repeated,
            suffix=suffix,
        )
        return tensor

    def constant(self, value: object, dtype: tf.DType) -> Tensor:
        """Return a constant; the zero of strings is empty, as in TensorFlow."""
        if dtype == tf.string:
            array = np.asarray(value or "", "U")
        else:
            array = np.asarray(value, tf.as_dtype(dtype).as_numpy_dtype)
        key = array.tobytes(), array.shape, tf.as_dtype(dtype)
        if key not in self._constants:
            (self._constants[key],) = self.add(
                "Const",
                (),
                {"dtype": dtype, "value": array},
                [(tf.as_dtype(dtype), tf.TensorShape(array.shape))],
                is_repeated=True,
            )
        return self._constants[key]

    def exchange(
        self,
        kind: ExchangeKind,
        tensor: Tensor,
        axis: int = 0,
        sizes: Sequence[Dimension | None] | None = None,
        *,
        to: Axes = ONCE,
        over: Axes | None = None,
        shape: tf.TensorShape | None = None,
        **options: Any,
    ) -> Tensor:
        """Add an exchange; return its result.

        Args:
            kind: the kind of the exchange, as in ``Exchange``.
            tensor: the tensor that everyone contributes.
            axis: the axis of a concatenation, or of the rows.
            sizes: the global shape, in symbols, if it is known.
            to: the axes along which everyone gets a result of its own.
            over: the axes that it crosses; None: those along which the tensor
                varies, but not from column to column.
            shape: the shape of the result; None: that of the tensor, of a
                ``gather`` as far as it is known.
            **options: further attributes of ``Exchange``.

        Raises:
            NotDivided: no exchange is possible inside of a function.
        """
        if kind == "first" and not self.can_exchange:
            # All towers have the same value.
            return tensor
        if not self.can_exchange:
            raise NotDivided(EXCHANGE)
        if shape is None:
            shape = _shape_after(kind, tensor.shape, axis, sizes)
        if over is None:
            over = AT_ROOT if kind == "root" else tensor.axes - COLUMNS
        if kind == "before":
            to = over
        # A sum over an axis needs terms that vary along it.
        varies = bool(over) and over <= tensor.axes
        assert varies or kind in ("first", "root"), f"{kind} over {over}"
        result = Tensor(tensor.dtype, shape, (tensor.axes - over) | to)
        adds = kind in ("sum", "scatter") and over != COLUMNS
        gradient = self.gradient if adds else ""
        exchange = Exchange(
            kind,
            tensor,
            result,
            axis,
            sizes,
            over=over,
            gradient=gradient,
            **options,
        )
        self.events.append(exchange)
        return result

    def add(
        self,
        type_: str,
        inputs: Sequence[Tensor],
        attributes: Attributes,
        outputs: Iterable[Output],
        source: tf.Operation | None = None,
        also: Axes = ONCE,
        handle: Any = None,
        **options: Any,
    ) -> list[Tensor]:
        """Add an operation; return its outputs.

        Args:
            type_: the type of the operation.
            inputs: its inputs.
            attributes: its attributes, as ``AttrValue`` or Python values.
            outputs: the dtypes and shapes of its outputs.
            source: the traced operation that it stands for.
            also: axes along which it varies besides those of its inputs.
            handle: the handle data of its outputs, as in ``Tensor``.
            **options: further attributes of ``Operation``.
        """
        if type_ in NEW_LISTS:
            options["is_repeated"] = True
        if any(tensor.dtype == tf.string for tensor in inputs):
            # Functions that XLA compiles take no strings.
            options["is_repeated"] = False
        axes = axes_of(inputs) | also
        results: list[Tensor] = []
        operation = Operation(
            type_,
            tuple(inputs),
            {key: _attribute(value) for key, value in attributes.items()},
            results,
            axes,
            source=source,
            device=self.device,
            of_update=self.of_update,
            name=self.name if source is None else source.name,
            **options,
        )
        for index, (dtype, shape) in enumerate(outputs):
            results.append(Tensor(dtype, shape, axes, operation, index, handle))
        self.events.append(operation)
        return results

    # ---- sizes ---------------------------------------------------------------

    def scaled_size(self, number: int, tensor: Tensor) -> Tensor:
        """Return ``number * tensor``."""
        return (
            tensor if number == 1 else self.compute_size("Mul", tensor, number)
        )

    def compute_size(self, type_: str, *sizes: Tensor | int) -> Tensor:
        """Compute a size from sizes.

        Every function that uses the size repeats the operation.
        """
        return self.op(type_, sizes, (), is_repeated=True)

    def vector_entry(self, vector: Tensor, index: int) -> Tensor:
        """Return an entry of a vector."""
        return self.op(
            "StridedSlice",
            [vector, [index], [index + 1], [1]],
            (),
            is_repeated=True,
            shrink_axis_mask=1,
        )

    def axis_size(self, tensor: Tensor, axis: int = 0) -> Tensor:
        """Return the local size of an axis."""
        return self.vector_entry(self.shape_vector(tensor), axis)

    def shape_vector(self, tensor: Tensor) -> Tensor:
        """Return the local shape of a tensor, as a vector."""
        return self.op("Shape", [tensor], is_repeated=True, out_type=SIZE_DTYPE)

    def size_vector(
        self, entries: Sequence[Tensor | int], dtype: tf.DType
    ) -> Tensor:
        """Pack sizes into a vector."""
        if not any(isinstance(entry, Tensor) for entry in entries):
            return self.constant(entries, dtype)
        shape = (len(entries),)
        packed = self.op("Pack", entries, shape, is_repeated=True, axis=0)
        return self.cast(packed, dtype)

    def size_at_axis(self, axis: int, rank: int, size: Tensor | int) -> Tensor:
        """Return a vector with a size at one axis, and 0 at the others.

        Args:
            axis: the index of the size.
            rank: the length of the vector.
            size: the size.
        """
        entries = [size if k == axis else 0 for k in range(rank)]
        return self.size_vector(entries, SIZE_DTYPE)

    def slice_rows(
        self,
        tensor: Tensor,
        shape: Sequence[Dimension | None],
        axis: int,
        first: Tensor | int,
        count: Tensor,
    ) -> Tensor:
        """Slice a range of rows.

        Args:
            tensor: the tensor.
            shape: its shape, as far as it is known.
            axis: the axis of the rows.
            first: the index of the first row.
            count: the number of rows.
        """
        begin = self.size_at_axis(axis, len(shape), first)
        # XLA needs explicit sizes in a slice whose begin is dynamic.
        sizes = [size if isinstance(size, int) else -1 for size in shape]
        size = self.size_vector(
            [*sizes[:axis], count, *sizes[axis + 1 :]], SIZE_DTYPE
        )
        known = [*shape[:axis], None, *shape[axis + 1 :]]
        return self.op("Slice", [tensor, begin, size], known)

    def pad_axis(
        self,
        tensor: Tensor,
        axis: int,
        before: Tensor | int,
        after: Tensor | int,
        shape: Sequence[Dimension | None] | tf.TensorShape,
    ) -> Tensor:
        """Add rows of zeros before and after those of a tensor.

        Args:
            tensor: the tensor.
            axis: the axis of the rows.
            before: the number of rows before them.
            after: the number of rows after them.
            shape: the shape of the result, as far as it is known.
        """
        rank = len(shape)
        ends = [self.size_at_axis(axis, rank, end) for end in (before, after)]
        widths = self.op("Pack", ends, (rank, 2), is_repeated=True, axis=1)
        # OneDNN would fuse "Pad" with a convolution, without padding.
        zero = self.constant(0, tensor.dtype)
        return self.op("PadV2", [tensor, widths, zero], shape)

    def only_if(self, condition: Tensor, tensor: Tensor) -> Tensor:
        """Return a tensor where a condition holds, and zeros elsewhere."""
        zeros = self.op("ZerosLike", [tensor], tensor.shape)
        return self.op("SelectV2", [condition, tensor, zeros], tensor.shape)

    def cast(
        self, tensor: Tensor, dtype: tf.DType, is_repeated: bool = True
    ) -> Tensor:
        """Cast a tensor, unless it has the dtype."""
        if tensor.dtype == dtype:
            return tensor
        return self.op(
            "Cast", [tensor], tensor.shape, is_repeated=is_repeated, DstT=dtype
        )


def _shape_after(
    kind: ExchangeKind,
    shape: tf.TensorShape,
    axis: int,
    sizes: Sequence[Dimension | None] | None,
) -> tf.TensorShape:
    """Return the shape of an exchange's result, as far as it is known."""
    if shape.rank is None and sizes is not None:
        shape = static(sizes)
    if kind != "gather":
        return shape
    if shape.rank is not None:
        changed = list(shape)
        changed[axis] = None
        shape = tf.TensorShape(changed)
    return shape if sizes is None else shape.merge_with(static(sizes))


def static(
    shape: tf.TensorShape | Iterable[Dimension | None],
) -> tf.TensorShape:
    """Return a shape as a ``tf.TensorShape``: None for symbols."""
    if isinstance(shape, tf.TensorShape):
        return shape
    return tf.TensorShape([s if isinstance(s, int) else None for s in shape])


def _attribute(value: Any) -> Any:
    """Convert an attribute to an ``AttrValue``."""
    match value:
        case AttrValue():
            return value
        case bool():
            return AttrValue(b=value)
        case int():
            return AttrValue(i=value)
        case float():
            return AttrValue(f=value)
        case str():
            return AttrValue(s=value.encode())
        case np.ndarray():
            return AttrValue(tensor=tf.make_tensor_proto(value))
        case tf.TensorShape():
            return AttrValue(shape=value.as_proto())
        case list():
            entries = AttrValue.ListValue()
            for entry in map(_attribute, value):
                kind = entry.WhichOneof("value")
                getattr(entries, kind).append(getattr(entry, kind))
            return AttrValue(list=entries)
    return AttrValue(type=tf.as_dtype(value).as_datatype_enum)


@functools.cache
def _defaults(type_: str) -> dict[str, Any]:
    """The default attributes of a type of operation."""
    options = compat.op_definition(type_).attr
    return {
        o.name: o.default_value for o in options if o.HasField("default_value")
    }


def _dtype_of(arg: OpDef.ArgDef, attributes: dict[str, Any]) -> tf.DType:
    """The dtype of an argument; ``SIZE_DTYPE`` if any dtype will do."""
    if arg.type:
        return tf.as_dtype(arg.type)
    dtype = attributes.setdefault(arg.type_attr, SIZE_DTYPE)
    return tf.as_dtype(dtype.type if isinstance(dtype, AttrValue) else dtype)
