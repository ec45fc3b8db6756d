"""How the rows train, in one process."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_towers.bench.meeting import Meeting
from keras_towers.bench.models import MODELS
from keras_towers.bench.trainers import Workload, last_weights


class Scale(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return x * self.scale


@pytest.mark.parametrize(
    ("last", "found"),
    [
        (layers.Dense(3), [0.0] * 3),
        (layers.Dense(3, use_bias=False, kernel_initializer="ones"), [1] * 12),
        (Scale(), [1.0]),
        (layers.Dense(3, dtype="bfloat16"), [0.0] * 3),
        (
            layers.Dense(300, use_bias=False, kernel_initializer="ones"),
            [1] * 1000,
        ),
    ],
)
def test_ranks_agree_on_weights_of_any_shape(last, found):
    model = keras.Sequential([keras.Input((4,)), last])
    assert last_weights(model) == found


def test_data_is_made_once_and_shared_by_the_ranks(tmp_path, monkeypatch):
    made = []

    def data(self, examples):
        made.append(examples)
        return np.arange(examples), np.arange(examples)

    monkeypatch.setattr(type(MODELS["small"]), "data", data)
    works = [
        Workload(MODELS["small"], Meeting(tmp_path, rank, 2), [], 2, 3)
        for rank in (0, 1)
    ]
    assert works[1].data()[0] is works[1].data()[0]
    assert [work.part()[0].tolist() for work in works] == [
        [0, 1, 4, 5, 8, 9],
        [2, 3, 6, 7, 10, 11],
    ]
    assert made == [12, 12]
