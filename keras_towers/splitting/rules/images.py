"""Convolutions, pooling and other operations on images and sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence

from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import (
    aligned,
    fixed,
    free,
    has_sum,
    refuse_others,
    refuse_sums,
    rows_of,
    rule,
)
from keras_towers.splitting.values import (
    Degree,
    DoesNotSplit,
    Kind,
    Shape,
    Value,
    common,
    other,
    product,
    same,
    total,
)


def _along_first(node: Node, *values: Value) -> None:
    if any(value.axis for value in values):
        raise DoesNotSplit(f"takes {node.type} along the examples of the batch")


def _windows(node: Node, like: Value) -> Shape | None:
    """The shape of an output: that of the trace, but for the examples."""
    shape = node.static_shape()
    if shape is None or like.shape is None:
        return None
    return (like.shape[0], *shape[1:])


def _together(
    node: Node, values: Sequence[Value], degree: Degree, shape: Shape | None
) -> Value:
    """What is computed of several values, example by example."""
    _along_first(node, *values)
    result = aligned(node, values, degree, [0] * len(values))
    return result.with_(shape=shape)


@rule("Conv2D", "Conv3D", "DepthwiseConv2dNative")
def _convolved(node: Node, images: Value, kernel: Value) -> Value:
    _along_first(node, images)
    if kernel.kind is Kind.ROWS:
        raise DoesNotSplit("convolves with a kernel for each example")
    degree = product(images.degree, kernel.degree)
    shape = _windows(node, images)
    if has_sum((images, kernel)):
        return total(degree, shape=shape)
    return images.with_(degree=degree, shape=shape)


@rule(
    *("Conv2DBackpropInput", "Conv3DBackpropInputV2"),
    "DepthwiseConv2dNativeBackpropInput",
    sizes=(0,),
)
def _to_images(
    node: Node, sizes: Value, kernel: Value, upstream: Value
) -> Value:
    return _convolved(node, upstream, kernel)


@rule(
    *("Conv2DBackpropFilter", "Conv3DBackpropFilterV2"),
    "DepthwiseConv2dNativeBackpropFilter",
    sizes=(1,),
)
def _to_kernel(
    node: Node, images: Value, sizes: Value, upstream: Value
) -> Value:
    values = images, upstream
    refuse_sums(node, values)
    degree = product(images.degree, upstream.degree)
    shape = node.static_shape()
    result = _together(node, values, degree, shape)
    return result if result.rows is None else total(degree, shape=shape)


@rule(
    *("MaxPool", "MaxPoolV2", "AvgPool", "MaxPool3D", "AvgPool3D"),
    *("ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic", "ResizeArea"),
    *("ScaleAndTranslate", "LRN", "Dilation2D", "SpaceToDepth", "DepthToSpace"),
    *("ExtractImagePatches", "ExtractVolumePatches"),
)
def _of_windows(node: Node, images: Value, *options: Value) -> Value:
    _check_images(node, images, options)
    _along_first(node, images)
    return images.with_(shape=_windows(node, images))


@rule(
    *("AdjustContrastv2", "AdjustHue", "AdjustSaturation"),
    *("RGBToHSV", "HSVToRGB"),
)
def _of_pixels(node: Node, images: Value, *options: Value) -> Value:
    _check_images(node, images, options)
    # Height, width and channels, or these alone.
    inner = 1 if node.type.endswith(("HSV", "RGB")) else 3
    rank = node.rank(0) or 3
    if images.axis is not None and images.axis >= rank - inner:
        raise DoesNotSplit(f"takes {node.type} along the examples of the batch")
    return images.with_(shape=images.shape)


def _check_images(node: Node, images: Value, options: Sequence[Value]) -> None:
    refuse_sums(node, (images,))
    refuse_others(options, f"takes {node.type} by what follows from the batch")
    if node.type in ("LRN", "Dilation2D", "AdjustHue", "RGBToHSV", "HSVToRGB"):
        free(node, images)


@rule(
    *("MaxPoolGrad", "MaxPool3DGrad", "MaxPoolGradGrad", "MaxPool3DGradGrad"),
)
def _to_largest(node: Node, *values: Value) -> Value:
    before, after, upstream = values
    refuse_sums(node, values)
    like = after if node.type.endswith("GradGrad") else before
    return _together(node, values, upstream.degree, like.shape)


@rule("AvgPoolGrad", "AvgPool3DGrad", sizes=(0,))
def _to_mean(node: Node, sizes: Value, upstream: Value) -> Value:
    return _to_resized(node, upstream)


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
    refuse_others(parameters, "normalizes by what follows from the batch")
    free(node, images)
    # What is for a gradient in training may be left unset otherwise.
    unset = [other("is unset but in training")] * (node.num_outputs - 3)
    return [images.with_(shape=images.shape), same(), same(), *unset]


@rule("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
def _transformed(
    node: Node, images: Value, transforms: Value, *options: Value
) -> Value:
    refuse_sums(node, (images, transforms))
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
    return _together(node, (transforms, images), degree, shape)


@rule("NonMaxSuppressionV3", "NonMaxSuppressionV4", "NonMaxSuppressionV5")
def _suppressed(node: Node, *values: Value) -> Value:
    refuse_others(values, "compares the boxes of examples with each other")
    return same()


@rule("CTCLoss", "CTCLossV2")
def _ctc(node: Node, inputs: Value, *values: Value) -> list[Value]:
    raise DoesNotSplit("aligns sparse labels")


@rule("SpaceToBatchND", "BatchToSpaceND")
def _blocks(node: Node, value: Value, sizes: Value, ends: Value) -> Value:
    """Blocks of pixels become rows of the batch, or rows become blocks."""
    block = [int(size) for size in fixed(sizes, "a size of blocks")]
    refuse_others([ends], "pads by what follows from the batch")
    if value.axis in range(1, len(block) + 1):
        raise DoesNotSplit(f"takes {node.type} along the examples of the batch")
    if value.axis != 0:
        return value.with_()
    rows, times = node.layouts.resolved(rows_of(value)), math.prod(block)
    if node.type == "SpaceToBatchND":
        return value.with_(rows=rows.in_order(times * rows.outer, rows.inner))
    if rows.outer % times:
        raise DoesNotSplit("makes blocks of rows of several examples")
    return value.with_(rows=rows.in_order(rows.outer // times, rows.inner))
