"""A recipe for every layer of Keras."""

import functools
import inspect
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

from tests.exactness.classes.recipes import (
    Recipe,
    Tensors,
    floats,
    fractions,
    integers,
    words,
)

Build = Callable[[Tensors], Tensors]
Recipes = dict[str, Recipe]


class Inside(layers.Layer):
    """A layer of one's own around one that a functional model cannot take."""

    def __init__(self, inner: layers.Layer):
        super().__init__()
        self.inner = inner

    def call(self, x: Tensors) -> Tensors:
        return self.inner(x)

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


def _of(x: np.ndarray, names: str, *args: Any, **kwargs: Any) -> Recipes:
    """Recipes of layers that take one tensor, after a trained layer.

    Args:
        x: the input; images have values between 0 and 1.
        names: of classes, those that Keras does not have left out.
        *args: of each of them.
        **kwargs: likewise.
    """
    made = {}
    for name in names.split():
        cls = getattr(layers, name, None)
        named = dict(kwargs)
        if x is IMAGES and cls and "value_range" in _parameters(cls):
            named["value_range"] = (0, 1)
        if cls:
            made[name] = functools.partial(cls, *args, **named)
    return _made(x, **made)


def _parameters(cls: type) -> Any:
    return inspect.signature(cls.__init__).parameters


def _made(x: np.ndarray, **makes: Callable[[], Any]) -> Recipes:
    """Likewise, of functions that make a layer."""

    def recipe(name: str, make: Callable[[], Any]) -> Recipe:
        return Recipe(
            x,
            lambda tensor: make()(tensor),
            "sigmoid" if x is IMAGES else "linear",
            in_graph=IN_GRAPH.get(name, ""),
        )

    return {name: recipe(name, make) for name, make in makes.items()}


def _of_rank(rank: int, x: np.ndarray) -> Recipes:
    """Recipes of the layers that there are for each number of dimensions."""
    found: Recipes = {}
    for names, *args in (
        ("GlobalAveragePooling# GlobalMaxPooling# MaxPooling# UpSampling#",),
        ("ZeroPadding# Cropping#", 1),
        ("AveragePooling# AdaptiveAveragePooling# AdaptiveMaxPooling#", 2),
        ("DepthwiseConv#", 2),
        ("Conv# Conv#Transpose SeparableConv#", 3, 2),
        ("SpatialDropout#", 0.3),
    ):
        found |= _of(x, names.replace("#", f"{rank}D"), *args)
    return found


def _whole(x: np.ndarray, **built: Build) -> Recipes:
    """Recipes that say themselves what becomes of the input."""
    return {name: Recipe(x, build) for name, build in built.items()}


def _of_two(x: np.ndarray, names: str, *args: Any, **kwargs: Any) -> Recipes:
    """Recipes of layers that take two inputs, in a list or one by one."""

    def recipe(name: str) -> Recipe:
        def build(x: Tensors) -> Tensors:
            layer = getattr(layers, name)(*args, **kwargs)
            both = x, layers.Dense(x.shape[-1])(x)
            takes_list = "inputs" in inspect.signature(layer.call).parameters
            return layer(list(both)) if takes_list else layer(*both)

        return Recipe(x, build, "linear")

    return {name: recipe(name) for name in names.split()}


def _saved() -> Any:
    """A layer from a model that was exported for serving."""
    inner = keras.Sequential([layers.Input((6,)), layers.Dense(3)])
    folder = tempfile.TemporaryDirectory()
    path = pathlib.Path(folder.name) / "saved"
    inner.export(path, verbose=False)
    layer = layers.TFSMLayer(path, call_endpoint="serve")
    layer.__dict__["folder"] = folder
    return layer


def _text(x: Tensors) -> Tensors:
    layer = layers.TextVectorization(vocabulary=["a", "b", "c"])
    tokens = layer(x)
    return layers.GlobalAveragePooling1D()(layers.Embedding(9, 3)(tokens))


