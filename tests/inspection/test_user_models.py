"""Models that a user names, and examples for them."""

import re

import keras
import pytest
from keras import layers

from keras_towers.foundation.errors import TowerError
from keras_towers.inspection.user_models import (
    find_named,
    model_and_data,
    random_examples,
)

HERE = __name__


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


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("no_such_module:build", "no module named 'no_such_module'"),
        ("no_such.py:build", "cannot be imported: no module"),
        ("no_such", "names no function: give MODULE:FUNCTION"),
        (f"{HERE}:missing", "has no attribute 'missing'"),
        (f"{HERE}:findnamed", "attribute 'findnamed'. Did you mean 'find_name"),
        (f"{HERE}:HERE", "must be a function without arguments, but is 'tests"),
        (f"{HERE}:find_named", "must be a function without arguments, but"),
    ],
)
def test_what_is_no_function_is_refused(target, said):
    with pytest.raises(TowerError, match=re.escape(said)):
        find_named(target)


@pytest.mark.parametrize(
    ("built", "said"),
    [
        (3, "must return a compiled keras.Model, alone or as (model, x), "),
        (None, "but returned None"),
        ((keras.Sequential(), 1, 2, 3, 4), "(model, dataset), but returned"),
        (keras.Sequential(), "not compiled: call model.compile(optimizer"),
    ],
)
def test_what_is_no_compiled_model_is_refused(built, said):
    with pytest.raises(TowerError, match=re.escape(said)):
        model_and_data(built, "mine:build")


def test_no_examples_are_made_where_a_size_is_not_known():
    texts = keras.Sequential([keras.Input((None, 8)), layers.LSTM(4)])
    with pytest.raises(TowerError, match="its inputs have no known shape"):
        random_examples(texts, "mine:build", 5)
