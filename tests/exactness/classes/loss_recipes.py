"""Recipes for every loss and metric of Keras."""

import functools
import itertools

import keras
from keras import layers

from keras_towers.foundation import compat
from tests.exactness.classes.recipes import (
    Recipe,
    by_name,
    floats,
    fractions,
    head,
    integers,
    one_hot,
    taken,
    there,
)

X = floats(6)


def _masks(x):
    """Segment an image of 4 x 4 points."""
    return layers.Reshape((4, 4, 1))(head(x, 16, "sigmoid"))


def _embeddings(x):
    return layers.UnitNormalization()(head(x, 4))


def _frames(x):
    return layers.Reshape((6, 5))(head(x, 30))


def _predict(units, activation=None):
    return functools.partial(head, units=units, activation=activation)


# Inputs of a loss or a metric: targets, and a function for predictions.
NUMBERS = floats(3), _predict(3)
POSITIVE = fractions(3), _predict(3, "softplus")
CLASSES = one_hot(4), _predict(4, "softmax")
SHARES = CLASSES[0] * 0.8 + 0.05, CLASSES[1]
LABELS = integers(4), CLASSES[1]
COLUMN = LABELS[0][:, None], CLASSES[1]
BINARY = integers(2, 1).astype("float32"), _predict(1, "sigmoid")
SIGNS = integers(2, 3) * 2.0 - 1, NUMBERS[1]
POINTS = integers(2, 4, 4, 1).astype("float32"), _masks
GROUPS = integers(3), _embeddings
TOKENS = integers(5, 3, least=1), _frames
# Predictions of the classes themselves.
ROUNDED = (
    integers(3, 1).astype("float32"),
    lambda x: keras.ops.round(head(x, 1, "relu")) + 0 * head(x),
)
_BOTH = by_name(
    ("BinaryCrossentropy", BINARY),
    ("CategoricalCrossentropy CategoricalHinge", CLASSES),
    ("CosineSimilarity MeanAbsoluteError MeanSquaredError", NUMBERS),
    ("Hinge SquaredHinge", SIGNS),
    ("KLDivergence", SHARES),
    ("MeanAbsolutePercentageError MeanSquaredLogarithmicError", POSITIVE),
    ("Poisson", POSITIVE),
)
ALL_LOSSES = _BOTH | by_name(
    ("BinaryFocalCrossentropy", BINARY),
    ("CTC", TOKENS),
    ("CategoricalFocalCrossentropy", CLASSES),
    ("CategoricalGeneralizedCrossEntropy", LABELS),
    ("SparseCategoricalCrossentropy", LABELS),
    ("Circle", GROUPS),
    ("Dice Tversky", POINTS),
    ("Huber LogCosh", NUMBERS),
)
if compat.KERAS >= (3, 16):
    # The last, and only here: the groups of the others stay as they are.
    ALL_LOSSES |= by_name(("SparseCategoricalFocalCrossentropy", LABELS))
ALL_METRICS = _BOTH | by_name(
    ("AUC BinaryAccuracy BinaryIoU IoU MeanIoU Precision Recall", BINARY),
    ("FalseNegatives FalsePositives TrueNegatives TruePositives", BINARY),
    ("PrecisionAtRecall RecallAtPrecision", BINARY),
    ("SensitivityAtSpecificity SpecificityAtSensitivity", BINARY),
    ("CategoricalAccuracy F1Score FBetaScore", CLASSES),
    ("OneHotIoU OneHotMeanIoU TopKCategoricalAccuracy", CLASSES),
    ("SparseCategoricalAccuracy SparseCategoricalCrossentropy", COLUMN),
    ("SparseTopKCategoricalAccuracy", COLUMN),
    ("Accuracy", ROUNDED),
    ("ConcordanceCorrelation PearsonCorrelation R2Score", NUMBERS),
    ("LogCoshError MeanMetricWrapper RootMeanSquaredError", NUMBERS),
)
LOSSES = there("losses", ALL_LOSSES)
METRICS = there("metrics", ALL_METRICS)
# Of metrics, by the name of a parameter.
GIVEN = by_name(
    ("precision recall sensitivity specificity", 0.5),
    ("beta", 2.0),
    ("k", 2),
    ("num_classes", 4),
    ("target_class_ids", [0, 1]),
    ("fn", keras.losses.mean_squared_error),
)
# Of one value, which compile() takes no metric of.
VALUES = ("Mean", "Sum")

# None leaves a loss for each example.
REDUCTIONS = (
    *("sum_over_batch_size", "sum", "mean", "mean_with_sample_weight"),
    None,
)
# Axes over which one number for each example is left.
_EACH = dict.fromkeys(("Dice", "Tversky"), ({}, {"axis": (1, 2, 3)}))


# Losses reduce alike, but for those that do not return one number for each
# example; of the others one has each reduction.
_FEW = [("sum", ()), ("sum_over_batch_size", ("weighted",))]
_ALL = [*itertools.product(REDUCTIONS, ((), ("weighted",)))]


def loss_recipes(name):
    """A loss with reductions, with and without sample weights."""
    found, cls = {}, getattr(keras.losses, name)
    y, predict = LOSSES[name]
    is_special = name in {"BinaryCrossentropy", *_EACH}
    for option in _EACH.get(name, [{}]):
        for reduction, more in _ALL if is_special else _FEW:
            loss = functools.partial(cls, reduction=reduction, **option)
            words = [name, str(reduction), *more, *option]
            found[" ".join(words)] = Recipe(
                X, predict, None, y, {"loss": loss}, bool(more)
            )
    return found


class Watch(layers.Layer):
    """Updates a metric of one value with what goes through."""

    def __init__(self, metric, weighted):
        super().__init__()
        self.metric = metric
        self.weighted = weighted

    def call(self, x):
        weights = keras.ops.abs(x) if self.weighted else None
        self.metric.update_state(x * x, sample_weight=weights)
        return x


def _metric(name, weighted):
    cls = getattr(keras.metrics, name)
    if name in VALUES:
        called = f"{name}_{weighted}".lower()
        return Recipe(X, lambda x: Watch(cls(called), weighted)(x), "linear")
    y, predict = METRICS[name]
    kind = "weighted_metrics" if weighted else "metrics"
    made = {kind: functools.partial(cls, **taken(cls, GIVEN))}
    return Recipe(X, predict, None, y, made, weighted)


def metric_recipes(name):
    """A metric, without and with sample weights."""
    return {
        name: _metric(name, weighted=False),
        f"{name} weighted": _metric(name, weighted=True),
    }
