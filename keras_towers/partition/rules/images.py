"""Convolutions, pooling and other operations on images of a batch."""

from __future__ import annotations

from typing import Any

from keras_towers.partition.conversions import local_shape, static
from keras_towers.partition.factors import Factors
from keras_towers.partition.layouts import Value
from keras_towers.partition.node import Node
from keras_towers.partition.partitioner import Partitioner
from keras_towers.partition.registry import axes, rule

# How many of their first inputs are images.
_IMAGES = {
    **dict.fromkeys(("Conv2D", "Conv3D", "DepthwiseConv2dNative"), 1),
    **dict.fromkeys(("MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D"), 1),
    **dict.fromkeys(("MaxPoolV2", "LRN", "Dilation2D"), 1),
    **dict.fromkeys(("ResizeBilinear", "ResizeNearestNeighbor"), 1),
    **dict.fromkeys(("ResizeBicubic", "ResizeArea"), 1),
    **dict.fromkeys(("ScaleAndTranslate", "AdjustContrastv2"), 1),
    **dict.fromkeys(("AdjustHue", "AdjustSaturation"), 1),
    **dict.fromkeys(("RGBToHSV", "HSVToRGB"), 1),
    **dict.fromkeys(("SpaceToDepth", "DepthToSpace"), 1),
    **dict.fromkeys(("ExtractImagePatches", "ExtractVolumePatches"), 1),
    **dict.fromkeys(("MaxPoolGrad", "MaxPool3DGrad"), 3),
    **dict.fromkeys(("MaxPoolGradGrad", "MaxPool3DGradGrad"), 3),
    **dict.fromkeys(("LRNGrad",), 3),
    **dict.fromkeys(("ImageProjectiveTransformV2",), 2),
    **dict.fromkeys(("ImageProjectiveTransformV3",), 2),
    **dict.fromkeys(("ResizeBilinearGrad", "ResizeBicubicGrad"), 2),
    **dict.fromkeys(("ScaleAndTranslateGrad",), 2),
}
_LINEAR = {"Conv2D", "Conv3D", "DepthwiseConv2dNative", "AvgPool", "AvgPool3D"}
_LINEAR |= {"SpaceToDepth", "DepthToSpace", "ResizeBilinear"}
# Without an image TensorFlow refuses them, or returns memory as it finds it.
_NEED_IMAGES = ("MaxPool3DGradGrad", "DepthwiseConv2dNativeBackpropFilter")
# They are told the sizes of the images that they make.
_TO_IMAGES = (
    "Conv2DBackpropInput",
    "DepthwiseConv2dNativeBackpropInput",
    "Conv3DBackpropInputV2",
    "AvgPoolGrad",
    "AvgPool3DGrad",
)


@axes(*_IMAGES)
def _images(node: Node, *inputs: Value) -> Factors | None:
    ranks = [node.rank(k) for k in range(node.num_inputs)]
    output = node.output_rank()
    if None in ranks or output is None:
        return None
    count = _IMAGES[node.type]
    labels: list[Any] = [
        [0, *[None] * ((rank or 1) - 1)] if k < count else None
        for k, rank in enumerate(ranks)
    ]
    linear = (frozenset({0}),) if node.type in _LINEAR else ()
    return Factors(
        labels,
        [[0, *[None] * (output - 1)]],
        linear=linear,
        needs_rows=node.type in _NEED_IMAGES,
    )


@rule(*_TO_IMAGES)
def _to_images(
    partition: Partitioner, node: Node, size: Value, *rest: Value
) -> list[Value] | None:
    gradient, shape = rest[-1], node.shapes[0]
    layout = gradient.sharded
    if layout is None or layout.axis or shape.rank is None:
        return None
    if any(value.sharded is not None for value in rest[:-1]):
        return None
    sizes = [layout.size, *list(shape)[1:]]
    if size.known is not None:
        # Others than those of the rows may be of the kernel.
        if len(size.known) != len(sizes):
            return None
        known = [s if isinstance(s, int) else None for s in size.known[1:]]
        sizes[1:] = [
            own if one is None else one
            for own, one in zip(sizes[1:], known, strict=True)
        ]
    target = partition.local_target(size, sizes, layout)
    given = [partition.local(value) for value in rest[:-1]]
    assert gradient.local is not None
    (local,) = partition.builder.copy(
        node.operation,
        [target, *given, gradient.local],
        [local_shape(static(sizes), layout)],
    )
    return [Value(layout, local, shape=tuple(sizes))]


@axes(
    "Conv2DBackpropFilter",
    "DepthwiseConv2dNativeBackpropFilter",
    "Conv3DBackpropFilterV2",
)
def _to_kernel(
    node: Node, images: Value, size: Value, gradient: Value
) -> Factors | None:
    ranks = node.rank(0), node.rank(2)
    output = node.output_rank()
    if None in ranks or output is None:
        return None
    labels = [[0, *[None] * ((rank or 1) - 1)] for rank in ranks]
    return Factors(
        [labels[0], None, labels[1]],
        [[None] * output],
        frozenset({0}),
        (frozenset({0}), frozenset({2})),
        needs_rows=node.type in _NEED_IMAGES,
    )
