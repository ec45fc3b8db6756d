"""A recipe for every layer of Keras.

Most follow from the class: its name says what input it takes, and its
parameters have the same values in all layers.
"""

import functools
import inspect
import pathlib
import re
import tempfile

import keras
from keras import layers

from tests.exactness.classes.recipes import (
    NO_PART,
    Recipe,
    by_name,
    floats,
    fractions,
    integers,
    parameters,
    public,
    taken,
    there,
    words,
)

VECTOR, SERIES, PICTURES = floats(6), floats(5, 4), floats(6, 6, 2)
IMAGES = fractions(6, 6, 3)
OF_RANK = {"1D": SERIES, "2D": PICTURES, "3D": floats(4, 4, 4, 2)}
# By the name of a parameter.
GIVEN = by_name(
    ("axes chain_depth cropping num_ops", 1),
    ("n num_chains num_heads num_key_value_heads output_size pool_size", 2),
    ("filters head_dim kernel_size key_dim units", 3),
    ("height num_mel_bins num_query_heads", 4),
    ("width", 5),
    ("frame_step", 8),
    ("frame_length sequence_stride", 16),
    ("fft_length", 32),
    ("dropout recurrent_dropout", 0.2),
    ("brightness_factor contrast_factor hue_factor saturation_factor", 0.2),
    ("height_factor width_factor x_factor y_factor", 0.2),
    ("addition_factor factor l1 l2 rate stddev", 0.3),
    ("mean variance", 0.5),
    ("bin_boundaries", [-0.5, 0.5]),
    ("dims tile_grid_size", (2, 1)),
    ("target_shape", (2, 3)),
    ("value_range", (0, 1)),
    ("activation", "tanh"),
)
# Where a parameter of that name means something else, or has no name.
MORE = {
    "EinsumDense": {"equation": "abc,cd->abd", "output_shape": (5, 3)},
    "GroupNormalization": {"groups": 2},
    "RandomPosterization": {"factor": 4},
    "Rescaling": {"scale": 2},
}
INPUTS = by_name(
    ("EinsumDense GRU LSTM Permute SimpleRNN", SERIES),
    ("CenterCrop ConvLSTM1D Resizing", PICTURES),
    ("ConvLSTM2D", floats(2, 4, 4, 2)),
    ("ConvLSTM3D", floats(2, 3, 3, 3, 2)),
    ("MelSpectrogram", floats(64)),
    ("STFTSpectrogram", floats(64, 1)),
)