def _tied(x: Tensors) -> Tensors:
    layer = layers.ReversibleEmbedding(9, 4)
    return layer(layer(x), reverse=True)


def _labelled(make: Callable[[], Any]) -> Recipe:
    """A recipe of a layer that mixes images with labels."""

    def build(x: Tensors) -> Tensors:
        labels = layers.Dense(3, "softmax")(layers.Flatten()(x))
        mixed = make()({"images": x, "labels": labels})
        both = layers.Flatten()(mixed["images"]), mixed["labels"]
        return layers.Concatenate()(both)

    return Recipe(IMAGES, build, "sigmoid")


def _boxes(x: Tensors) -> Tensors:
    layer = layers.MaxNumBoundingBoxes(3, bounding_box_format="xyxy")
    boxes = {"boxes": x, "labels": x[..., 0]}
    images = layers.Reshape((2, 2, 2))(x)
    kept = layer({"images": images, "bounding_boxes": boxes})
    return kept["bounding_boxes"]["boxes"]


VECTOR, SERIES, PICTURES = floats(6), floats(5, 4), floats(6, 6, 2)
IMAGES = fractions(6, 6, 3)
IN_GRAPH = {
    "AugMix": "draws with Python's random, in a graph only while it is traced",
    "RandomElasticTransform": "in a graph transforms the first image only",
}
CELLS = {
    "GRUCell": lambda: layers.GRUCell(2),
    "LSTMCell": lambda: layers.LSTMCell(2),
    "RNN": lambda: layers.SimpleRNNCell(2, dropout=0.2),
    "SimpleRNNCell": lambda: layers.SimpleRNNCell(2),
    "StackedRNNCells": lambda: layers.StackedRNNCells(
        [layers.LSTMCell(2), layers.GRUCell(3)]
    ),
}

