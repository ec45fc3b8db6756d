"""A recipe for every layer of Keras."""

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

Make = Callable[[], Any]


class Inside(layers.Layer):
    """A layer of one's own around one that a functional model cannot take."""

    def __init__(self, inner: layers.Layer):
        super().__init__()
        self.inner = inner

    def call(self, x: Tensors) -> Tensors:
        return self.inner(x)

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


def _of(x: np.ndarray, *names: str, **made: Make) -> dict[str, Recipe]:
    """Recipes of layers that take one tensor of floats, after a trained one.

    Args:
        x: the input.
        *names: classes that need no arguments.
        **made: functions that make a layer, by the name of its class.
    """

    def recipe(make: Make) -> Recipe:
        return Recipe(x, lambda tensor: make()(tensor), "linear")

    plain = {name: getattr(layers, name) for name in names}
    return {name: recipe(make) for name, make in {**plain, **made}.items()}


def _images(**made: Make) -> dict[str, Recipe]:
    """Recipes of layers that change images with values between 0 and 1."""

    def recipe(name: str, make: Make) -> Recipe:
        return Recipe(
            IMAGES,
            lambda tensor: make()(tensor),
            "sigmoid",
            in_graph=IN_GRAPH.get(name, ""),
        )

    return {name: recipe(name, make) for name, make in made.items()}


def _whole(x: np.ndarray, **built: Callable[[Tensors], Tensors]) -> dict:
    """Recipes that say themselves what becomes of the input."""
    return {name: Recipe(x, build) for name, build in built.items()}


def _numbers(x: np.ndarray, **built: Callable[[Tensors], Tensors]) -> dict:
    """The same, of numbers after a trained layer."""
    return {name: Recipe(x, build, "linear") for name, build in built.items()}


def _two(layer: Callable[[], Any]) -> Callable[[Tensors], Tensors]:
    """Give a layer two inputs."""
    return lambda x: layer()([x, layers.Dense(x.shape[-1])(x)])


def _two_apart(make: Make) -> Callable[[Tensors], Tensors]:
    """Give a layer its inputs one by one."""
    return lambda x: make()(x, layers.Dense(x.shape[-1])(x))


def _masked(x: Tensors) -> Tensors:
    pooled = layers.GlobalAveragePooling1D()
    return pooled(layers.Masking()(x))


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


def _pair(x: Tensors) -> Tensors:
    crossed = layers.HashedCrossing(5, output_mode="one_hot")
    return crossed((x[:, 0], x[:, 1]))


def _tied(x: Tensors) -> Tensors:
    layer = layers.ReversibleEmbedding(9, 4)
    return layer(layer(x), reverse=True)


def _labelled(make: Make) -> Callable[[Tensors], Tensors]:
    """Give a layer images with labels."""

    def build(x: Tensors) -> Tensors:
        labels = layers.Dense(3, "softmax")(layers.Flatten()(x))
        mixed = make()({"images": x, "labels": labels})
        both = layers.Flatten()(mixed["images"]), mixed["labels"]
        return layers.Concatenate()(both)

    return build


def _boxes(x: Tensors) -> Tensors:
    layer = layers.MaxNumBoundingBoxes(3, bounding_box_format="xyxy")
    boxes = {"boxes": x, "labels": x[..., 0]}
    images = layers.Reshape((2, 2, 2))(x)
    kept = layer({"images": images, "bounding_boxes": boxes})
    return kept["bounding_boxes"]["boxes"]


def _cell(make: Make) -> Make:
    """Run a cell without a loop, whose gradient takes long to trace."""
    return lambda: layers.RNN(make(), unroll=True)


VECTOR, SERIES = floats(6), floats(5, 4)
IMAGE, VOLUME = floats(6, 6, 2), floats(4, 4, 4, 2)
IMAGES = fractions(6, 6, 3)
VALUES: dict[str, Any] = {"value_range": (0, 1)}

IN_GRAPH = {
    "AugMix": "draws with Python's random, in a graph only while it is traced",
    "RandomElasticTransform": "in a graph transforms the first image only",
}