class Inside(layers.Layer):
    """A layer of one's own around one that a functional model cannot take."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return self.inner(x)

    def compute_output_shape(self, shape):
        return shape


def _attends(name):
    return name.endswith("Attention")


def _rank(name):
    return (re.findall("[123]D", name) or [""])[0]


def _input(cls):
    name = cls.__name__
    if "value_range" in parameters(cls) or name.startswith("Random"):
        return IMAGES
    other = SERIES if _attends(name) else OF_RANK.get(_rank(name), VECTOR)
    return INPUTS.get(name, other)


def _of_two(make):
    """A layer of two inputs, in a list or one by one."""

    def build(tensor):
        layer = make()
        both = tensor, layers.Dense(tensor.shape[-1])(tensor)
        takes_list = "inputs" in inspect.signature(layer.call).parameters
        return layer(list(both)) if takes_list else layer(*both)

    return build


def _made(x, **makes):
    """Recipes of layers after a trained layer, by functions that make them."""
    return {
        name: Recipe(
            x,
            lambda tensor, make=make: make()(tensor),
            "sigmoid" if x is IMAGES else "linear",
        )
        for name, make in makes.items()
    }


def _whole(x, trained=None, **builds):
    """Recipes that say themselves what becomes of the input."""
    return {name: Recipe(x, build, trained) for name, build in builds.items()}


def _following():
    """Recipes that follow from the class."""
    found = {}
    for cls, names in public("layers").items():
        name = cls.__name__ if cls.__name__ in names else names[0]
        arguments = taken(cls, GIVEN) | MORE.get(name, {})
        try:
            inspect.signature(cls.__init__).bind(None, **arguments)
        except TypeError:
            continue  # It needs one of its own.
        make = functools.partial(cls, **arguments)
        if _attends(name) or issubclass(cls, layers.Add.__base__):
            found |= _whole(_input(cls), "linear", **{name: _of_two(make)})
        else:
            found |= _made(_input(cls), **{name: make})
    return {n: recipe for n, recipe in found.items() if n not in NO_PART}


def _unrolled(cell):
    return layers.RNN(cell, unroll=True)


def _saved():
    """A layer from a model that was exported for serving."""
    inner = keras.Sequential([layers.Input((6,)), layers.Dense(3)])
    folder = tempfile.TemporaryDirectory()
    path = pathlib.Path(folder.name) / "saved"
    inner.export(path, verbose=False)
    layer = layers.TFSMLayer(path, call_endpoint="serve")
    layer.__dict__["folder"] = folder
    return layer


def _text(x):
    tokens = layers.TextVectorization(vocabulary=["a", "b", "c"])(x)
    return layers.GlobalAveragePooling1D()(layers.Embedding(9, 3)(tokens))


def _tied(x):
    layer = layers.ReversibleEmbedding(9, 4)
    return layer(layer(x), reverse=True)


def _labelled(name):
    """Mixes images with labels."""

    def build(x):
        labels = layers.Dense(3, "softmax")(layers.Flatten()(x))
        mixed = getattr(layers, name)()({"images": x, "labels": labels})
        both = layers.Flatten()(mixed["images"]), mixed["labels"]
        return layers.Concatenate()(both)

    return build


def _boxes(x):
    layer = layers.MaxNumBoundingBoxes(3, bounding_box_format="xyxy")
    boxes = {"boxes": x, "labels": x[..., 0]}
    images = layers.Reshape((2, 2, 2))(x)
    kept = layer({"images": images, "bounding_boxes": boxes})
    return kept["bounding_boxes"]["boxes"]


ALL_LAYERS = {
    **_following(),
    **_made(
        VECTOR,
        Lambda=lambda: layers.Lambda(lambda x: x * 2),
        Pipeline=lambda: layers.Pipeline([layers.Rescaling(2.0)]),
        SpectralNormalization=lambda: layers.SpectralNormalization(
            layers.Dense(3)
        ),
        TFSMLayer=_saved,
    ),
    **_made(
        SERIES,
        Bidirectional=lambda: layers.Bidirectional(layers.GRU(2, dropout=0.2)),
        TimeDistributed=lambda: layers.TimeDistributed(layers.Dropout(0.3)),
    ),
    # Without a loop, whose gradient takes long to trace.
    **_made(
        floats(2, 4),
        GRUCell=lambda: _unrolled(layers.GRUCell(2)),
        LSTMCell=lambda: _unrolled(layers.LSTMCell(2)),
        RNN=lambda: _unrolled(layers.SimpleRNNCell(2, dropout=0.2)),
        SimpleRNNCell=lambda: _unrolled(layers.SimpleRNNCell(2)),
        StackedRNNCells=lambda: _unrolled(
            layers.StackedRNNCells([layers.LSTMCell(2), layers.GRUCell(3)])
        ),
    ),
    **_made(
        IMAGES,
        Equalization=lambda: Inside(layers.Equalization((0, 1), bins=8)),
        RandomGrayscale=lambda: Inside(layers.RandomGrayscale(0.3)),
    ),
    **_whole(
        IMAGES, "sigmoid", CutMix=_labelled("CutMix"), MixUp=_labelled("MixUp")
    ),
    **_whole(
        SERIES,
        "linear",
        Masking=lambda x: layers.GlobalAveragePooling1D()(layers.Masking()(x)),
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
LAYERS = there("layers", ALL_LAYERS)
