"""The rows, and how they train."""

import pytest

from keras_towers.bench import worker
from keras_towers.bench.models import Stored
from keras_towers.bench.rows import ROWS, find
from keras_towers.bench.runner import Cell, Setting


def test_options_behind_a_name_are_those_of_the_strategy():
    row = find(ROWS, "tower:mode=cpu:exact=True")
    options = {"mode": "cpu", "exact": True}
    assert row.train.keywords == {"name": "tower", "options": options}
    assert row.plain == "plain"
    served = find(ROWS, "sync-replicas:ps=2")
    assert served.launcher(3) == ["--ps", "2", "--workers", "3"]
    assert served.train.keywords["options"] == {}
    assert find(ROWS, "multi-worker").launcher(2) == ["--workers", "2"]
    alone = ["--no-strategy", "--workers", "2"]
    assert find(ROWS, "compute").launcher(2) == alone
    byteps = ["-np", "2", "-H", "localhost:2", "--servers", "1"]
    assert find(ROWS, "byteps").launcher(2) == byteps


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["stock-one-device", "async", "tower:mode=cpu"]
)
def test_row_is_measured(name, devices, tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "_devices", lambda *given: devices[:2])
    setting = Setting("cpu", 64, 4, timeout_s=60)
    model = Stored("small", tmp_path)
    model.store(1000)
    row, cell = find(ROWS, name), Cell("small", name, 2, 0)
    measured = worker.train(row, cell, setting, model, tmp_path)
    assert len(measured["step_ms"]) == 4
    assert all(ms > 0 for ms in measured["step_ms"])
    assert len(measured["losses"]) == 20