LAYERS: dict[str, Recipe] = {
    **_of(
        VECTOR,
        *("Identity", "ELU", "LeakyReLU", "PReLU", "ReLU", "Softmax"),
        *("BatchNormalization", "LayerNormalization", "RMSNormalization"),
        *("UnitNormalization", "Flatten"),
        ActivityRegularization=lambda: layers.ActivityRegularization(0.1, 0.1),
        Activation=lambda: layers.Activation("gelu"),
        AlphaDropout=lambda: layers.AlphaDropout(0.3),
        Dense=lambda: layers.Dense(3, "tanh"),
        Discretization=lambda: layers.Discretization([-0.5, 0.5]),
        Dropout=lambda: layers.Dropout(0.3),
        GaussianDropout=lambda: layers.GaussianDropout(0.3),
        GaussianNoise=lambda: layers.GaussianNoise(0.3),
        GroupNormalization=lambda: layers.GroupNormalization(2),
        Lambda=lambda: layers.Lambda(lambda x: x * 2),
        Normalization=lambda: layers.Normalization(mean=0.5, variance=2.0),
        Pipeline=lambda: layers.Pipeline([layers.Rescaling(2.0)]),
        RepeatVector=lambda: layers.RepeatVector(2),
        Rescaling=lambda: layers.Rescaling(2.0, 1.0),
        Reshape=lambda: layers.Reshape((2, 3)),
        SpectralNormalization=lambda: layers.SpectralNormalization(
            layers.Dense(3)
        ),
        TFSMLayer=_saved,
    ),
    **_of(
        SERIES,
        *("GlobalAveragePooling1D", "GlobalMaxPooling1D", "MaxPooling1D"),
        *("Cropping1D", "UpSampling1D", "ZeroPadding1D"),
        AveragePooling1D=lambda: layers.AveragePooling1D(2),
        AdaptiveAveragePooling1D=lambda: layers.AdaptiveAveragePooling1D(2),
        AdaptiveMaxPooling1D=lambda: layers.AdaptiveMaxPooling1D(2),
        Bidirectional=lambda: layers.Bidirectional(layers.GRU(2, dropout=0.2)),
        Conv1D=lambda: layers.Conv1D(3, 2),
        Conv1DTranspose=lambda: layers.Conv1DTranspose(3, 2),
        DepthwiseConv1D=lambda: layers.DepthwiseConv1D(2),
        EinsumDense=lambda: layers.EinsumDense("abc,cd->abd", (5, 3)),
        GRU=lambda: layers.GRU(2, dropout=0.3, recurrent_dropout=0.2),
        LSTM=lambda: layers.LSTM(2, dropout=0.3, recurrent_dropout=0.2),
        Permute=lambda: layers.Permute((2, 1)),
        SeparableConv1D=lambda: layers.SeparableConv1D(3, 2),
        SimpleRNN=lambda: layers.SimpleRNN(2, recurrent_dropout=0.3),
        SpatialDropout1D=lambda: layers.SpatialDropout1D(0.3),
        TimeDistributed=lambda: layers.TimeDistributed(layers.Dropout(0.3)),
    ),
    **_of(
        floats(2, 4),
        GRUCell=_cell(lambda: layers.GRUCell(2)),
        LSTMCell=_cell(lambda: layers.LSTMCell(2)),
        RNN=_cell(lambda: layers.SimpleRNNCell(2, dropout=0.2)),
        SimpleRNNCell=_cell(lambda: layers.SimpleRNNCell(2)),
        StackedRNNCells=_cell(
            lambda: layers.StackedRNNCells(
                [layers.LSTMCell(2), layers.GRUCell(3)]
            )
        ),
    ),
    **_of(
        IMAGE,
        *("GlobalAveragePooling2D", "GlobalMaxPooling2D", "MaxPooling2D"),
        *("UpSampling2D", "ZeroPadding2D"),
        AveragePooling2D=lambda: layers.AveragePooling2D(2),
        AdaptiveAveragePooling2D=lambda: layers.AdaptiveAveragePooling2D(2),
        AdaptiveMaxPooling2D=lambda: layers.AdaptiveMaxPooling2D(2),
        CenterCrop=lambda: layers.CenterCrop(4, 4),
        Conv2D=lambda: layers.Conv2D(3, 2),
        Conv2DTranspose=lambda: layers.Conv2DTranspose(3, 2),
        ConvLSTM1D=lambda: layers.ConvLSTM1D(2, 2, dropout=0.2),
        Cropping2D=lambda: layers.Cropping2D(1),
        DepthwiseConv2D=lambda: layers.DepthwiseConv2D(2),
        Resizing=lambda: layers.Resizing(4, 5),
        SeparableConv2D=lambda: layers.SeparableConv2D(3, 2),
        SpatialDropout2D=lambda: layers.SpatialDropout2D(0.3),
    ),
    **_of(
        VOLUME,
        *("GlobalAveragePooling3D", "GlobalMaxPooling3D", "MaxPooling3D"),
        *("UpSampling3D", "ZeroPadding3D", "Cropping3D"),
        AveragePooling3D=lambda: layers.AveragePooling3D(2),
        AdaptiveAveragePooling3D=lambda: layers.AdaptiveAveragePooling3D(2),
        AdaptiveMaxPooling3D=lambda: layers.AdaptiveMaxPooling3D(2),
        Conv3D=lambda: layers.Conv3D(3, 2),
        Conv3DTranspose=lambda: layers.Conv3DTranspose(3, 2),
        ConvLSTM2D=lambda: layers.ConvLSTM2D(2, 2, dropout=0.2),
        SpatialDropout3D=lambda: layers.SpatialDropout3D(0.3),
    ),
    **_of(
        floats(2, 3, 3, 3, 2),
        ConvLSTM3D=lambda: layers.ConvLSTM3D(2, 2, dropout=0.2),
    ),
    **_of(
        floats(64),
        MelSpectrogram=lambda: layers.MelSpectrogram(
            32, 16, sampling_rate=1000, num_mel_bins=4
        ),
    ),
    **_of(
        floats(64, 1),
        STFTSpectrogram=lambda: layers.STFTSpectrogram(
            frame_length=16, frame_step=8
        ),
    ),
    **_images(
        AugMix=lambda: layers.AugMix(num_chains=2, chain_depth=1, **VALUES),
        AutoContrast=lambda: layers.AutoContrast(**VALUES),
        ContrastLimitedAdaptiveHistogramEqualization=lambda: (
            layers.ContrastLimitedAdaptiveHistogramEqualization(
                tile_grid_size=(2, 2), **VALUES
            )
        ),
        Equalization=lambda: Inside(layers.Equalization(bins=8, **VALUES)),
        RandAugment=lambda: layers.RandAugment(num_ops=1, **VALUES),
        RandomBrightness=lambda: layers.RandomBrightness(0.3, **VALUES),
        RandomColorDegeneration=lambda: layers.RandomColorDegeneration(
            0.5, **VALUES
        ),
        RandomColorJitter=lambda: layers.RandomColorJitter(
            **VALUES,
            brightness_factor=0.2,
            contrast_factor=0.2,
            saturation_factor=0.2,
            hue_factor=0.1,
        ),
        RandomContrast=lambda: layers.RandomContrast(0.3, **VALUES),
        RandomCrop=lambda: layers.RandomCrop(5, 5),
        RandomElasticTransform=lambda: layers.RandomElasticTransform(**VALUES),
        RandomErasing=lambda: layers.RandomErasing(**VALUES),
        RandomFlip=lambda: layers.RandomFlip(),
        RandomGaussianBlur=lambda: layers.RandomGaussianBlur(**VALUES),
        RandomGrayscale=lambda: layers.RandomGrayscale(0.5),
        RandomHue=lambda: layers.RandomHue(0.2, **VALUES),
        RandomInvert=lambda: layers.RandomInvert(0.5, **VALUES),
        RandomPerspective=lambda: layers.RandomPerspective(0.5),
        RandomPosterization=lambda: layers.RandomPosterization(4, **VALUES),
        RandomRotation=lambda: layers.RandomRotation(0.2),
        RandomSaturation=lambda: layers.RandomSaturation(0.5, **VALUES),
        RandomSharpness=lambda: layers.RandomSharpness(0.5, **VALUES),
        RandomShear=lambda: layers.RandomShear(0.2, 0.2),
        RandomTranslation=lambda: layers.RandomTranslation(0.2, 0.2),
        RandomZoom=lambda: layers.RandomZoom(0.2),
        Solarization=lambda: layers.Solarization(0.3, **VALUES),
    ),
    **_numbers(
        SERIES,
        AdditiveAttention=_two(lambda: layers.AdditiveAttention(dropout=0.2)),
        Attention=_two(lambda: layers.Attention(dropout=0.2)),
        GroupQueryAttention=_two_apart(
            lambda: layers.GroupQueryAttention(3, 4, 2, dropout=0.2)
        ),
        Masking=_masked,
        MultiHeadAttention=_two_apart(
            lambda: layers.MultiHeadAttention(2, 3, dropout=0.2)
        ),
    ),
    **_numbers(
        VECTOR,
        Add=_two(layers.Add),
        Average=_two(layers.Average),
        Concatenate=_two(layers.Concatenate),
        Dot=_two(lambda: layers.Dot(1)),
        Maximum=_two(layers.Maximum),
        Minimum=_two(layers.Minimum),
        Multiply=_two(layers.Multiply),
        Subtract=_two(layers.Subtract),
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
        HashedCrossing=_pair,
        Hashing=lambda x: layers.Embedding(5, 2)(layers.Hashing(5)(x)),
        StringLookup=lambda x: layers.StringLookup(
            vocabulary=["a", "b"], output_mode="count"
        )(x),
    ),
    **_whole(words(1), TextVectorization=_text),
    **_whole(fractions(2, 4), MaxNumBoundingBoxes=_boxes),
    "CutMix": Recipe(IMAGES, _labelled(layers.CutMix), "sigmoid"),
    "MixUp": Recipe(IMAGES, _labelled(layers.MixUp), "sigmoid"),
}
