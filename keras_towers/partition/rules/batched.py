"""Operations on each of a batch: on images, matrices and distributions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from keras_towers.partition.factors import Factors
from keras_towers.partition.layouts import Value, Values, require
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.registry import Node, axes, rule

# How many of their first inputs are images.
_IMAGES = {
    1: """
        Conv2D Conv3D DepthwiseConv2dNative MaxPool AvgPool MaxPool3D AvgPool3D
        MaxPoolV2 LRN Dilation2D ResizeBilinear ResizeNearestNeighbor
        ResizeBicubic ResizeArea ScaleAndTranslate AdjustContrastv2 AdjustHue
        AdjustSaturation RGBToHSV HSVToRGB SpaceToDepth DepthToSpace
        ExtractImagePatches ExtractVolumePatches
    """,
    2: """
        ImageProjectiveTransformV2 ImageProjectiveTransformV3 ResizeBilinearGrad
        ResizeBicubicGrad ScaleAndTranslateGrad
    """,
    3: "MaxPoolGrad MaxPool3DGrad MaxPoolGradGrad MaxPool3DGradGrad LRNGrad",
}
_LINEAR_IMAGES = """
    Conv2D Conv3D DepthwiseConv2dNative AvgPool AvgPool3D SpaceToDepth
    DepthToSpace ResizeBilinear
"""
# Without an image TensorFlow refuses them, or returns uninitialized memory. Of
# oneDNN's, convolutions return a tensor with the shape of the input, and
# gradients of pooling end the process.
_NEED_IMAGES = """
    Conv2D Conv3D DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter
    MaxPoolGrad MaxPool3DGrad MaxPool3DGradGrad
