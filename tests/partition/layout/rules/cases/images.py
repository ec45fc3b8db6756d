"""Convolutions, pooling and other operations on images and sequences."""

import numpy as np
import tensorflow as tf

from tests.partition.layout.rules.cases.case import (
    axis_size,
    cases_of,
    gradient_of,
    raw_op,
)

_ONE, _ONES = [1] * 4, [1] * 5
_SAME = {"strides": _ONE, "padding": "SAME"}
_SAME_3D = {"strides": _ONES, "padding": "SAME"}
_HALF, _HALF_3D = [1, 2, 2, 1], [1, 2, 2, 2, 1]
_WINDOW = {"ksize": _HALF, "strides": _HALF, "padding": "SAME"}
_CUBE = {"ksize": _HALF_3D, "strides": _HALF_3D, "padding": "SAME"}
_LANCZOS = {"scale": [2.0, 2.0], "translation": [0.0, 0.0]}
_WARPED = {"output_shape": [4, 4], "interpolation": "BILINEAR"}
_BOXES = {"max_output_size": 2, "iou_threshold": 0.5, "score_threshold": 0.1}


def _dilated(x):
    """A convolution of parts of images; then some of their edges are cut."""
    parts = tf.space_to_batch(x, [2, 2], [[0, 0], [1, 1]])
    found = tf.tanh(parts[:, :, 1:] + parts[:, :, :-1])
    return tf.batch_to_space(found, [2, 2], [[0, 1], [0, 0]])


def _to_input(*sizes):
    return {"input_sizes": lambda w, dy: [axis_size(dy), *sizes]}


def _twice(function):
    def apply(x, dy, ddx):
        (dx,) = tf.gradients(function(x), [x], [dy])
        return tf.gradients(dx, [dy], [ddx])

    return apply


def _gradients(args, names, given, gradient=gradient_of, end="Grad"):
    """The gradients of operations."""
    every = {f"{n}{end}": gradient(raw_op(n, **given)) for n in names.split()}
    return cases_of(args, **every)


_CONVOLUTIONS = [
    *cases_of("acce, bbed", "Conv2D", _SAME),
    *cases_of("accce, bbbed", "Conv3D", _SAME_3D),
    *cases_of("acce, bbed", "DepthwiseConv2dNative", _SAME),
    *cases_of("bbed, accd", "Conv2DBackpropInput", _to_input(4, 4, 5) | _SAME),
    *cases_of(
        "bbbed, acccd",
        "Conv3DBackpropInputV2",
        _to_input(4, 4, 4, 5) | _SAME_3D,
    ),
    *cases_of(
        "bbe1, acce",
        "DepthwiseConv2dNativeBackpropInput",
        _to_input(4, 4, 5) | _SAME,
    ),
    *cases_of(
        "acce, accd",
        "Conv2DBackpropFilter",
        {"filter_sizes": [3, 3, 5, 2], **_SAME},
    ),
    *cases_of(
        "accce, acccd",
        "Conv3DBackpropFilterV2",
        {"filter_sizes": [3, 3, 3, 5, 2], **_SAME_3D},
    ),
    *cases_of(
        "acce, acce",
        "DepthwiseConv2dNativeBackpropFilter",
        {"filter_sizes": [3, 3, 5, 1], **_SAME},
    ),
]
_RESIZED = "ResizeBilinear ResizeNearestNeighbor ResizeBicubic"
_WINDOWS = [
    *cases_of("acce", "MaxPool MaxPoolV2 AvgPool", _WINDOW),
    *cases_of("accce", "MaxPool3D AvgPool3D", _CUBE),
    # OneDNN does not check that their sizes match.
    *_gradients("aCCe, aDDe", "MaxPool AvgPool", _WINDOW),
    *_gradients("aCCCe, aDDDe", "MaxPool3D AvgPool3D", _CUBE),
    *_gradients("aCCe, aDDe, aCCe", "MaxPool", _WINDOW, _twice, "GradGrad"),
    *_gradients("aCCCe, aDDDe, aCCCe", "MaxPool3D", _CUBE, _twice, "GradGrad"),
    *cases_of("acce", f"{_RESIZED} ResizeArea", {"size": [5, 7]}),
    *cases_of("acce", "ScaleAndTranslate", {"size": [5, 7], **_LANCZOS}),
    *_gradients("acce, ahhe", _RESIZED, {"size": [8, 8]}),
    *_gradients(
        "acce, ahhe", "ScaleAndTranslate", {"size": [8, 8], **_LANCZOS}
    ),
    *cases_of("acce", "LRN"),
    *cases_of(
        "acce",
        "Dilation2D",
        {"filter": np.ones([2, 2, 5], "float32"), "rates": _ONE, **_SAME},
    ),
    *cases_of("acce", "SpaceToDepth", {"block_size": 2}),
    *cases_of(
        "acce",
        SpaceToBatchND=lambda x: tf.space_to_batch(x, [2, 4], [[1, 1], [0, 0]]),
        BatchToSpaceND=_dilated,
    ),
    *cases_of("acck", "DepthToSpace", {"block_size": 2}),
    *cases_of(
        "acce", "ExtractImagePatches", {"ksizes": _HALF, "rates": _ONE, **_SAME}
    ),
    *cases_of(
        "accce", "ExtractVolumePatches", {"ksizes": _HALF_3D, **_SAME_3D}
    ),
]
_PIXELS = [
    *cases_of("accb", "AdjustContrastv2", {"contrast_factor": 0.5}),
    *cases_of("acb", AdjustContrastv2_one={"contrast_factor": 0.5}),
    *cases_of("accb", "AdjustHue", {"delta": 0.2}, low=0),
    *cases_of("accb", "AdjustSaturation", {"scale": 0.2}, low=0),
    *cases_of("accb", "RGBToHSV HSVToRGB", low=0),
    *cases_of("acce, e, e, e, e", "FusedBatchNorm", {"is_training": False}),
    *cases_of(
        ", ".join(f"{axes}" for axes in ("acce", *"eeee")),
        "FusedBatchNormV2 FusedBatchNormV3",
        {"is_training": False},
    ),
    *cases_of(
        "acce",
        FusedBatchNormV3_training=lambda x: tf.compat.v1.nn.fused_batch_norm(
            x, tf.ones(5), tf.ones(5)
        )[0],
    ),
    *cases_of("acce, ah", "ImageProjectiveTransformV2", _WARPED),
    *cases_of(
        "acce, ah", "ImageProjectiveTransformV3", {"fill_value": 0.0, **_WARPED}
    ),
    *cases_of("acce, ah, -", ImageProjectiveTransformV3_filled=_WARPED),
    *cases_of(
        "bc, b",
        NonMaxSuppressionV3=_BOXES,
        NonMaxSuppressionV4=_BOXES,
        NonMaxSuppressionV5={"soft_nms_sigma": 0.0, **_BOXES},
        low=0,
    ),
    *cases_of(
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
    *cases_of(
        "acb", "SpaceToBatchND", {"block_shape": [2], "paddings": [[1, 1]]}
    ),
    *cases_of(
        "acb",
        BatchToSpaceND=_there_and_back,
        BatchToSpaceND_one={"block_shape": [1], "crops": [[0, 1]]},
    ),
]
CASES = [*_CONVOLUTIONS, *_WINDOWS, *_PIXELS, *_BLOCKS]
