"""Recipes for every loss and metric of Keras."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

from tests.exactness.classes.recipes import (
    Recipe,
    floats,
    fractions,
    head,
    integers,
    one_hot,
)

X = floats(6)


def _masks(x: Any) -> Any:
    """Segment an image of 4 x 4 points."""
    return layers.Reshape((4, 4, 1))(head(x, 16, "sigmoid"))


def _embeddings(x: Any) -> Any:
    return layers.UnitNormalization()(head(x, 4))


def _frames(x: Any) -> Any:
    return layers.Reshape((6, 5))(head(x, 30))


# What a loss or a metric compares: targets, and what makes predictions.
NUMBERS = floats(3), functools.partial(head, units=3)
POSITIVE = fractions(3), functools.partial(head, units=3, activation="softplus")
SHARES = (
    one_hot(4) * 0.8 + 0.05,
    functools.partial(head, units=4, activation="softmax"),
)
BINARY = (
    integers(2, 1).astype("float32"),
    functools.partial(head, units=1, activation="sigmoid"),
)
CLASSES = one_hot(4), SHARES[1]
LABELS = integers(4), SHARES[1]
COLUMN = LABELS[0][:, None], SHARES[1]
SIGNS = integers(2, 3) * 2.0 - 1, NUMBERS[1]
POINTS = integers(2, 4, 4, 1).astype("float32"), _masks
GROUPS = integers(3), _embeddings
TOKENS = integers(5, 3, least=1), _frames
# Predictions of the classes themselves.
ROUNDED = (
    integers(3, 1).astype("float32"),
    lambda x: keras.ops.round(head(x, 1, "relu")) + 0 * head(x),
)

LOSSES: dict[str, tuple[np.ndarray, Callable]] = {
    "BinaryCrossentropy": BINARY,
    "BinaryFocalCrossentropy": BINARY,
    "CTC": TOKENS,
    "CategoricalCrossentropy": CLASSES,
    "CategoricalFocalCrossentropy": CLASSES,
    "CategoricalGeneralizedCrossEntropy": LABELS,
    "CategoricalHinge": CLASSES,
    "Circle": GROUPS,
    "CosineSimilarity": NUMBERS,
    "Dice": POINTS,
    "Hinge": SIGNS,
    "Huber": NUMBERS,
    "KLDivergence": SHARES,
    "LogCosh": NUMBERS,
    "MeanAbsoluteError": NUMBERS,
    "MeanAbsolutePercentageError": POSITIVE,
    "MeanSquaredError": NUMBERS,
    "MeanSquaredLogarithmicError": POSITIVE,
    "Poisson": POSITIVE,
    "SparseCategoricalCrossentropy": LABELS,
    "SquaredHinge": SIGNS,
    "Tversky": POINTS,
}

METRICS: dict[str, tuple[tuple[np.ndarray, Callable], dict[str, Any]]] = {
    **dict.fromkeys(
        (
            *("AUC", "BinaryAccuracy", "BinaryCrossentropy"),
            *("FalseNegatives", "FalsePositives", "Precision", "Recall"),
            *("TrueNegatives", "TruePositives"),
        ),
        (BINARY, {}),
    ),
    **dict.fromkeys(
        (
            *("PrecisionAtRecall", "RecallAtPrecision"),
            *("SensitivityAtSpecificity", "SpecificityAtSensitivity"),
        ),
        (BINARY, {"": 0.5}),
    ),
    "BinaryIoU": (BINARY, {"target_class_ids": [0, 1]}),
    **dict.fromkeys(
        (
            *("CategoricalAccuracy", "CategoricalCrossentropy"),
            *("CategoricalHinge", "F1Score"),
        ),
        (CLASSES, {}),
    ),
    "FBetaScore": (CLASSES, {"beta": 2.0, "average": "weighted"}),
    "TopKCategoricalAccuracy": (CLASSES, {"k": 2}),
    "SparseCategoricalAccuracy": (COLUMN, {}),
    "SparseCategoricalCrossentropy": (COLUMN, {}),
    "SparseTopKCategoricalAccuracy": (COLUMN, {"k": 2}),
    "OneHotIoU": (CLASSES, {"num_classes": 4, "target_class_ids": [0, 2]}),
    "OneHotMeanIoU": (CLASSES, {"num_classes": 4}),
    "Accuracy": (ROUNDED, {}),
    "IoU": (BINARY, {"num_classes": 2, "target_class_ids": [0]}),
    "MeanIoU": (BINARY, {"num_classes": 2}),
    "Hinge": (SIGNS, {}),
    "SquaredHinge": (SIGNS, {}),
    "KLDivergence": (SHARES, {}),
    "Poisson": (POSITIVE, {}),
    "MeanAbsolutePercentageError": (POSITIVE, {}),
    "MeanSquaredLogarithmicError": (POSITIVE, {}),
    **dict.fromkeys(
        (
            *("ConcordanceCorrelation", "PearsonCorrelation", "R2Score"),
            *("CosineSimilarity", "LogCoshError", "MeanAbsoluteError"),
            *("MeanSquaredError", "RootMeanSquaredError"),
        ),
        (NUMBERS, {}),
    ),
    "MeanMetricWrapper": (NUMBERS, {"": keras.losses.mean_squared_error}),
}

# Of one value, which compile() takes no metric of.
VALUES = {
    "Mean": lambda name: keras.metrics.Mean(f"{name}_mean"),
    "Sum": lambda name: keras.metrics.Sum(f"{name}_sum"),
}

# Why the one device runs in a graph, too.
LOGS = "Keras's logs of several losses are others without a graph"

# "none" leaves a loss for each example.
REDUCTIONS = (
    *("sum_over_batch_size", "sum", "mean", "mean_with_sample_weight"),
    "none",
)
# Axes over which one number for each example is left.
_EACH = {"Dice": (1, 2, 3), "Tversky": (1, 2, 3)}


def loss_recipes(name: str) -> dict[str, Recipe]:
    """A loss with each reduction, with and without sample weights."""
    y, predict = LOSSES[name]
    cls = getattr(keras.losses, name)
    options: list[dict[str, Any]] = [{}]
    if name in _EACH:
        options.append({"axis": _EACH[name]})
    return {
        " ".join(
            [name, reduction, *["weighted"] * weighted, *map(str, option)]
        ): Recipe(
            X,
            predict,
            None,
            y,
            {
                "loss": functools.partial(
                    cls,
                    reduction=None if reduction == "none" else reduction,
                    **option,
                )
            },
            weighted=weighted,
            in_graph=LOGS,
        )
        for option in options
        for reduction in REDUCTIONS
        for weighted in (False, True)
    }


class Watch(layers.Layer):
    """Updates a metric of one value with what goes through.

    Args:
        metric: the metric.
        weighted: whether the values have weights.
    """

    def __init__(self, metric: keras.metrics.Metric, weighted: bool):
        super().__init__()
        self.metric = metric
        self.weighted = weighted

    def call(self, x: Any) -> Any:
        weights = keras.ops.abs(x) if self.weighted else None
        self.metric.update_state(x * x, sample_weight=weights)
        return x


def _watched(make: Callable[[str], Any], weighted: bool) -> Recipe:
    name = f"watched_{'weighted' * weighted}"
    return Recipe(X, lambda x: Watch(make(name), weighted)(x), "linear")


def metric_recipes(name: str) -> dict[str, Recipe]:
    """A metric, without and with sample weights."""
    if name in VALUES:
        make = VALUES[name]
        return {
            name: _watched(make, False),
            f"{name} weighted": _watched(make, True),
        }
    (y, predict), options = METRICS[name]
    positional = [value for key, value in options.items() if not key]
    named = {key: value for key, value in options.items() if key}
    make = functools.partial(getattr(keras.metrics, name), *positional, **named)
    return {
        name: Recipe(X, predict, None, y, {"metrics": make}, in_graph=LOGS),
        f"{name} weighted": Recipe(
            X,
            predict,
            None,
            y,
            {"weighted_metrics": make},
            weighted=True,
            in_graph=LOGS,
        ),
    }
