"""Convolutions, pooling and other operations on images and sequences."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.splitting.rules.case import Case, floats, raw

_ONE = [1, 1, 1, 1]
_SAME = {"strides": _ONE, "padding": "SAME"}
_SAME_3D = {"strides": [1, 1, 1, 1, 1], "padding": "SAME"}
_WINDOW = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
_CUBE = {
    "ksize": [1, 2, 2, 2, 1],
    "strides": [1, 2, 2, 2, 1],
    "padding": "SAME",
}


def _on(name: str, function: Any, *axes: str, letters: str = "a", **more: Any):
    args = floats(*axes, scales=more.pop("scales", True))
    return Case(name, function, args, "a", letters=letters, **more)


def _sized(name: str, keys: str, sizes: Any, *axes: str, **more: Any) -> Case:
    """A case of an operation that is given the shape of its output."""
    first, second, third = keys.split()

    def apply(x: Any, y: Any) -> Any:
        values = {first: x, second: y, third: sizes(x, y)}
        return getattr(tf.raw_ops, name)(**values, **more)

    return _on(name, apply, *axes)


_TO_INPUT = "out_backprop filter input_sizes"
_TO_FILTER = "input out_backprop filter_sizes"


def _like_x(*rest: int) -> Any:
    return lambda x, y: tf.concat([tf.shape(x)[:1], list(rest)], 0)


def _fixed(*sizes: int) -> Any:
    return lambda x, y: tf.constant(sizes)


_CONVOLUTIONS = [
    _on(
        "Conv2D",
        raw("Conv2D", "input filter", **_SAME),
        "acce",
        "bbed",
        letters="ad",
    ),
    _on("Conv3D", raw("Conv3D", "input filter", **_SAME_3D), "accce", "bbbed"),
    _on(
        "DepthwiseConv2dNative",
        raw("DepthwiseConv2dNative", "input filter", **_SAME),
        "acce",
        "bbed",
    ),
    _sized(
        "Conv2DBackpropInput",
        _TO_INPUT,
        _like_x(4, 4, 5),
        "accd",
        "bbed",
        **_SAME,
    ),
    _sized(
        "Conv3DBackpropInputV2",
        _TO_INPUT,
        _like_x(4, 4, 4, 5),
        "acccd",
        "bbbed",
        **_SAME_3D,
    ),
    _sized(
        "DepthwiseConv2dNativeBackpropInput",
        _TO_INPUT,
        _like_x(4, 4, 5),
        "acce",
        "bbe1",
        **_SAME,
    ),
    _sized(
        "Conv2DBackpropFilter",
        _TO_FILTER,
        _fixed(3, 3, 5, 2),
        "acce",
        "accd",
        **_SAME,
    ),
    _sized(
        "Conv3DBackpropFilterV2",
        _TO_FILTER,
        _fixed(3, 3, 3, 5, 2),
        "accce",
        "acccd",
        **_SAME_3D,
    ),
    _sized(
        "DepthwiseConv2dNativeBackpropFilter",
        _TO_FILTER,
        _fixed(3, 3, 5, 1),
        "acce",
        "acce",
        **_SAME,
    ),
]
_POOLS = [
    *(
        _on(name, raw(name, key, **window), axes)
        for name, key, window, axes in (
            ("MaxPool", "input", _WINDOW, "acce"),
            ("AvgPool", "value", _WINDOW, "acce"),
            ("MaxPool3D", "input", _CUBE, "accce"),
            ("AvgPool3D", "input", _CUBE, "accce"),
        )
    ),
    _on(
        "MaxPoolV2",
        lambda x: tf.raw_ops.MaxPoolV2(
            input=x, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="SAME"
        ),
        "acce",
    ),
]


def _pool(x: Any) -> Any:
    return tf.nn.max_pool2d(x, 2, 2, "SAME")


def _pool_3d(x: Any) -> Any:
    return tf.nn.max_pool3d(x, 2, 2, "SAME")


def _once(function: Any) -> Any:
    return lambda x, dy: tf.gradients(function(x), [x], [dy])


def _twice(function: Any) -> Any:
    def apply(x: Any, dy: Any, ddx: Any) -> Any:
        (dx,) = tf.gradients(function(x), [x], [dy])
        return tf.gradients(dx, [dy], [ddx])

    return apply


def _resize(method: str) -> Any:
    return lambda x: tf.image.resize(x, [5, 7], method)


_RESIZED = {
    "ResizeBilinear": "bilinear",
    "ResizeNearestNeighbor": "nearest",
    "ResizeBicubic": "bicubic",
}
_GRADIENTS = [
    _on("MaxPoolGrad", _once(_pool), "acce", "adde"),
    _on("MaxPool3DGrad", _once(_pool_3d), "accce", "addde"),
    _on("MaxPoolGradGrad", _twice(_pool), "acce", "adde", "acce"),
    _on("MaxPool3DGradGrad", _twice(_pool_3d), "accce", "addde", "accce"),
    _on(
        "AvgPoolGrad",
        _once(lambda x: tf.nn.avg_pool2d(x, 2, 2, "SAME")),
        "acce",
        "adde",
    ),
    _on(
        "AvgPool3DGrad",
        _once(lambda x: tf.nn.avg_pool3d(x, 2, 2, "SAME")),
        "accce",
        "addde",
    ),
    *(
        _on(
            f"{name}Grad",
            _once(lambda x, m=m: tf.image.resize(x, [8, 8], m)),
            "acce",
            "ahhe",
        )
        for name, m in _RESIZED.items()
    ),
    _on(
        "ScaleAndTranslateGrad",
        _once(lambda x: tf.image.resize(x, [8, 8], "lanczos3")),
        "acce",
        "ahhe",
    ),
]
_RESIZES = [
    *(_on(name, _resize(m), "acce") for name, m in _RESIZED.items()),
    _on("ResizeArea", _resize("area"), "acce"),
    _on("ScaleAndTranslate", _resize("lanczos3"), "acce"),
]


def _normalized(training: bool, name: str) -> Any:
    def apply(x: Any, scale: Any, offset: Any, mean: Any, variance: Any) -> Any:
        return getattr(tf.raw_ops, name)(
            x=x,
            scale=scale,
            offset=offset,
            mean=mean,
            variance=variance,
            is_training=training,
        )[0]

    return apply


_PIXELS = [
    _on("LRN", tf.nn.local_response_normalization, "acce"),
    _on(
        "Dilation2D",
        lambda x: tf.nn.dilation2d(
            x, tf.ones([2, 2, 5]), _ONE, "SAME", "NHWC", _ONE
        ),
        "acce",
    ),
    _on("AdjustContrastv2", lambda x: tf.image.adjust_contrast(x, 0.5), "accb"),
    *(
        Case(name, function, floats("accb", low=0), "a", letters="ac")
        for name, function in (
            ("AdjustHue", lambda x: tf.image.adjust_hue(x, 0.2)),
            ("AdjustSaturation", lambda x: tf.image.adjust_saturation(x, 0.2)),
            ("RGBToHSV", tf.image.rgb_to_hsv),
            ("HSVToRGB", tf.image.hsv_to_rgb),
        )
    ),
    _on("SpaceToDepth", lambda x: tf.nn.space_to_depth(x, 2), "acce"),
    _on("DepthToSpace", lambda x: tf.nn.depth_to_space(x, 2), "acck"),
    _on(
        "ExtractImagePatches",
        lambda x: tf.image.extract_patches(x, [1, 2, 2, 1], _ONE, _ONE, "SAME"),
        "acce",
    ),
    _on(
        "ExtractVolumePatches",
        lambda x: tf.extract_volume_patches(
            x, [1, 2, 2, 2, 1], [1] * 5, "SAME"
        ),
        "accce",
    ),
    *(
        _on(
            name,
            _normalized(False, name),
            "acce",
            "e",
            "e",
            "e",
            "e",
            scales=name == "FusedBatchNorm",
        )
        for name in ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
    ),
    Case(
        "FusedBatchNormV3",
        lambda x: tf.compat.v1.nn.fused_batch_norm(x, tf.ones(5), tf.ones(5))[
            0
        ],
        floats("acce"),
        "",
        {"a": "normalizes by the mean"},
        letters="a",
        note="training",
    ),
    *(
        Case(
            name,
            lambda x, t, name=name: getattr(tf.raw_ops, name)(
                images=x,
                transforms=t,
                output_shape=[4, 4],
                interpolation="BILINEAR",
                **({"fill_value": 0.0} if name.endswith("V3") else {}),
            ),
            floats("acce", "ah"),
            "a",
            letters="a",
        )
        for name in ("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
    ),
    Case(
        "ImageProjectiveTransformV3",
        lambda x, t, f: tf.raw_ops.ImageProjectiveTransformV3(
            images=x,
            transforms=t,
            output_shape=[4, 4],
            interpolation="BILINEAR",
            fill_value=f,
        ),
        floats("acce", "ah", ""),
        "a",
        letters="a",
        note="filled",
    ),
    *(
        Case(
            name,
            lambda x, s, name=name, more=more: getattr(tf.raw_ops, name)(
                boxes=x,
                scores=s,
                max_output_size=2,
                iou_threshold=0.5,
                score_threshold=0.1,
                **more,
            ),
            floats("bc", "b", low=0),
            "",
            {"b": "compares the boxes"},
            letters="b",
        )
        for name, more in (
            ("NonMaxSuppressionV3", {}),
            ("NonMaxSuppressionV4", {}),
            ("NonMaxSuppressionV5", {"soft_nms_sigma": 0.0}),
        )
    ),
    Case(
        "CTCLoss",
        lambda x: tf.raw_ops.CTCLoss(
            inputs=x,
            labels_indices=tf.constant([[0, 0], [1, 0]], tf.int64),
            labels_values=[0, 1],
            sequence_length=[4, 4],
        )[0],
        floats("cdb"),
        letters="b",
    ),
]
_BLOCKS = [
    Case(
        "SpaceToBatchND",
        lambda x: tf.space_to_batch(x, [2], [[1, 1]]),
        floats("acb"),
        "ab",
        {"c": "along the examples"},
    ),
    Case(
        "BatchToSpaceND",
        lambda x: tf.batch_to_space(
            tf.space_to_batch(x, [2], [[1, 1]]) * 2.0, [2], [[0, 1]]
        ),
        floats("acb"),
        "ab",
    ),
    Case(
        "BatchToSpaceND",
        lambda x: tf.batch_to_space(x, [1], [[0, 1]]),
        floats("acb"),
        "ab",
        note="one",
    ),
]
CASES = [*_CONVOLUTIONS, *_POOLS, *_GRADIENTS, *_RESIZES, *_PIXELS, *_BLOCKS]
