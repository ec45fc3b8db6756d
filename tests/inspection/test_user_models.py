"""Models that a user names, and examples for them."""

import keras
import pytest
from keras import layers

from keras_towers.foundation.errors import TowerError
from keras_towers.inspection.user_models import find_named, random_examples


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


def test_a_module_is_given_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "script.py").write_text("1 / 0")
    with pytest.raises(TowerError, match="in folder.script:build$"):
        find_named("folder/script.py:build")
    with pytest.raises(TowerError, match=r"ZeroDiv.* \(script.py, line 1\)$"):
        find_named("folder.script:build")
