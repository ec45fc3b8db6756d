"""Planning the field."""

import pytest

from keras_towers.bench.field import rows
from keras_towers.bench.field.plan import FieldCell, plan_field
from keras_towers.bench.field.runner import environment

pytestmark = pytest.mark.core


def test_row_is_measured_with_what_its_figures_are_relative_to():
    cells = plan_field(["a", "b"], ["torch-ddp", "towers"], [2, 4], 2)
    ranks = ["torch-ddp", "towers", "compute-tensorflow", "compute-torch"]
    each = [("keras-tensorflow", 1), ("keras-torch", 1)]
    each += [(row, count) for count in (2, 4) for row in ranks]
    assert cells == [
        FieldCell(model, row, count, repeat)
        for repeat in (0, 1)
        for model in ("a", "b")
        for row, count in each
    ]
    # One device is compared with the reference only.
    cells = plan_field(["a"], ["keras-jax"], [2], 1)
    assert [cell.row for cell in cells] == ["keras-tensorflow", "keras-jax"]


def test_row_that_is_not_installed_is_left_out_with_the_reason(monkeypatch):
    find = {"torch": None, "jax": "found", "horovod": None}.get
    monkeypatch.setattr(rows.importlib.util, "find_spec", find)
    able, missing = rows.split(["torch-ddp", "keras-jax", "horovod-raw"])
    assert able == ["keras-jax"]
    assert missing == {
        "torch-ddp": "torch is not installed: run "
        "`pip install 'keras-towers[field]'`",
        "horovod-raw": "horovod is not installed: run "
        "`keras-towers install horovod`",
    }


@pytest.mark.parametrize(
    ("model", "row", "replicas", "processes", "flag", "title"),
    [
        ("small", "keras-jax", 1, 1, "1", "1 device, keras-jax"),
        # JAX splits a CPU into devices, where one process has several.
        ("small", "jax-data-parallel", 4, 1, "4", "4 devices, jax-data-para"),
        ("my:build", "compute-jax", 4, 4, "1", "4 processes, compute-jax"),
    ],
)
def test_processes_and_titles(model, row, replicas, processes, flag, title):
    cell = FieldCell(model, row, replicas, 0)
    assert cell.processes == processes
    assert cell.title.startswith(f"{model}, {title}")
    flags = environment(cell, "cpu")["XLA_FLAGS"].split()
    assert flags[0].rpartition("=")[2] == flag
    assert environment(cell, "gpu") == {"KERAS_BACKEND": "jax"}
