"""The rows, and how they train."""

import re

import pytest

from keras_towers.bench import rows, worker
from keras_towers.bench.meeting import Meeting
from keras_towers.bench.models import MODELS, BenchModel
from keras_towers.bench.plan import Cell, Setting
from keras_towers.bench.trainers import Workload
from keras_towers.errors import TowerError
from keras_towers.reduction import compression
from keras_towers.strategies import modes


def test_rows_name_every_compression_there_is():
    with pytest.raises(TowerError) as error:
        compression.resolve("?")
    listed = str(error.value).partition("one of ")[2]
    assert re.findall(r"'([\w-]+)'", listed) == list(rows.COMPRESSIONS)


def test_rows_name_every_mode_there_is():
    assert sorted(rows.MODES) == sorted(modes.MODES)


def test_every_row_is_compared_with_one_of_its_suite():
    for suite in rows.SUITES.values():
        others = {row.alone for row in suite.rows.values()} - {None}
        assert others <= set(suite.rows)


def test_torch_is_a_row_only_where_it_is_installed(monkeypatch):
    find = {"torch": None, "byteps": None}.get
    monkeypatch.setattr(rows.importlib.util, "find_spec", find)
    assert rows.PROCESSES.default_rows() == [
        row.name
        for row in rows.PROCESSES.rows.values()
        if row.default and row.needs not in ("torch", "byteps")
    ]


def test_modes_are_measured_only_if_asked_for():
    default = rows.TOWERS.default_rows()
    assert "towers" in default
    assert not {f"towers-{mode}" for mode in rows.MODES} & set(default)


@pytest.mark.parametrize("name", ["parameter-server", "async"])
def test_strategy_is_measured(name, devices, tmp_path):
    cell = Cell("training", "small", name, 2, 0)
    setting = Setting("cpu", 64, 4, timeout_s=60)
    meeting = Meeting(tmp_path, 0, 1)
    measured = worker.train(cell, setting, meeting, devices[:2])
    assert len(measured["step_ms"]) == 4
    assert all(ms > 0 for ms in measured["step_ms"])
    assert 0 < measured["loss"] < 10


def test_torch_refuses_a_model_it_cannot_build(tmp_path):
    pytest.importorskip("torch", reason="needs the extra torch, of PyTorch")
    work = Workload(MODELS["resnet50"], Meeting(tmp_path, 0, 1), [], 3, 4)
    row = rows.PROCESSES.rows["torch-compute"]
    with pytest.raises(TowerError, match="no PyTorch version of: ResNet50"):
        row.train(work).__enter__()


def test_parts_of_the_ranks_make_up_each_global_batch(tmp_path):
    shares = [
        Workload(MODELS["small"], Meeting(tmp_path, rank, 2), [], 3, steps=4)
        for rank in (0, 1)
    ]
    x, y = shares[0].data()
    parts = [share.part() for share in shares]
    for step in range(4):
        mine = slice(step * 3, step * 3 + 3)
        both = slice(step * 6, step * 6 + 6)
        assert (x[both] == [*parts[0][0][mine], *parts[1][0][mine]]).all()
        assert (y[both] == [*parts[0][1][mine], *parts[1][1][mine]]).all()


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