LAYERS: Recipes = {
    **_of(
        VECTOR,
        "Identity ELU LeakyReLU PReLU ReLU Softmax BatchNormalization Flatten "
        "LayerNormalization RMSNormalization UnitNormalization",
    ),
    **_of(VECTOR, "Activation", "gelu"),
    **_of(VECTOR, "ActivityRegularization", 0.1, 0.1),
    **_of(VECTOR, "AlphaDropout Dropout GaussianDropout GaussianNoise", 0.3),
    **_of(VECTOR, "Dense", 3, "tanh"),
    **_of(VECTOR, "Discretization", [-0.5, 0.5]),
    **_of(VECTOR, "GroupNormalization RepeatVector Rescaling", 2),
    **_of(VECTOR, "Normalization", mean=0.5, variance=2.0),
    **_of(VECTOR, "Reshape", (2, 3)),
    **_made(
        VECTOR,
        Lambda=lambda: layers.Lambda(lambda x: x * 2),
        Pipeline=lambda: layers.Pipeline([layers.Rescaling(2.0)]),
        SpectralNormalization=lambda: layers.SpectralNormalization(
            layers.Dense(3)
        ),
        TFSMLayer=_saved,
    ),
    **_of_rank(1, SERIES),
    **_of_rank(2, PICTURES),
    **_of_rank(3, floats(4, 4, 4, 2)),
    **_of(SERIES, "EinsumDense", "abc,cd->abd", (5, 3)),
    **_of(SERIES, "GRU LSTM SimpleRNN", 2, dropout=0.3, recurrent_dropout=0.2),
    **_of(SERIES, "Permute", (2, 1)),
    **_made(
        SERIES,
        Bidirectional=lambda: layers.Bidirectional(layers.GRU(2, dropout=0.2)),
        TimeDistributed=lambda: layers.TimeDistributed(layers.Dropout(0.3)),
    ),
    # Without a loop, whose gradient takes long to trace.
    **_made(
        floats(2, 4),
        **{
            name: lambda make=make: layers.RNN(make(), unroll=True)
            for name, make in CELLS.items()
        },
    ),
    **_of(PICTURES, "CenterCrop Resizing", 4, 5),
    **_of(PICTURES, "ConvLSTM1D", 2, 2, dropout=0.2),
    **_of(floats(2, 4, 4, 2), "ConvLSTM2D", 2, 2, dropout=0.2),
    **_of(floats(2, 3, 3, 3, 2), "ConvLSTM3D", 2, 2, dropout=0.2),
    **_of(
        floats(64),
        "MelSpectrogram",
        *(32, 16),
        sampling_rate=1000,
        num_mel_bins=4,
    ),
    **_of(floats(64, 1), "STFTSpectrogram", frame_length=16, frame_step=8),
    **_of(
        IMAGES,
        "AutoContrast RandomElasticTransform RandomErasing RandomFlip "
        "RandomGaussianBlur",
    ),
    **_of(IMAGES, "AugMix", num_chains=2, chain_depth=1),
    **_of(
        IMAGES,
        "ContrastLimitedAdaptiveHistogramEqualization",
        tile_grid_size=(2, 2),
    ),
    **_of(IMAGES, "RandAugment", num_ops=1),
    **_of(
        IMAGES,
        "RandomColorJitter",
        **dict.fromkeys(
            (
                *("brightness_factor", "contrast_factor"),
                *("saturation_factor", "hue_factor"),
            ),
            0.2,
        ),
    ),
    **_of(IMAGES, "RandomBrightness RandomContrast Solarization", 0.3),
    **_of(IMAGES, "RandomCrop", 5, 5),
    **_of(IMAGES, "RandomHue RandomRotation RandomZoom", 0.2),
    **_of(IMAGES, "RandomShear RandomTranslation", 0.2, 0.2),
    **_of(IMAGES, "RandomPosterization", 4),
    **_of(
        IMAGES,
        "RandomColorDegeneration RandomGrayscale RandomInvert "
        "RandomPerspective RandomSaturation RandomSharpness",
        0.5,
    ),
    **_made(
        IMAGES,
        Equalization=lambda: Inside(layers.Equalization((0, 1), bins=8)),
    ),
    "CutMix": _labelled(layers.CutMix),
    "MixUp": _labelled(layers.MixUp),
    **_of_two(SERIES, "AdditiveAttention Attention", dropout=0.2),
    **_of_two(SERIES, "GroupQueryAttention", 3, 4, 2, dropout=0.2),
    **_of_two(SERIES, "MultiHeadAttention", 2, 3, dropout=0.2),
    **_of_two(
        VECTOR,
        "Add Average Concatenate Maximum Minimum Multiply Subtract",
    ),
    **_of_two(VECTOR, "Dot", 1),
    "Masking": Recipe(
        SERIES,
        lambda x: layers.GlobalAveragePooling1D()(layers.Masking()(x)),
        "linear",
    ),
    **_whole(
        integers(9, 5),
        Embedding=lambda x: layers.Dropout(0.2)(layers.Embedding(9, 3)(x)),
        IntegerLookup=lambda x: layers.IntegerLookup(
            vocabulary=[2, 3, 5], output_mode="multi_hot"
        )(x),
        CategoryEncoding=lambda x: layers.CategoryEncoding(9)(x),
        ReversibleEmbedding=_tied,
    ),
    **_whole(
        words(2),
        HashedCrossing=lambda x: layers.HashedCrossing(
            5, output_mode="one_hot"
        )((x[:, 0], x[:, 1])),
        Hashing=lambda x: layers.Embedding(5, 2)(layers.Hashing(5)(x)),
        StringLookup=lambda x: layers.StringLookup(
            vocabulary=["a", "b"], output_mode="count"
        )(x),
    ),
    **_whole(words(1), TextVectorization=_text),
    **_whole(fractions(2, 4), MaxNumBoundingBoxes=_boxes),
}