"""
# How many axes they work along, which are the last.
_ALONG_LAST = {
    1: "Softmax LogSoftmax TopK TopKV2",
    2: """
        MatrixInverse Cholesky Qr Svd Lu SelfAdjointEigV2 MatrixDeterminant
        LogMatrixDeterminant MatrixSquareRoot MatrixExponential
    """,
}
_LINEAR_ALONG_LAST = {
    1: "MatrixDiag MatrixDiagV2 MatrixDiagV3 FFT IFFT RFFT IRFFT",
    2: """
        MatrixBandPart MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3 FFT2D
        IFFT2D RFFT2D IRFFT2D
    """,
    3: "FFT3D IFFT3D RFFT3D IRFFT3D",
}


def _by_type(types_by_count: dict[int, str]) -> dict[str, int]:
    return {
        type_: count
        for count, types in types_by_count.items()
        for type_ in types.split()
    }


_COUNT_OF_IMAGES = _by_type(_IMAGES)
_COUNT_OF_LAST = _by_type(_ALONG_LAST) | _by_type(_LINEAR_ALONG_LAST)


def _axes_of_batch(
    node: Node,
    inputs: Values,
    ahead: int,
    count: int = 1,
    linear: Sequence[Collection[int]] = (),
    needs_rows: bool = False,
) -> Factors:
    """Return the axes of an operation on each of a batch.

    Args:
        node: the operation.
        inputs: its inputs.
        ahead: how many axes count the batch: the first of all.
        count: how many of the inputs have them; the rest are options.
        linear: as of ``Factors``.
        needs_rows: as of ``Factors``.
    """
    require(all(shape.rank is not None for shape in node.shapes))
    ranks = [value.rank for value in inputs[:count]]
    ranks += [shape.rank or 0 for shape in node.shapes]
    labels = [[a if a < ahead else None for a in range(r)] for r in ranks]
    options = [None] * (len(inputs) - count)
    return Factors(
        [*labels[:count], *options],
        labels[count:],
        linear,
        needs_rows=needs_rows,
    )


@axes(*_COUNT_OF_IMAGES)
def _images(node: Node, *inputs: Value) -> Factors:
    is_linear = node.type in _LINEAR_IMAGES.split()
    return _axes_of_batch(
        node,
        inputs,
        1,
        _COUNT_OF_IMAGES[node.type],
        [[0]] if is_linear else (),
        node.type in _NEED_IMAGES.split(),
    )


# They are told the sizes of the images that they make.
@rule(
    "Conv2DBackpropInput",
    "DepthwiseConv2dNativeBackpropInput",
    "Conv3DBackpropInputV2",
    "AvgPoolGrad",
    "AvgPool3DGrad",
)
def _to_images(
    partition: Partitioner, node: Node, size: Value, *rest: Value
) -> Values:
    *kernel, gradient = rest
    (layout, rows), traced = gradient.as_rows(), node.shapes[0]
    require(traced.rank is not None and not layout.axis)
    require(all(value.sharded is None for value in kernel))
    sizes = [layout.size, *list(traced)[1:]]
    if size.known is not None:
        # Others than those of the rows may be of the kernel.
        require(len(size.known) == len(sizes))
        for axis, known in enumerate(size.known):
            if axis and isinstance(known, int):
                sizes[axis] = known
    target = partition.local_target(size, sizes, layout)
    operands = [target, *map(partition.replicated, kernel), rows]
    return partition.on_towers(node, operands, layout, shapes=[sizes])


@axes(
    "Conv2DBackpropFilter",
    "DepthwiseConv2dNativeBackpropFilter",
    "Conv3DBackpropFilterV2",
)
def _to_kernel(
    node: Node, images: Value, size: Value, gradient: Value
) -> Factors:
    # All have as many axes.
    rest = [None] * (images.rank - 1)
    return Factors(
        [[0, *rest], None, [0, *rest]],
        [[None, *rest]],
        [[0], [2]],
        summed=[0],
        needs_rows=node.type in _NEED_IMAGES.split(),
    )


@axes(*_COUNT_OF_LAST)
def _along_last(node: Node, value: Value, *options: Value) -> Factors:
    # Diagonals may be filled up with an entry.
    is_filled = len(options) > 1 and node.type.startswith("MatrixDiag")
    is_linear = node.type in _by_type(_LINEAR_ALONG_LAST) and not is_filled
    ahead = value.rank - _COUNT_OF_LAST[node.type]
    linear = [[0]] if is_linear else ()
    return _axes_of_batch(node, [value, *options], ahead, linear=linear)


@axes("NthElement", "InTopK")
def _rows(node: Node, value: Value, *rest: Value) -> Factors:
    return _axes_of_batch(node, [value, *rest], value.rank - 1, 1 + len(rest))


@axes(
    "InTopKV2",
    "SoftmaxCrossEntropyWithLogits",
    "SparseSoftmaxCrossEntropyWithLogits",
)
def _predictions(node: Node, *inputs: Value) -> Factors:
    return _axes_of_batch(node, inputs, 1, 2)


@axes("MatrixSolve", "MatrixTriangularSolve", "MatrixSolveLs")
def _solved(node: Node, *inputs: Value) -> Factors:
    matrix, right = inputs[:2]
    require(matrix.rank == right.rank)
    return _axes_of_batch(node, inputs, matrix.rank - 2, 2, [[1]])


@axes("MatrixSetDiag", "MatrixSetDiagV2", "MatrixSetDiagV3")
def _with_diagonal(node: Node, *inputs: Value) -> Factors:
    return _axes_of_batch(node, inputs, inputs[0].rank - 2, 2, [[0, 1]])


@axes("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def _product(node: Node, a: Value, b: Value) -> Factors:
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
    return Factors(labels, [output], [[0], [1]], summed=["inner"])


@axes("Einsum")
def _einsum(node: Node, *inputs: Value) -> Factors:
    equation = node.attr("equation").decode().replace(" ", "")
    left, _, output = equation.partition("->")
    terms = left.split(",")
    require(not any(len({*term}) < len(term) for term in (*terms, output)))
    require("." not in equation)
    summed = set(left) - set(output) - {","}
    return Factors(terms, [output], [[k] for k in range(len(terms))], summed)
