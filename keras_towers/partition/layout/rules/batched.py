"""Operations on each item of a batch: images, matrices, distributions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Hashable

from keras_towers.partition.ir.layouts import (
    REPLICATED,
    Shape,
    Sharded,
    local_shape,
    sizes_of,
)
from keras_towers.partition.ir.reasons import SHAPE, require, unless_none
from keras_towers.partition.ir.registry import (
    Factors,
    FactorsOf,
    Labels,
    operation,
)
from keras_towers.partition.ir.sizes import UNKNOWN, Size, broadcast
from keras_towers.partition.ir.values import Value, Values, known_ints
from keras_towers.partition.layout.layout_pass import apply_rules
from keras_towers.partition.layout.nodes import Node
from keras_towers.partition.layout.rules.row_numbers import note_limits
from keras_towers.partition.layout.rules.shapes import like_first


def _cross_entropy(node: Node, scores: Value, labels: Value) -> Values:
    """Lay out a cross entropy whose scores and labels differ in their unit.

    Both have equally many rows. The losses are later reshaped to the length of
    one of them.
    """
    (first, _), (second, _) = scores.as_rows(), labels.as_rows()
    units = [node.units.whole_unit(rows.unit)[0] for rows in (first, second)]
    require(units[0] is units[1] and first.unit is not second.unit)
    require(dataclasses.replace(second, unit=first.unit) == first)
    layout = second if node.type.startswith("Sparse") else first
    return apply_rules(
        node, [_with_rows(value, layout) for value in (scores, labels)]
    )


def _with_rows(value: Value, layout: Sharded) -> Value:
    """Return a value with the same rows, counted in another unit."""
    sizes = list(value.sizes)
    sizes[layout.axis] = layout.size
    return dataclasses.replace(value, layout=layout, shape=tuple(sizes))


def batch(
    first: int,
    count: int = 1,
    *linear: Collection[int],
    needs_rows: bool = False,
    vectors: str = "",
) -> FactorsOf:
    """Return a function that labels the axes of operations on items of a batch.

    Args:
        first: the number of first axes that are those of the batch; if it is
            negative, those are all but so many.
        count: the number of inputs that have them, which are the first.
        *linear: as in ``Factors``.
        needs_rows: as in ``Factors``.
        vectors: the attribute without which only the first output is computed;
            the others then have no entries, and no axis of the batch.
    """

    def axes(node: Node, *inputs: Value) -> Factors:
        require(all(shape.rank is not None for shape in node.shapes), SHAPE)
        ranks = [value.rank for value in inputs[:count]]
        batch_axes = first if first > 0 else ranks[0] + first
        ranks += [shape.rank or 0 for shape in node.shapes]
        if node.type in ("MatrixDiagV2", "MatrixDiagV3"):
            # A band of diagonals has another axis.
            batch_axes = ranks[1] - 2
        labels = [
            [a if a < batch_axes else None for a in range(r)] for r in ranks
        ]
        outputs: list[Labels | None] = [*labels[count:]]
        if vectors and not node.attr(vectors):
            outputs[1:] = [None] * len(outputs[1:])
        return Factors(
            labels[:count], outputs, linear=linear, needs_rows=needs_rows
        )

    return axes


def _image_shape(node: Node, images: Value, *kernel: Value) -> Shape:
    """Return the shape of padded images, which keep their size."""
    require(node.attr("padding") == b"SAME", SHAPE)
    sizes = [
        size if stride == 1 and isinstance(size, Size) else UNKNOWN
        for size, stride in zip(images.sizes, node.attr("strides"), strict=True)
    ]
    if kernel:
        channels_first = node.attr("data_format").startswith(b"NC")
        sizes[1 if channels_first else -1] = UNKNOWN
    return tuple(sizes)


def _top_k_shape(node: Node, value: Value, count: Value) -> Shape:
    return (*value.sizes[:-1], count.number)


def _space_and_batch(
    node: Node, images: Value, block: Value, ends: Value
) -> Values:
    """Move blocks of images to the batch, or back, for dilated convolutions."""
    layout, own = images.as_rows()
    number, blocks = math.prod(known_ints(block)), layout.blocks
    is_joined = node.type == "BatchToSpaceND"
    require(not layout.axis and not (is_joined and blocks % number))
    after = dataclasses.replace(
        layout, blocks=blocks // number if is_joined else blocks * number
    )
    converter = node.converter
    operands = [own, converter.replicate(block), converter.replicate(ends)]
    sizes = [after.size, *sizes_of(node.shapes[0][1:])]
    return node.run_on_towers(operands, after, shapes=[sizes])


def _input_gradient(node: Node, size: Value, *rest: Value) -> Values:
    """Lay out operations that take the shape of their output."""
    *kernel, gradient = rest
    (layout, _), traced = gradient.as_rows(), node.shapes[0]
    require(traced.rank is not None and not layout.axis)
    require(all(value.sharded is None for value in kernel))
    sizes = [layout.size, *sizes_of(traced)[1:]]
    if size.known is not None:
        # Trailing sizes may come from the kernel.
        require(len(size.known) == len(sizes))
        for axis, known in enumerate(size.known):
            if axis and known is not UNKNOWN:
                sizes[axis] = known
    return node.run_with_shape([size, *rest], 0, sizes, layout)


def _filter_gradient(
    node: Node, images: Value, size: Value, gradient: Value
) -> Factors:
    # Images and gradients have the same rank.
    rest = [None] * (images.rank - 1)
    return Factors(
        [[0, *rest], None, [0, *rest]],
        [[None, *rest]],
        linear=[[0], [2]],
        summed=[0],
        # Its kernel leaves the output uninitialized if there are no images.
        needs_rows=node.type.startswith("Depthwise"),
    )


def _main_diagonal(node: Node, *inputs: Value) -> Values:
    """Lay out a main diagonal: each row has an entry in its own column."""
    # The ranks of the inputs that are a matrix or its diagonal.
    ranks = {"MatrixDiagV3": [1], "MatrixDiagPartV3": [2]}.get(
        node.type, [2, 1]
    )
    builder, converter = node.builder, node.converter
    values, (offset, *options) = inputs[: len(ranks)], inputs[len(ranks) :]
    layouts = (v.sharded for v in values if v.sharded is not None)
    layout = unless_none(next(layouts, None))
    size = layout.size
    require(not layout.axis and _is_main(offset))
    *_, last = values
    if node.type == "MatrixSetDiagV3" and UNKNOWN in (last.shape or [UNKNOWN]):
        # Only a diagonal of this size fits into the matrix.
        last.shape = (size,)
    require([value.sizes for value in values] == [(size,) * r for r in ranks])
    total = unless_none(node.units.global_size(size))
    rows = [converter.shard(value, layout) for value in values]
    columns = builder.op("Range", [0, total, 1], (None,))
    numbered = Value(REPLICATED, whole=columns, shape=(size,))
    own = converter.shard(numbered, layout)
    shape = local_shape(node.shapes[0], layout)
    if node.type == "MatrixDiagPartV3":
        entries = builder.op("GatherV2", [rows[0], own, 1], shape, batch_dims=1)
        return [Value(layout, entries, shape=(size,))]
    if node.type == "MatrixDiagV3":
        height, width, padding = options
        require(height.number == width.number == -1)
        rows.insert(0, converter.replicate(padding))
    others, diagonal = rows
    is_own = builder.op(
        "Equal",
        [builder.op("ExpandDims", [own, 1], (None, 1)), columns],
        (None, None),
        incompatible_shape_error=True,
    )
    diagonal = builder.op("ExpandDims", [diagonal, 1], (None, 1))
    local = builder.op("SelectV2", [is_own, diagonal, others], shape)
    return [Value(layout, local, shape=(size, size))]


def _is_main(offset: Value) -> bool:
    """Whether a diagonal is the main one."""
    return offset.known is not None and not any(offset.known.flat)


def _diagonal_matrix(
    node: Node, diagonal: Value, offset: Value, *rest: Value
) -> Shape:
    rows, columns, _ = rest
    require(_is_main(offset) and rows.number == columns.number == -1)
    return (*diagonal.sizes, diagonal.sizes[-1])


def _searched(node: Node, sequences: Value, values: Value) -> Factors:
    """Label a search for values, each of them in the sequence of its row."""
    return Factors([["row", None], ["row", "value"]], [["row", "value"]])


def _solve(node: Node, matrix: Value, right: Value, *options: Value) -> Factors:
    """Label a linear system, whose right-hand columns are independent."""
    most = max(matrix.rank, right.rank) - 2
    # The axes of the batch are counted from the last one on, to be broadcast.
    batches = [range(2 - value.rank, 0) for value in (matrix, right)]
    return Factors(
        [[*batches[0], None, None], [*batches[1], None, "columns"]],
        [[*range(-most, 0), None, "columns"]],
    )


def _matmul(node: Node, a: Value, b: Value) -> Factors:
    is_single = node.type == "MatMul"
    names = ("transpose_a", "transpose_b") if is_single else ("adj_x", "adj_y")
    most = max(a.rank, b.rank) - 2
    batch = [f"batch{k}" for k in range(most)]
    labels = []
    pairs = (["left", "inner"], ["inner", "right"])
    for value, name, pair in zip((a, b), names, pairs, strict=True):
        ends = pair[::-1] if node.attr(name) else pair
        labels.append([*batch[most + 2 - value.rank :], *ends])
    output = [*batch, "left", "right"]
    return Factors(labels, [output], linear=[[0], [1]], summed=["inner"])


def _einsum(node: Node, *inputs: Value) -> Factors:
    equation = node.attr("equation").decode().replace(" ", "")
    left, _, right = equation.partition("->")
    terms = [
        _einsum_labels(term, value.rank)
        for term, value in zip(left.split(","), inputs, strict=True)
    ]
    # The axes of the ellipsis are numbers.
    batch = max(sum(isinstance(a, int) for a in term) for term in terms)
    output = _einsum_labels(right, len(right.replace("...", "")) + batch)
    require(not any(len({*term}) < len(term) for term in (*terms, output)))
    # A factor without the axis multiplies the sum, which may not be 0 times
    # infinity although a tower's term is.
    summed = set.intersection(*map(set, terms)) - set(output)
    return Factors(
        terms, [output], linear=[[k] for k in range(len(terms))], summed=summed
    )


def _einsum_labels(term: str, rank: int) -> list[Hashable]:
    """Return the labels of a term; each axis of the ellipsis is a number.

    These axes are broadcast, so they are counted from the last one on.
    """
    before, ellipsis, after = term.partition("...")
    count = rank - len(before) - len(after) if ellipsis else 0
    return [*before, *range(-count, 0), *after]


# ---- what is known of them ---------------------------------------------------

# fmt: off
operation("""
    MaxPool3D MaxPoolV2 LRN Dilation2D ResizeNearestNeighbor ResizeBicubic
    ResizeArea ScaleAndTranslate ExtractImagePatches ExtractVolumePatches
