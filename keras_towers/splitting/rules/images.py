"""Convolutions, pooling and other operations on images and sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence

from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import (
    all_outputs,
    fixed,
    free,
    one_order,
    refuse_sums,
    rows_of,
    rule,
)
from keras_towers.splitting.values import (
    DoesNotSplit,
    Kind,
    Shape,
    Value,
    common,
    product,
    same,
    total,
)


def _along_first(node: Node, *values: Value) -> None:
    for value in values:
        if value.kind is Kind.ROWS and rows_of(value).axis:
            raise DoesNotSplit(
                f"takes {node.type} along the examples of the batch"
            )


def _windows(node: Node, like: Value) -> Shape | None:
    """The shape of an output: that of the trace, but for the examples."""
    shape = node.static_shape()
    if shape is None or like.shape is None:
        return None
    return (like.shape[0], *shape[1:])


def _convolved(
    node: Node, images: Value, kernel: Value, shape: Shape | None
) -> Value:
    _along_first(node, images)
    if kernel.kind is Kind.ROWS:
        raise DoesNotSplit("convolves with a kernel for each example")
    degree = product(images.degree, kernel.degree)
    if Kind.SUM in (images.kind, kernel.kind):
        if (
            Kind.ROWS in (images.kind, kernel.kind)
            or images.kind is kernel.kind
        ):
            raise DoesNotSplit("convolves with a sum or mean over the batch")
        return total(degree, shape=shape)
    return images.with_(degree=degree, shape=shape)


@rule("Conv2D", "Conv3D", "DepthwiseConv2dNative")
def _convolution(node: Node, images: Value, kernel: Value) -> Value:
    return _convolved(node, images, kernel, _windows(node, images))


@rule(
    *("Conv2DBackpropInput", "Conv3DBackpropInputV2"),
    "DepthwiseConv2dNativeBackpropInput",
)
def _convolution_to_input(
    node: Node, sizes: Value, kernel: Value, upstream: Value
) -> Value:
    return _convolved(node, upstream, kernel, _windows(node, upstream))


@rule(
    *("Conv2DBackpropFilter", "Conv3DBackpropFilterV2"),
    "DepthwiseConv2dNativeBackpropFilter",
)
def _convolution_to_kernel(
    node: Node, images: Value, sizes: Value, upstream: Value
) -> Value:
    _along_first(node, images, upstream)
    refuse_sums(node, (images, upstream))
    degree = product(images.degree, upstream.degree)
    shape = node.static_shape()
    if Kind.ROWS not in (images.kind, upstream.kind):
        return same(degree, shape=shape)
    one_order(node, (images, upstream))
    return total(degree, shape=shape)


@rule(
    *("MaxPool", "MaxPoolV2", "AvgPool", "MaxPool3D", "AvgPool3D"),
    *("ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic", "ResizeArea"),
    *("ScaleAndTranslate", "LRN", "Dilation2D", "AdjustContrastv2"),
    *("AdjustHue", "AdjustSaturation", "RGBToHSV", "HSVToRGB"),
    *("SpaceToDepth", "DepthToSpace", "ExtractImagePatches"),
    "ExtractVolumePatches",
)
def _pooled(node: Node, images: Value, *options: Value) -> Value:
    refuse_sums(node, (images,))
    for option in options:
        if not option.is_same:
            raise DoesNotSplit(
                f"takes {node.type} by what follows from the batch"
            )
    if node.type in ("LRN", "Dilation2D", "AdjustHue", "RGBToHSV", "HSVToRGB"):
        free(node, images)
    image = node.type in (
        "RGBToHSV",
        "HSVToRGB",
        "AdjustContrastv2",
        "AdjustHue",
        "AdjustSaturation",
    )
    if image:
        _not_inside(node, images)
        return images.with_(shape=images.shape)
    _along_first(node, images)
    return images.with_(shape=_windows(node, images))


def _not_inside(node: Node, images: Value) -> None:
    """Refuse examples as height, width or channels."""
    rank = node.rank(0) or 3
    inner = 1 if node.type.endswith(("HSV", "RGB")) else 3
    if images.kind is Kind.ROWS and rows_of(images).axis >= rank - inner:
        raise DoesNotSplit(f"takes {node.type} along the examples of the batch")


@rule("MaxPoolGrad", "MaxPool3DGrad")
def _to_largest(
    node: Node, before: Value, after: Value, upstream: Value
) -> Value:
    refuse_sums(node, (before, after, upstream))
    _along_first(node, before, after, upstream)
    return _together(node, (before, after, upstream), before.shape)


@rule("MaxPoolGradGrad", "MaxPool3DGradGrad")
def _to_largest_again(
    node: Node, before: Value, after: Value, upstream: Value
) -> Value:
    refuse_sums(node, (before, after, upstream))
    _along_first(node, before, after, upstream)
    return _together(node, (before, after, upstream), after.shape)


def _together(
    node: Node, values: Sequence[Value], shape: Shape | None
) -> Value:
    """What is linear in the last of several values, example by example."""
    degree = values[-1].degree
    if all(value.rows is None for value in values):
        return same(degree, shape=shape)
    rows = one_order(node, values)
    return Value(Kind.ROWS, degree, rows, shape=shape)


@rule("AvgPoolGrad", "AvgPool3DGrad")
def _to_mean(node: Node, sizes: Value, upstream: Value) -> Value:
    _along_first(node, upstream)
    return upstream.with_(shape=_windows(node, upstream))


@rule(
    *("ResizeBilinearGrad", "ResizeNearestNeighborGrad", "ResizeBicubicGrad"),
    "ScaleAndTranslateGrad",
)
def _to_resized(node: Node, upstream: Value, *options: Value) -> Value:
    _along_first(node, upstream)
    return upstream.with_(shape=_windows(node, upstream))


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def _batch_norm(node: Node, images: Value, *parameters: Value) -> list[Value]:
    if node.attr("is_training"):
        raise DoesNotSplit("normalizes by the mean and variance of the batch")
    refuse_sums(node, (images, *parameters))
    _along_first(node, images)
    if any(not p.is_same for p in parameters):
        raise DoesNotSplit("normalizes by what follows from the batch")
    free(node, images)
    rest = [same() for _ in range(node.num_outputs - 1)]
    return [images.with_(shape=images.shape), *rest]


@rule("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
def _transformed(
    node: Node, images: Value, transforms: Value, *options: Value
) -> Value:
    values: Sequence[Value] = (images, transforms)
    refuse_sums(node, values)
    _along_first(node, *values)
    free(node, transforms)
    fill = options[-1]
    if fill.kind is not Kind.SAME or (
        fill.degree is not None and fill.degree != (images.degree or 0)
    ):
        raise DoesNotSplit("fills images with what follows from the batch")
    degree = common((images.degree, fill.degree), "joins")
    like = images if images.kind is Kind.ROWS else transforms
    shape = _windows(node, like)
    if shape is not None and options[0].known is not None:
        shape = (shape[0], *options[0].known, *shape[3:])
    result = _together(node, (transforms, images), shape)
    return result.with_(degree=degree, shape=shape)


@rule("NonMaxSuppressionV3", "NonMaxSuppressionV4", "NonMaxSuppressionV5")
def _suppressed(node: Node, *values: Value) -> list[Value]:
    if any(not v.is_same for v in values):
        raise DoesNotSplit("compares the boxes of examples with each other")
    return all_outputs(node, same())


@rule("CTCLoss", "CTCLossV2")
def _ctc(node: Node, inputs: Value, *values: Value) -> list[Value]:
    raise DoesNotSplit("aligns sparse labels")


@rule("SpaceToBatchND", "BatchToSpaceND")
def _blocks(node: Node, value: Value, sizes: Value, ends: Value) -> Value:
    """Blocks of pixels become rows of the batch, or rows become blocks."""
    block = [int(size) for size in fixed(sizes, "a size of blocks")]
    if not ends.is_same:
        raise DoesNotSplit("pads by what follows from the batch")
    if value.kind is not Kind.ROWS or rows_of(value).axis < 0:
        return value.with_()
    rows, times = rows_of(value), math.prod(block)
    if 0 < rows.axis <= len(block):
        raise DoesNotSplit(f"takes {node.type} along the examples of the batch")
    if rows.axis:
        return value.with_()
    rows = node.layouts.resolved(rows)
    if node.type == "SpaceToBatchND":
        return value.with_(rows=rows.in_order(times * rows.outer, rows.inner))
    if rows.outer % times:
        raise DoesNotSplit("makes blocks of rows of several examples")
    return value.with_(rows=rows.in_order(rows.outer // times, rows.inner))
