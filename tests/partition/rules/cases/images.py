"""Convolutions, pooling and other operations on images and sequences."""

import numpy as np
import tensorflow as tf

from tests.partition.rules.cases.case import cases, gradient, raw, size

_ONE, _ONES = [1] * 4, [1] * 5
_SAME = {"strides": _ONE, "padding": "SAME"}
_SAME_3D = {"strides": _ONES, "padding": "SAME"}
_HALF, _HALF_3D = [1, 2, 2, 1], [1, 2, 2, 2, 1]
_WINDOW = {"ksize": _HALF, "strides": _HALF, "padding": "SAME"}
_CUBE = {"ksize": _HALF_3D, "strides": _HALF_3D, "padding": "SAME"}
_LANCZOS = {"scale": [2.0, 2.0], "translation": [0.0, 0.0]}
_WARPED = {"output_shape": [4, 4], "interpolation": "BILINEAR"}
_BOXES = {"max_output_size": 2, "iou_threshold": 0.5, "score_threshold": 0.1}


def _to_input(*sizes):
    return {"input_sizes": lambda w, dy: [size(dy), *sizes]}


def _twice(function):
    def apply(x, dy, ddx):
        (dx,) = tf.gradients(function(x), [x], [dy])
        return tf.gradients(dx, [dy], [ddx])

    return apply


def _gradients(args, names, given, of=gradient, end="Grad"):
    """The gradients of operations."""
    every = {f"{n}{end}": of(raw(n, **given)) for n in names.split()}
    return cases(args, every)


_CONVOLUTIONS = [
    *cases("acce, bbed", "Conv2D", _SAME),
    *cases("accce, bbbed", "Conv3D", _SAME_3D),
    *cases("acce, bbed", "DepthwiseConv2dNative", _SAME),
    *cases("bbed, accd", "Conv2DBackpropInput", _to_input(4, 4, 5) | _SAME),
    *cases(
        "bbbed, acccd",
        "Conv3DBackpropInputV2",
        _to_input(4, 4, 4, 5) | _SAME_3D,
    ),
    *cases(
        "bbe1, acce",
        "DepthwiseConv2dNativeBackpropInput",
        _to_input(4, 4, 5) | _SAME,
    ),
    *cases(
        "acce, accd",
        "Conv2DBackpropFilter",
        {"filter_sizes": [3, 3, 5, 2], **_SAME},
    ),
    *cases(
        "accce, acccd",
        "Conv3DBackpropFilterV2",
        {"filter_sizes": [3, 3, 3, 5, 2], **_SAME_3D},
    ),
    *cases(
        "acce, acce",
        "DepthwiseConv2dNativeBackpropFilter",
        {"filter_sizes": [3, 3, 5, 1], **_SAME},
    ),
]
_RESIZED = "ResizeBilinear ResizeNearestNeighbor ResizeBicubic"
_WINDOWS = [
    *cases("acce", "MaxPool MaxPoolV2 AvgPool", _WINDOW),
    *cases("accce", "MaxPool3D AvgPool3D", _CUBE),
    # OneDNN does not check that their sizes match.
    *_gradients("aCCe, aDDe", "MaxPool AvgPool", _WINDOW),
    *_gradients("aCCCe, aDDDe", "MaxPool3D AvgPool3D", _CUBE),
    *_gradients("aCCe, aDDe, aCCe", "MaxPool", _WINDOW, _twice, "GradGrad"),
    *_gradients("aCCCe, aDDDe, aCCCe", "MaxPool3D", _CUBE, _twice, "GradGrad"),
    *cases("acce", f"{_RESIZED} ResizeArea", {"size": [5, 7]}),
    *cases("acce", "ScaleAndTranslate", {"size": [5, 7], **_LANCZOS}),
    *_gradients("acce, ahhe", _RESIZED, {"size": [8, 8]}),
    *_gradients(
        "acce, ahhe", "ScaleAndTranslate", {"size": [8, 8], **_LANCZOS}
    ),
    *cases("acce", "LRN"),
    *cases(
        "acce",
        "Dilation2D",
        {"filter": np.ones([2, 2, 5], "float32"), "rates": _ONE, **_SAME},
    ),
    *cases("acce", "SpaceToDepth", {"block_size": 2}),
    *cases("acck", "DepthToSpace", {"block_size": 2}),
    *cases(
        "acce", "ExtractImagePatches", {"ksizes": _HALF, "rates": _ONE, **_SAME}
    ),
    *cases("accce", "ExtractVolumePatches", {"ksizes": _HALF_3D, **_SAME_3D}),
]
_PIXELS = [
    *cases("accb", "AdjustContrastv2", {"contrast_factor": 0.5}),
    *cases("acb", {"AdjustContrastv2-one": {"contrast_factor": 0.5}}),
    *cases("accb", "AdjustHue", {"delta": 0.2}, low=0),
    *cases("accb", "AdjustSaturation", {"scale": 0.2}, low=0),
    *cases("accb", "RGBToHSV HSVToRGB", low=0),
    *cases("acce, e, e, e, e", "FusedBatchNorm", {"is_training": False}),
    *cases(
        ", ".join(f"{axes}" for axes in ("acce", *"eeee")),
        "FusedBatchNormV2 FusedBatchNormV3",
        {"is_training": False},
    ),
    *cases(
        "acce",
        {
            "FusedBatchNormV3-training": lambda x: (
                tf.compat.v1.nn.fused_batch_norm(x, tf.ones(5), tf.ones(5))[0]
            )
        },
    ),
    *cases("acce, ah", "ImageProjectiveTransformV2", _WARPED),
    *cases(
        "acce, ah", "ImageProjectiveTransformV3", {"fill_value": 0.0, **_WARPED}
    ),
    *cases("acce, ah, -", {"ImageProjectiveTransformV3-filled": _WARPED}),
    *cases(
        "bc, b",
        {
            "NonMaxSuppressionV3": _BOXES,
            "NonMaxSuppressionV4": _BOXES,
            "NonMaxSuppressionV5": {"soft_nms_sigma": 0.0, **_BOXES},
        },
        low=0,
    ),
    *cases(
        "cdb",
        "CTCLoss",
        {
            "labels_indices": np.array([[0, 0], [1, 0]]),
            "labels_values": [0, 1],
            "sequence_length": [4, 4],
        },
    ),
]


def _there_and_back(x):
    blocks = tf.space_to_batch(x, [2], [[1, 1]])
    return tf.batch_to_space(blocks * 2.0, [2], [[0, 1]])


_BLOCKS = [
    *cases("acb", "SpaceToBatchND", {"block_shape": [2], "paddings": [[1, 1]]}),
    *cases(
        "acb",
        {
            "BatchToSpaceND": _there_and_back,
            "BatchToSpaceND-one": {"block_shape": [1], "crops": [[0, 1]]},
        },
    ),
]
CASES = [*_CONVOLUTIONS, *_WINDOWS, *_PIXELS, *_BLOCKS]
