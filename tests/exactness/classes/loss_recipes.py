"""Recipes for every loss and metric of Keras."""

import functools
from typing import Any

import keras
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


def _named(*rows: Any) -> dict[str, Any]:
    """Data and arguments by the name of a class; a row may name several."""
    return {
        name: (data, arguments)
        for names, data, *arguments in rows
        for name in names.split()
    }


LOSSES = _named(
    ("BinaryCrossentropy BinaryFocalCrossentropy", BINARY),
    ("CTC", TOKENS),
    ("CategoricalCrossentropy CategoricalFocalCrossentropy", CLASSES),
    ("CategoricalHinge", CLASSES),
    (
        "CategoricalGeneralizedCrossEntropy SparseCategoricalCrossentropy",
        LABELS,
    ),
    ("Circle", GROUPS),
    ("CosineSimilarity Huber LogCosh MeanAbsoluteError", NUMBERS),
    ("MeanSquaredError", NUMBERS),
    ("Dice Tversky", POINTS),
    ("Hinge SquaredHinge", SIGNS),
    ("KLDivergence", SHARES),
    ("MeanAbsolutePercentageError MeanSquaredLogarithmicError", POSITIVE),
    ("Poisson", POSITIVE),
)

METRICS = _named(
    ("AUC BinaryAccuracy BinaryCrossentropy Precision Recall", BINARY),
    ("FalseNegatives FalsePositives TrueNegatives TruePositives", BINARY),
    ("PrecisionAtRecall RecallAtPrecision", BINARY, 0.5),
    ("SensitivityAtSpecificity SpecificityAtSensitivity", BINARY, 0.5),
    ("BinaryIoU", BINARY, [0, 1]),
    ("IoU", BINARY, 2, [0]),
    ("MeanIoU", BINARY, 2),
    ("CategoricalAccuracy CategoricalCrossentropy", CLASSES),
    ("CategoricalHinge F1Score", CLASSES),
    ("FBetaScore", CLASSES, "weighted", 2.0),
    ("TopKCategoricalAccuracy", CLASSES, 2),
    ("OneHotIoU", CLASSES, 4, [0, 2]),
    ("OneHotMeanIoU", CLASSES, 4),
    ("SparseCategoricalAccuracy SparseCategoricalCrossentropy", COLUMN),
    ("SparseTopKCategoricalAccuracy", COLUMN, 2),
    ("Accuracy", ROUNDED),
    ("Hinge SquaredHinge", SIGNS),
    ("KLDivergence", SHARES),
    ("MeanAbsolutePercentageError MeanSquaredLogarithmicError", POSITIVE),
    ("Poisson", POSITIVE),
    ("ConcordanceCorrelation PearsonCorrelation R2Score", NUMBERS),
    ("CosineSimilarity LogCoshError MeanAbsoluteError", NUMBERS),
    ("MeanSquaredError RootMeanSquaredError", NUMBERS),
    ("MeanMetricWrapper", NUMBERS, keras.losses.mean_squared_error),
)

# Of one value, which compile() takes no metric of.
VALUES = ("Mean", "Sum")

# Why the one device runs in a graph, too.
LOGS = "Keras's logs of several losses are others without a graph"

# None leaves a loss for each example.
REDUCTIONS = (
    *("sum_over_batch_size", "sum", "mean", "mean_with_sample_weight"),
    None,
)
# Axes over which one number for each example is left.
_EACH = {"Dice": (1, 2, 3), "Tversky": (1, 2, 3)}


def loss_recipes(name: str) -> dict[str, Recipe]:
    """A loss with each reduction, with and without sample weights."""
    (y, predict), _ = LOSSES[name]
    options: list[dict[str, Any]] = [{}]
    if name in _EACH:
        options.append({"axis": _EACH[name]})
    return {
        " ".join(
            [name, str(reduction), *["weighted"] * weighted, *map(str, option)]
        ): Recipe(
            X,
            predict,
            None,
            y,
            {
                "loss": functools.partial(
                    getattr(keras.losses, name), reduction=reduction, **option
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
    """Updates a metric of one value with what goes through."""

    def __init__(self, metric: keras.metrics.Metric, weighted: bool):
        super().__init__()
        self.metric = metric
        self.weighted = weighted

    def call(self, x: Any) -> Any:
        weights = keras.ops.abs(x) if self.weighted else None
        self.metric.update_state(x * x, sample_weight=weights)
        return x


def _metric(name: str, weighted: bool) -> Recipe:
    cls = getattr(keras.metrics, name)
    if name in VALUES:
        called = f"{name}_{weighted}".lower()
        return Recipe(X, lambda x: Watch(cls(called), weighted)(x), "linear")
    (y, predict), arguments = METRICS[name]
    kind = "weighted_metrics" if weighted else "metrics"
    made = {kind: functools.partial(cls, *arguments)}
    return Recipe(X, predict, None, y, made, weighted, LOGS)


def metric_recipes(name: str) -> dict[str, Recipe]:
    """A metric, without and with sample weights."""
    return {
        name: _metric(name, weighted=False),
        f"{name} weighted": _metric(name, weighted=True),
    }
