"""Models with random layers after ``Dense`` on sequences, and their data."""

import keras
import numpy as np
from keras import layers

_random = np.random.default_rng(4)
EXAMPLES = 21
BATCH = 8  # the last batch has 5 examples
WIDTH, LENGTH, WORDS = 8, 12, 11
SERIES = _random.normal(size=(EXAMPLES, LENGTH, WIDTH)).astype("float32")
IMAGES = _random.random((EXAMPLES, 8, 8, 3), "float32")
TOKENS = _random.integers(0, WORDS, (EXAMPLES, LENGTH)).astype("int32")
TARGETS = _random.normal(size=(EXAMPLES, 1)).astype("float32")


class Positions(layers.Layer):
    """Adds an embedding of each token's place."""

    def build(self, shape):
        self.places = self.add_weight(
            shape=shape[1:], initializer="random_normal", name="places"
        )

    def call(self, x):
        return x + self.places


def smallest():
    """One draw after ``Dense`` on inputs of rank 3."""
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((LENGTH, WIDTH)),
            layers.Dense(WIDTH),
            layers.Dropout(0.3),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1),
        ]
    )


def _attention(x):
    attention = layers.MultiHeadAttention(2, WIDTH // 2, dropout=0.3)
    return layers.Dropout(0.2)(attention(x, x))


def _mlp(x):
    x = layers.Dense(2 * WIDTH, "gelu")(x)
    x = layers.Dropout(0.3)(x)
    return layers.Dropout(0.3)(layers.Dense(WIDTH)(x))


def of_images_and_texts():
    """Of patches a block that normalizes first, of words one that does last."""
    keras.utils.set_random_seed(1)
    images = keras.Input(IMAGES.shape[1:])
    tokens = keras.Input((LENGTH,), dtype="int32")
    # Patches by a convolution and by a layer on what has been moved.
    x = layers.Reshape((-1, WIDTH))(layers.Conv2D(WIDTH, 4, 4)(images))
    moved = layers.Permute((1, 3, 2, 4, 5))(
        layers.Reshape((2, 4, 2, 4, 3))(images)
    )
    x = x + layers.Dense(WIDTH)(layers.Reshape((-1, 4 * 4 * 3))(moved))
    x = layers.Dropout(0.2)(Positions()(x))
    x = x + _attention(layers.LayerNormalization()(x))
    x = x + _mlp(layers.LayerNormalization()(x))
    seen = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    x = Positions()(layers.Embedding(WORDS, WIDTH)(tokens))
    x = layers.Dropout(0.2)(layers.LayerNormalization()(x))
    x = layers.LayerNormalization()(x + _attention(x))
    x = layers.LayerNormalization()(x + _mlp(x))
    read = layers.Dense(WIDTH, "tanh")(x[:, 0])
    both = layers.Dropout(0.3)(layers.Concatenate()([seen, read]))
    return keras.Model([images, tokens], layers.Dense(1)(both))


MODELS = {
    "smallest": (smallest, SERIES),
    "of both": (of_images_and_texts, [IMAGES, TOKENS]),
}


def make(name):
    """The compiled model, the same every time."""
    model = MODELS[name][0]()
    # Attention's steps are small: its errors of rounding are, too.
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def train(name, model):
    """An epoch, which ends with a smaller batch."""
    return model.fit(
        MODELS[name][1], TARGETS, batch_size=BATCH, shuffle=False, verbose=0
    )