""", labels=batch(1))
operation("MaxPool", labels=batch(1), shape=_image_shape)
operation("AvgPool", labels=batch(1, 1, [0]), shape=_image_shape)
operation("AvgPool3D SpaceToDepth DepthToSpace ResizeBilinear",
    labels=batch(1, 1, [0]))
# Without images, oneDNN's convolutions return a tensor with the shape of their
# input, and its gradients of max-pooling end the process.
operation("Conv2D Conv3D DepthwiseConv2dNative",
    labels=batch(1, 1, [0], needs_rows=True), shape=_image_shape,
    work="convolution")
operation("""
    Conv2DBackpropInput DepthwiseConv2dNativeBackpropInput Conv3DBackpropInputV2
""", _input_gradient, work="convolution")
operation("AvgPoolGrad AvgPool3DGrad", _input_gradient)
operation("""
    Conv2DBackpropFilter DepthwiseConv2dNativeBackpropFilter
    Conv3DBackpropFilterV2
""", labels=_filter_gradient, work="convolution")
operation("""
    ImageProjectiveTransformV2 ImageProjectiveTransformV3 ResizeBilinearGrad
    ResizeBicubicGrad ScaleAndTranslateGrad InTopK InTopKV2
""", labels=batch(1, 2))
operation("MaxPoolGradGrad LRNGrad", labels=batch(1, 3))
operation("MaxPoolGrad MaxPool3DGrad MaxPool3DGradGrad",
    labels=batch(1, 3, needs_rows=True))
operation("SpaceToBatchND BatchToSpaceND", _space_and_batch)
operation("SoftmaxCrossEntropyWithLogits", _cross_entropy, labels=batch(1, 2),
    shape=lambda node, *both: tuple(broadcast(*[v.sizes for v in both])))
# The losses have fewer axes, but the gradient has the shape of the scores.
operation("SparseSoftmaxCrossEntropyWithLogits", _cross_entropy,
    labels=batch(1, 2), shape=like_first)
operation("Softmax", labels=batch(-1), shape=like_first, bounds="finite")
operation("LogSoftmax", labels=batch(-1), shape=like_first)
operation("TopKV2", labels=batch(-1), shape=_top_k_shape, notes=[note_limits])
operation("TopK NthElement AdjustHue AdjustSaturation RGBToHSV HSVToRGB",
    labels=batch(-1))
operation("AdjustContrastv2", labels=batch(-3))
operation("FFT IFFT", labels=batch(-1, 1, [0]), shape=like_first)
operation("FFT2D IFFT2D", labels=batch(-2, 1, [0]), shape=like_first)
operation("RFFT IRFFT", labels=batch(-1, 1, [0]))
operation("RFFT2D IRFFT2D", labels=batch(-2, 1, [0]))
operation("FFT3D IFFT3D RFFT3D IRFFT3D", labels=batch(-3, 1, [0]))
operation("Cross", labels=batch(-1, 2, [0], [1]))
operation("MatrixBandPart", labels=batch(-2, 1, [0]), shape=like_first)
operation("MatrixDiag", labels=batch(-1, 1, [0]))
operation("MatrixDiagPart", labels=batch(-2, 1, [0]))
# The padding of these is an input, which may not be 0.
operation("MatrixDiagV2", labels=batch(-1))
operation("MatrixDiagPartV2", labels=batch(-2))
operation("MatrixDiagV3", _main_diagonal, labels=batch(-1),
    shape=_diagonal_matrix)
operation("MatrixDiagPartV3", _main_diagonal, labels=batch(-2))
operation("MatrixSetDiag MatrixSetDiagV2", labels=batch(-2, 2, [0, 1]),
    shape=like_first)
operation("MatrixSetDiagV3", _main_diagonal, labels=batch(-2, 2, [0, 1]),
    shape=like_first)
operation("Cholesky MatrixInverse MatrixSquareRoot MatrixExponential",
    labels=batch(-2), shape=like_first)
operation("MatrixDeterminant LogMatrixDeterminant Qr Lu", labels=batch(-2))
operation("Svd", labels=batch(-2, vectors="compute_uv"))
operation("Eig SelfAdjointEigV2", labels=batch(-2, vectors="compute_v"))
operation("LowerBound UpperBound", labels=_searched)
operation("MatrixSolve MatrixTriangularSolve MatrixSolveLs", labels=_solve)
operation("MatMul", labels=_matmul, work="product")
operation("BatchMatMul BatchMatMulV2 BatchMatMulV3", labels=_matmul,
    work="products")
operation("Einsum", labels=_einsum, work="product")
