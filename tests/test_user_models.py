"""Examples for a user's model."""

import keras
from keras import layers

from keras_towers.user_models import random_examples


def test_ids_are_known_to_every_embedding():
    words = keras.Input((9,), dtype="int32")
    tags = keras.Input((), dtype="int64")
    body = keras.Sequential([keras.Input((9,)), layers.Embedding(7, 2)])
    hidden = layers.Flatten()(body(words))
    outputs = layers.Concatenate()([hidden, layers.Embedding(30, 2)(tags)])
    model = keras.Model([words, tags], outputs)
    model.compile("sgd", "mse")
    (of_words, of_tags), _ = random_examples(model, "it", 100)
    assert (of_words.shape, of_tags.shape) == ((100, 9), (100,))
    assert set(of_words.ravel()) == set(range(7))
