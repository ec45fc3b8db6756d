"""The rows, and how they train."""

import re
import types

import keras
import numpy as np
import pytest

from keras_towers.bench import rows, worker
from keras_towers.bench.meeting import Meeting
from keras_towers.bench.models import MODELS, BenchModel
from keras_towers.bench.plan import Cell, Setting
from keras_towers.bench.trainers import Workload, last_weights
from keras_towers.errors import TowerError
from keras_towers.reduction import compression
from keras_towers.strategies import modes


def test_rows_name_every_mode_and_compression_there_is():
    with pytest.raises(TowerError) as error:
        compression.resolve("?")
    listed = str(error.value).partition("one of ")[2]
    assert re.findall(r"'([\w-]+)'", listed) == list(rows.COMPRESSIONS)
    assert sorted(rows.MODES) == sorted(modes.MODES)


def test_every_row_is_compared_with_one_of_its_suite():
    for suite in rows.SUITES.values():
        others = {row.alone for row in suite.rows.values()} - {None}
        assert others <= set(suite.rows)


def test_rows_that_are_measured_if_none_is_named(monkeypatch):
    find = {"torch": None, "byteps": None}.get
    monkeypatch.setattr(rows.importlib.util, "find_spec", find)
    found = set(rows.PROCESSES.default_rows())
    assert {"strategy", "sync-replicas-1ps"} <= found
    # They are not installed, or only measured if asked for.
    others = {"torch-compute", "torch-ddp", "byteps", "sync-replicas-2ps"}
    assert others <= set(rows.PROCESSES.rows) - found
    towers = rows.TOWERS.default_rows()
    assert "towers" in towers
    assert not {f"towers-{mode}" for mode in rows.MODES} & set(towers)


@pytest.mark.long
@pytest.mark.parametrize("name", ["stock-one-device", "async"])
def test_row_is_measured(name, devices, tmp_path):
    cell = Cell("training", "small", name, 2, 0)
    setting = Setting("cpu", 64, 4, timeout_s=60)
    meeting = Meeting(tmp_path, 0, 1)
    measured = worker.train(cell, setting, meeting, devices[:2])
    assert len(measured["step_ms"]) == 4
    assert all(ms > 0 for ms in measured["step_ms"])
    assert 0 < measured["loss"] < 10


@pytest.mark.parametrize(
    "name", [n for n, model in MODELS.items() if isinstance(model, BenchModel)]
)
def test_torch_has_the_same_models(name):
    pytest.importorskip("torch", reason="needs the extra torch, of PyTorch")
    from keras_towers.bench.torch_loop import build

    weights = [w.shape for w in MODELS[name].build().trainable_variables]
    theirs = build(MODELS[name]).parameters()
    assert [sorted(shape) for shape in weights] == [
        sorted(parameter.shape) for parameter in theirs
    ]


@pytest.mark.parametrize(
    ("values", "dtype", "found"),
    [
        (2.0, "float32", [2.0]),
        (np.zeros(3), "bfloat16", [0.0] * 3),
        (np.ones((4, 300)), "float32", [1] * 1000),
    ],
)
def test_ranks_agree_on_weights_of_any_shape(values, dtype, found):
    last = keras.Variable(values, dtype=dtype)
    model = types.SimpleNamespace(trainable_variables=[None, last])
    assert last_weights(model) == found


def test_data_is_made_once_and_shared_by_the_ranks(tmp_path, monkeypatch):
    made = []

    def data(self, examples):
        made.append(examples)
        return np.arange(examples), -np.arange(examples)

    monkeypatch.setattr(type(MODELS["small"]), "data", data)
    works = [
        Workload(MODELS["small"], Meeting(tmp_path, rank, 2), [], 2, 3)
        for rank in (0, 1)
    ]
    assert works[1].data()[0] is works[1].data()[0]
    for work, wanted in zip(
        works, ([0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]), strict=True
    ):
        x, y = work.part()
        assert x.tolist() == (-y).tolist() == wanted
    assert made == [12, 12]
